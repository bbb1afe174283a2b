// Test support: how tensors of the stand-in accelerator travel between ranks, by way of the host. As with NCCL, calls run on a
// stream of their own, after what the current one was given before, and who waits for one makes the current stream wait.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <optional>
#include <utility>

#include "tests/stand_in/memory.h"
#include "tests/stand_in/stand_in.h"

namespace tessera::testing {

inline c10::impl::VirtualGuardImpl stand_in_guard() {
  return c10::impl::VirtualGuardImpl(at::kPrivateUse1);
}

// The memory of a tensor of the device, which does not keep it.
inline at::Tensor host_memory(const at::Tensor& t) {
  TORCH_CHECK(t.is_privateuseone() && t.is_contiguous(), "[staged] ranks exchange tensors of a device");
  if (t.numel() == 0) return at::empty_like(t, at::kCPU);
  return at::from_blob(stand_in::to_host(t.data_ptr()), t.sizes(), t.options().device(at::kCPU));
}

// One call: what goes and comes on the host.
struct Staged {
  at::Tensor in, out;
  at::Tensor target;
  std::shared_ptr<c10::Event> done;

  // What the current stream is given from here on comes after the call; it has to, whether or not that went well.
  void order() const { done->block(stand_in_guard().getStream(target.device())); }
  // It went well.
  void bring() const {
    const at::NoGradGuard no_grad;
    host_memory(target).copy_(out);
  }
};

class StagingStream {
 public:
  // A call `name` that reads `in` and writes `out`, which may be the same.
  Staged begin(const char* name, const at::Tensor& out, const at::Tensor& in) {
    const at::NoGradGuard no_grad;
    if (!stream_) stream_ = stand_in_guard().getStreamFromGlobalPool(out.device());
    c10::Event before(at::kPrivateUse1);
    before.record(stand_in_guard().getStream(out.device()));
    before.block(*stream_);
    {
      const c10::StreamGuard guard(*stream_);
      if (in.numel() > 0) tessera_stand_in_use(name, in.data_ptr(), static_cast<int64_t>(in.nbytes()), false);
      if (out.numel() > 0) tessera_stand_in_use(name, out.data_ptr(), static_cast<int64_t>(out.nbytes()), true);
    }
    const auto done = std::make_shared<c10::Event>(at::kPrivateUse1);
    done->record(*stream_);
    const at::Tensor there = host_memory(in).clone();
    return {there, out.is_same(in) ? there : host_memory(out).clone(), out, done};
  }

 private:
  std::optional<c10::Stream> stream_;
};

}  // namespace tessera::testing
