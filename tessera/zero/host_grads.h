// HostGrads: gradients in host memory, of a unit whose states the host updates; GradCopies: their way there.
//
// Note [Gradients leave]
//   A unit of a model on a device whose states live elsewhere has no gradient there between backwards. What a backward adds up
//   lies in a bucket of the pool; as soon as it is reduced it is copied to the host, on a stream beside the one that computes.
//   Nothing waits for that in the backward: a bucket is lent again when its copy is over, or, with kLeaving of them on their
//   way, after the device (not the host) was told to wait for the oldest. Who reads the gradients waits for their copy.
//   More gradients for a unit, in a later backward of the same step: what was there comes back to the device, is added to and
//   leaves again. A sum on the host would have to wait for the copies within the backward; this costs a link that works both
//   ways at once nothing that a backward does not hide, and the bits are those without offload, also in 16 bits.
//   With the reduction at the boundary (stage 1) contributions stay on the device until then.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <functional>
#include <memory>

#include "tessera/shard/buffer.h"
#include "tessera/shard/side_stream.h"

namespace tessera::zero {

class HostGrads final : public shard::Home {
 public:
  // `of_device`: of the gradients there. `pin`: in page-locked memory, which copies beside other work need.
  HostGrads(int64_t size, const at::TensorOptions& of_device, bool pin);

  shard::Residence residence() const override { return shard::Residence::Host; }
  shard::PendingView fetch(shard::Range range) override;
  void store(shard::Range range, const at::Tensor& values) override;

 private:
  friend class GradCopies;
  at::Tensor values_;
  std::shared_ptr<c10::Event> copied_;  // in either direction
};

// Between a device and host memory, in the order of the calls, beside what the device computes. Never waits, but in finish().
class GradCopies {
 public:
  // `release` is called once `from` may be written to by what the current stream is given.
  void leave(const at::Tensor& from, HostGrads& to, std::function<void()> release);
  // `to` holds them once the event was passed to shard::come_after().
  std::shared_ptr<c10::Event> come_back(HostGrads& from, const at::Tensor& to);
  void finish();  // everything is released

 private:
  struct Leaving {
    std::shared_ptr<c10::Event> copied;
    c10::Device device;
    std::function<void()> release;
  };
  void release_oldest();

  shard::SideStream stream_;
  std::deque<Leaving> leaving_;
};

}  // namespace tessera::zero
