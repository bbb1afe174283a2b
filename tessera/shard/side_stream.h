// Work of several streams of a device: SideStream, for copies beside its computations; StreamOrder, for memory that passes
// from one stream to another.
//
// Note [Streams of the user's]
//   Autograd runs a parameter's accumulation on the stream that was current when its hook was made, other nodes on the streams
//   of their forwards, and the end of a backward on its caller's. So what an engine does to one piece of memory comes on
//   several streams as soon as its user has one. Each such piece has a StreamOrder, and who gives a stream work on it says so
//   first. A call of an engine is ordered for the stream under which it is made, as an operator of torch's is: between calls
//   under different streams the user orders them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace c10 {
struct Event;
}  // namespace c10

namespace tessera::shard {

// Marks what the current stream of `device` was given so far: the event tells when it is done.
std::shared_ptr<c10::Event> mark(c10::Device device);
// Orders what the current stream of `device` is given from here on after `event`. The host does not wait.
void come_after(c10::Event& event, c10::Device device);

// The values of `numbers`, in host memory, on `device`: on the CPU the tensor itself, else a copy by way of page-locked memory,
// for which the host does not wait.
at::Tensor sent_to(c10::Device device, const at::Tensor& numbers);

// The streams that were given work on some memory of a device. On the CPU nothing happens, on one stream no more than a
// comparison. One thread at a time.
class StreamOrder {
 public:
  // The current stream may write from here on: its work comes after all that was given so far.
  void write(c10::Device device);
  // Gives the current stream the last writer's place; an event orders it already after all that counts.
  void take_over(c10::Device device);
  // The current stream may read: its work comes after what the last writer was given so far.
  void read(c10::Device device);
  // Does the same as write(), before keep(). On a device that fails nothing is ordered.
  void end(c10::Device device) noexcept;
  // `memory` is about to be let go of: it is not lent again before all of that work is done, and what comes before `used`.
  void keep(const at::Tensor& memory, c10::Event* used = nullptr) const noexcept;

 private:
  std::vector<c10::Stream> streams_;  // the last writer, and who read since
};

// A stream apart, taken when it is first used; all calls are for one device.
class SideStream {
 public:
  enum class After : uint8_t { Current, Nothing };
  // Calls f() with that stream as the current one. What f() starts comes after what earlier calls started and, with
  // After::Current, what the current stream was given before; the event tells when it is done. Where f() throws, what it
  // started comes before what the current stream is given from here on.
  std::shared_ptr<c10::Event> run(c10::Device device, const std::function<void()>& f, After after = After::Current);

 private:
  std::optional<c10::Stream> stream_;
};

}  // namespace tessera::shard
