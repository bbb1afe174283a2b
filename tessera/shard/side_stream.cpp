#include "tessera/shard/side_stream.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace tessera::shard {

std::shared_ptr<c10::Event> mark(c10::Device device) {
  auto event = std::make_shared<c10::Event>(device.type());
  event->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return event;
}

void come_after(c10::Event& event, c10::Device device) {
  event.block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

std::shared_ptr<c10::Event> SideStream::run(c10::Device device, const std::function<void()>& f) {
  if (!stream_) stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  const auto before = mark(device);
  const c10::StreamGuard guard(*stream_);
  come_after(*before, device);
  f();
  return mark(device);
}

}  // namespace tessera::shard
