// Test support: a group of CPU ranks for tensors of the stand-in accelerator. As NCCL's, its calls run on a stream of its own,
// after what the current one was given before; who waits for a call makes the current stream wait, not the host. The data
// travels by way of the host, where the order of summation is that of the group below.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/comm/group.h"
#include "tests/stand_in/memory.h"
#include "tests/stand_in/stand_in.h"

namespace tessera::testing {

class StagedGroup final : public comm::Group {
 public:
  // `fails`: calls whose label has it throw, before any other rank is asked for anything; null, "": none.
  explicit StagedGroup(comm::GroupPtr below, std::shared_ptr<const std::string> fails = nullptr)
      : below_(std::move(below)), fails_(std::move(fails)) {}

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
  comm::GroupPtr do_sibling(c10::Device) override { return std::make_shared<StagedGroup>(below_->sibling(), fails_); }

 private:
  // The memory of a tensor of the device, which does not keep it.
  static at::Tensor memory(const at::Tensor& t) {
    TESSERA_CHECK(!t.is_cpu(), "staged", "this group takes tensors of a device");
    TESSERA_ASSERT(t.is_contiguous());
    if (t.numel() == 0) return at::empty_like(t, at::kCPU);
    return at::from_blob(stand_in::to_host(t.data_ptr()), t.sizes(), t.options().device(at::kCPU));
  }
  static c10::impl::VirtualGuardImpl device() { return c10::impl::VirtualGuardImpl(at::kPrivateUse1); }

  class Work final : public Pending::Work {
   public:
    Work(Pending inner, at::Tensor host, at::Tensor target, c10::Event done)
        : inner_(std::move(inner)), host_(std::move(host)), target_(std::move(target)), done_(std::move(done)) {}
    void wait() override {
      done_.block(device().getStream(target_.device()));  // also where the call has failed
      inner_.wait();
      const at::NoGradGuard no_grad;
      memory(target_).copy_(host_);
    }
    bool wait_for(std::chrono::milliseconds limit) override { return inner_.wait_for(limit); }

   private:
    Pending inner_;
    at::Tensor host_, target_;
    c10::Event done_;
  };

  template <class Launch>
  Pending staged(const char* name, Label label, const at::Tensor& out, const at::Tensor& in, const Launch& launch) {
    const bool fails = fails_ && !fails_->empty() && label.find(*fails_) != Label::npos;
    TESSERA_CHECK_DIST(!fails, "staged", label, " fails, as was asked for");
    const at::NoGradGuard no_grad;
    if (!stream_) stream_ = device().getStreamFromGlobalPool(out.device());
    c10::Event before(at::kPrivateUse1), done(at::kPrivateUse1);
    before.record(device().getStream(out.device()));
    before.block(*stream_);
    {
      const c10::StreamGuard guard(*stream_);
      if (in.numel() > 0) tessera_stand_in_use(name, in.data_ptr(), static_cast<int64_t>(in.nbytes()), false);
      if (out.numel() > 0) tessera_stand_in_use(name, out.data_ptr(), static_cast<int64_t>(out.nbytes()), true);
    }
    done.record(*stream_);
    const at::Tensor host_in = memory(in).clone(), host_out = out.is_same(in) ? host_in : memory(out).clone();
    try {
      return Pending(std::make_unique<Work>(launch(host_out, host_in), host_out, out, std::move(done)));
    } catch (...) {  // it does not run
      done.block(device().getStream(out.device()));
      throw;
    }
  }

  std::optional<c10::Stream> stream_;
  const comm::GroupPtr below_;
  const std::shared_ptr<const std::string> fails_;
};

}  // namespace tessera::testing
