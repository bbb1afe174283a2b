// HostGrads: gradients in host memory, of a unit whose states live elsewhere; GradCopies: their way there.
//
// Note [Gradients leave]
//   Where the host updates a unit of a device, its gradients lie in host memory between backwards; where its states only pass
//   through the device (Note [Where an update is] in tile.h), in steps of several backwards: else they are there when the memory of
//   activations is free again, and would pay the link twice.
//   - A backward adds them up in a bucket of the pool, on the device. Once reduced they are copied to the host, on a stream
//     beside the one that computes.
//   - The backward waits for no copy. A bucket goes back to the pool when its copy is over. Where more than kLeaving copies
//     are on their way, the oldest one's bucket goes back at once, with the copy's event: the stream that writes to it next
//     waits for that, and no other.
//   - Who reads the gradients waits for their copy. The norm does not: the device makes the squares as they leave.
//   - A later backward of the same step brings them back to the device, adds to them and copies them out again. To add on
//     the host, it would have to wait for the copies. A link that works both ways at once hides the way back, and the bits
//     are those without offload, also in 16 bits.
//   - With the reduction at the boundary (stage 1) contributions stay on the device until then.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <functional>
#include <memory>

#include "tessera/shard/buffer.h"
#include "tessera/shard/host_slabs.h"
#include "tessera/shard/side_stream.h"

namespace tessera::zero {

class HostGrads final : public shard::Home {
 public:
  // `of_device`: options of the gradients on the device. There is no memory before take_memory() was called.
  HostGrads(int64_t size, const at::TensorOptions& of_device);
  int64_t bytes() const { return size_ * static_cast<int64_t>(options_.dtype().itemsize()); }
  // Makes the memory, of zeros. `slabs`: page-locked memory, which copies beside other work need; null: ordinary memory.
  void take_memory(const shard::HostSlabsPtr& slabs);

  shard::Residence residence() const override { return shard::Residence::Host; }
  shard::PendingView fetch(shard::Range range) override;
  void store(shard::Range range, const at::Tensor& values) override;

  // The sum of squares of these gradients, on the device, where they were squared as they left and nobody, who might have written
  // to them, has asked for them since; else undefined.
  at::Tensor squares() const { return values_.defined() && values_._version() == version_ ? squares_ : at::Tensor(); }

 private:
  friend class GradCopies;
  int64_t size_;
  at::TensorOptions options_;
  at::Tensor values_;
  at::Tensor squares_;
  int64_t version_ = 0;                 // the values' version when squares_ was made
  std::shared_ptr<c10::Event> copied_;  // in either direction
};

// Copies between a device and host memory, both ways at once, beside what the device computes; copies of the same gradients are
// in the order of the calls. No call but finish() waits.
class GradCopies {
 public:
  ~GradCopies() { abandon(); }
  // `release` is called once `from` may be written to by what comes after the event.
  using Release = std::function<void(std::shared_ptr<c10::Event>)>;
  void leave(const at::Tensor& from, HostGrads& to, Release release);
  // `to` holds the gradients once the event was passed to shard::come_after().
  std::shared_ptr<c10::Event> come_back(HostGrads& from, const at::Tensor& to);
  void finish();            // waits until everything is released
  void abandon() noexcept;  // does the same; what fails is forgotten

 private:
  struct Leaving {
    std::shared_ptr<c10::Event> copied;
    Release release;
  };
  void release_oldest();

  shard::SideStream there_, back_;
  std::deque<Leaving> leaving_;
};

}  // namespace tessera::zero
