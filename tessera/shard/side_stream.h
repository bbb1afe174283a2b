// SideStream: copies between a device and the host that go on beside what the device computes.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <optional>

namespace c10 {
struct Event;
}  // namespace c10

namespace tessera::shard {

// What the current stream of `device` was given so far: an event that tells when it is done.
std::shared_ptr<c10::Event> mark(c10::Device device);
// What the current stream of `device` is given from here on comes after `event`. The host does not wait.
void come_after(c10::Event& event, c10::Device device);

// A stream of its own, which it takes when it is first used; all calls for one device.
class SideStream {
 public:
  // Calls f() with that stream as the current one. What f() starts comes after what the current stream was given before, and
  // after what earlier calls started; the event tells when it is done.
  std::shared_ptr<c10::Event> run(c10::Device device, const std::function<void()>& f);

 private:
  std::optional<c10::Stream> stream_;
};

}  // namespace tessera::shard
