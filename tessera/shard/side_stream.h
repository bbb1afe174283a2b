// Work of several streams of a device: SideStream, for copies beside what it computes; StreamOrder, for memory that passes from
// one stream to another.
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

// What the current stream of `device` was given so far: an event that tells when it is done.
std::shared_ptr<c10::Event> mark(c10::Device device);
// What the current stream of `device` is given from here on comes after `event`. The host does not wait.
void come_after(c10::Event& event, c10::Device device);

// What the host has in `numbers`, on `device`: on the CPU itself, else a copy by way of page-locked memory, for which the host
// does not wait.
at::Tensor sent_to(c10::Device device, const at::Tensor& numbers);

// The streams that were given work on some memory of a device. On the CPU nothing happens, on one stream no more than a
// comparison. One thread at a time.
class StreamOrder {
 public:
  // What the current stream is given from here on may write there: it comes after all that was given so far.
  void write(c10::Device device);
  // The current stream has the last writer's place; an event orders it already after all that counts.
  void take_over(c10::Device device);
  // It may read: it comes after what the last writer was given so far.
  void read(c10::Device device);
  // The same as write(), before keep(). Of a device that fails nothing is ordered.
  void end(c10::Device device) noexcept;
  // `memory` is about to be let go of: it is not lent again before all of that is done, and what comes before `used`.
  void keep(const at::Tensor& memory, c10::Event* used = nullptr) const noexcept;

 private:
  std::vector<c10::Stream> streams_;  // the last writer, and who read since
};

// A stream of its own, which it takes when it is first used; all calls for one device.
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
