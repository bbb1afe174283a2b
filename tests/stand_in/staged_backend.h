// Test support: what NCCL is to CUDA. A back end of torch for tensors of the stand-in (staging.h), which travel over Gloo. Calls
// meet in the order in which ranks make them.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>
#include <utility>
#include <vector>

#include "tests/stand_in/staging.h"

namespace tessera::testing {

class StagedBackend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

  explicit StagedBackend(BackendPtr gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "staged"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  bool supportsSplitting() const override { return true; }
  BackendPtr split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                   const c10::intrusive_ptr<Options>& options) override {
    return c10::make_intrusive<StagedBackend>(gloo_->split(store, ranks, options));
  }

  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    return staged("all_reduce", tensors[0], tensors[0], [&](Host& host, Host&) {
      std::vector<at::Tensor> all{host};
      return gloo_->allreduce(all, options);
    });
  }
  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    return staged("broadcast", tensors[0], tensors[0], [&](Host& host, Host&) {
      std::vector<at::Tensor> all{host};
      return gloo_->broadcast(all, options);
    });
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    return staged("all_gather", out, in,
                  [&](Host& to, Host& from) { return gloo_->_allgather_base(to, from, options); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    return staged("reduce_scatter", out, in,
                  [&](Host& to, Host& from) { return gloo_->_reduce_scatter_base(to, from, options); });
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                        std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& options) override {
    return staged("all_to_all", out, in,
                  [&](Host& to, Host& from) { return gloo_->alltoall_base(to, from, out_splits, in_splits, options); });
  }

 private:
  using Host = at::Tensor;

  class Work final : public c10d::Work {
   public:
    Work(WorkPtr inner, Staged call) : inner_(std::move(inner)), call_(std::move(call)) {}
    bool isCompleted() override { return call_.done->query() && inner_->isCompleted(); }
    bool wait(std::chrono::milliseconds timeout) override {
      call_.order();
      inner_->wait(timeout);
      call_.bring();
      return true;
    }

   private:
    WorkPtr inner_;
    Staged call_;
  };

  template <class Launch>
  WorkPtr staged(const char* name, const at::Tensor& out, const at::Tensor& in, const Launch& launch) {
    const at::NoGradGuard no_grad;
    Staged call = stream_.begin(name, out, in);
    WorkPtr inner = launch(call.out, call.in);
    return c10::make_intrusive<Work>(std::move(inner), std::move(call));
  }

  const BackendPtr gloo_;
  StagingStream stream_;
};

// `group` has this back end, over `gloo`, for the stand-in's tensors from now on, as "cpu:gloo,cuda:nccl". A group has one back end
// of each type: of this one no other is.
inline void stage(c10d::ProcessGroup& group, c10::intrusive_ptr<c10d::Backend> gloo) {
  const std::string name = group.getGroupName();
  group.setBackend(c10::DeviceType::PrivateUse1, c10d::ProcessGroup::BackendType::UCC,
                   c10::make_intrusive<StagedBackend>(std::move(gloo)));
  group.setGroupName(name);  // of all its back ends
}

}  // namespace tessera::testing
