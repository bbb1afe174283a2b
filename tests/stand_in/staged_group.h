// Test support: a group of CPU ranks for tensors of a device, which travel by way of the host. The order of summation is
// that of the group below.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "tessera/base/error.h"
#include "tessera/comm/group.h"

namespace tessera::testing {

class StagedGroup final : public comm::Group {
 public:
  explicit StagedGroup(comm::GroupPtr below) : below_(std::move(below)) {}

  int rank() const override { return below_->rank(); }
  int size() const override { return below_->size(); }
  std::string name() const override { return "staged"; }
  void abort(const std::string& reason) override { below_->abort(reason); }

 protected:
  using Pending = comm::Pending;
  using Label = comm::Label;

  Pending do_all_gather(at::Tensor out, at::Tensor in, Label label) override {
    return staged(out, [&](const at::Tensor& host) { return below_->all_gather(host, fetch(in), label); });
  }
  Pending do_reduce_scatter(at::Tensor out, at::Tensor in, comm::ReduceOp op, Label label) override {
    return staged(out, [&](const at::Tensor& host) { return below_->reduce_scatter(host, fetch(in), op, label); });
  }
  Pending do_all_reduce(at::Tensor tensor, comm::ReduceOp op, Label label) override {
    return staged(tensor, [&](const at::Tensor& host) { return below_->all_reduce(host, op, label); });
  }
  Pending do_broadcast(at::Tensor tensor, int root, Label label) override {
    return staged(tensor, [&](const at::Tensor& host) { return below_->broadcast(host, root, label); });
  }
  Pending do_all_to_all(at::Tensor out, at::Tensor in, std::vector<int64_t> out_splits, std::vector<int64_t> in_splits,
                        Label label) override {
    return staged(out, [&](const at::Tensor& host) {
      return below_->all_to_all(host, fetch(in), std::move(out_splits), std::move(in_splits), label);
    });
  }
  void do_barrier(Label label) override { below_->barrier(label); }
  comm::GroupPtr do_sibling(c10::Device) override { return std::make_shared<StagedGroup>(below_->sibling()); }

 private:
  // As NCCL, it has no way for tensors of the host.
  static at::Tensor fetch(const at::Tensor& t) {
    TESSERA_CHECK(!t.is_cpu(), "staged", "this group takes tensors of a device");
    return t.cpu();
  }

  class Work final : public Pending::Work {
   public:
    Work(Pending inner, at::Tensor host, at::Tensor target)
        : inner_(std::move(inner)), host_(std::move(host)), target_(std::move(target)) {}
    void wait() override {
      inner_.wait();
      const at::NoGradGuard no_grad;
      target_.copy_(host_);
    }
    bool wait_for(std::chrono::milliseconds limit) override { return inner_.wait_for(limit); }

   private:
    Pending inner_;
    at::Tensor host_, target_;
  };

  template <class Launch>
  static Pending staged(const at::Tensor& target, const Launch& launch) {
    const at::NoGradGuard no_grad;
    at::Tensor host = fetch(target);
    Pending inner = launch(host);
    return Pending(std::make_unique<Work>(std::move(inner), std::move(host), target));
  }

  const comm::GroupPtr below_;
};

}  // namespace tessera::testing
