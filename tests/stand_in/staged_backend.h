// Test support: what NCCL is to CUDA. A back end of torch for tensors of the stand-in, which travel by way of the host over
// Gloo. Calls meet in the order in which ranks make them.
#pragma once

#include <ATen/ATen.h>

#include <utility>
#include <vector>

#include "tests/comm/c10d/gloo_threads.h"

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
    std::vector<at::Tensor> host = {fetch(tensors[0])};
    return staged(gloo_->allreduce(host, options), host[0], tensors[0]);
  }
  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    std::vector<at::Tensor> host = {fetch(tensors[0])};
    return staged(gloo_->broadcast(host, options), host[0], tensors[0]);
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    at::Tensor to = fetch(out), from = fetch(in);
    return staged(gloo_->_allgather_base(to, from, options), to, out);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    at::Tensor to = fetch(out), from = fetch(in);
    return staged(gloo_->_reduce_scatter_base(to, from, options), to, out);
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                        std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& options) override {
    at::Tensor to = fetch(out), from = fetch(in);
    return staged(gloo_->alltoall_base(to, from, out_splits, in_splits, options), to, out);
  }

 private:
  class Work final : public c10d::Work {
   public:
    Work(WorkPtr inner, at::Tensor host, at::Tensor target)
        : inner_(std::move(inner)), host_(std::move(host)), target_(std::move(target)) {}
    bool wait(std::chrono::milliseconds timeout) override {
      inner_->wait(timeout);
      const at::NoGradGuard no_grad;
      target_.copy_(host_);
      return true;
    }

   private:
    WorkPtr inner_;
    at::Tensor host_, target_;
  };

  static at::Tensor fetch(const at::Tensor& t) {
    TORCH_CHECK(t.is_privateuseone(), "[staged] this back end takes tensors of a device");
    const at::NoGradGuard no_grad;
    return t.cpu();
  }
  static WorkPtr staged(WorkPtr inner, at::Tensor host, at::Tensor target) {
    return c10::make_intrusive<Work>(std::move(inner), std::move(host), std::move(target));
  }

  const BackendPtr gloo_;
};

// run_gloo_threads() whose process group has this back end for the device, as "cpu:gloo,cuda:nccl".
inline void run_staged_threads(int size, const std::function<void(int, TorchGroup)>& fn) {
  run_gloo_threads(size, [&](int rank, const TorchGroup& torch) {
    const auto gloo = torch->getBackend(c10::DeviceType::CPU);
    const auto store = c10::make_intrusive<c10d::PrefixStore>("staged", torch->getStore());
    torch->setBackend(c10::DeviceType::PrivateUse1, c10d::ProcessGroup::BackendType::CUSTOM,
                      c10::make_intrusive<StagedBackend>(gloo->merge(store, gloo->getBackendOptions(), rank, size)));
    fn(rank, torch);
  });
}

}  // namespace tessera::testing
