// Test support: a group of CPU ranks for tensors of the stand-in accelerator (staging.h). The order of summation is that of the
// group below.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/comm/group.h"
#include "tests/stand_in/staging.h"

namespace tessera::testing {

class StagedGroup final : public comm::Group {
 public:
  // `fails`: calls whose label has it throw, before any other rank is asked for anything; null, "": none. `small`: counts calls
  // for 1 KiB at most, siblings' too; null: nothing does.
  explicit StagedGroup(comm::GroupPtr below, std::shared_ptr<const std::string> fails = nullptr,
                       std::atomic<int>* small = nullptr)
      : below_(std::move(below)), fails_(std::move(fails)), small_(small) {}

  int rank() const override { return below_->rank(); }
  int size() const override { return below_->size(); }
  std::string name() const override { return "staged"; }
  void abort(const std::string& reason) override { below_->abort(reason); }

 protected:
  using Pending = comm::Pending;
  using Label = comm::Label;

  Pending do_all_gather(at::Tensor out, at::Tensor in, Label label) override {
    return staged("all_gather", label, out, in, [&](const at::Tensor& host_out, const at::Tensor& host_in) {
      return below_->all_gather(host_out, host_in, label);
    });
  }
  Pending do_reduce_scatter(at::Tensor out, at::Tensor in, comm::ReduceOp op, Label label) override {
    return staged("reduce_scatter", label, out, in, [&](const at::Tensor& host_out, const at::Tensor& host_in) {
      return below_->reduce_scatter(host_out, host_in, op, label);
    });
  }
  Pending do_all_reduce(at::Tensor tensor, comm::ReduceOp op, Label label) override {
    return staged("all_reduce", label, tensor, tensor,
                  [&](const at::Tensor& host, const at::Tensor&) { return below_->all_reduce(host, op, label); });
  }
  Pending do_broadcast(at::Tensor tensor, int root, Label label) override {
    return staged("broadcast", label, tensor, tensor,
                  [&](const at::Tensor& host, const at::Tensor&) { return below_->broadcast(host, root, label); });
  }
  Pending do_all_to_all(at::Tensor out, at::Tensor in, std::vector<int64_t> out_splits, std::vector<int64_t> in_splits,
                        Label label) override {
    return staged("all_to_all", label, out, in, [&](const at::Tensor& host_out, const at::Tensor& host_in) {
      return below_->all_to_all(host_out, host_in, std::move(out_splits), std::move(in_splits), label);
    });
  }
  void do_barrier(Label label) override { below_->barrier(label); }
  comm::GroupPtr do_sibling(c10::Device) override {
    return std::make_shared<StagedGroup>(below_->sibling(), fails_, small_);
  }

 private:
  class Work final : public Pending::Work {
   public:
    Work(Pending inner, Staged call) : inner_(std::move(inner)), call_(std::move(call)) {}
    void wait() override {
      call_.order();
      inner_.wait();
      call_.bring();
    }
    bool wait_for(std::chrono::milliseconds limit) override { return inner_.wait_for(limit); }

   private:
    Pending inner_;
    Staged call_;
  };

  template <class Launch>
  Pending staged(const char* name, Label label, const at::Tensor& out, const at::Tensor& in, const Launch& launch) {
    const bool fails = fails_ && !fails_->empty() && label.find(*fails_) != Label::npos;
    TESSERA_CHECK_DIST(!fails, "staged", label, " fails, as was asked for");
    if (small_ != nullptr && in.nbytes() <= 1024) ++*small_;
    const at::NoGradGuard no_grad;
    const Staged call = stream_.begin(name, out, in);
    try {
      return Pending(std::make_unique<Work>(launch(call.out, call.in), call));
    } catch (...) {  // it does not run
      call.order();
      throw;
    }
  }

  StagingStream stream_;
  const comm::GroupPtr below_;
  const std::shared_ptr<const std::string> fails_;
  std::atomic<int>* const small_;
};

}  // namespace tessera::testing
