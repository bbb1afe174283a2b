#include "tessera/shard/side_stream.h"

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace tessera::shard {

namespace {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

std::shared_ptr<c10::Event> mark(c10::Stream stream) {
  auto event = std::make_shared<c10::Event>(stream.device_type());
  event->record(stream);
  return event;
}

void come_after(c10::Stream stream, c10::Stream before) {
  if (stream != before) mark(before)->block(stream);
}

}  // namespace

std::shared_ptr<c10::Event> mark(c10::Device device) {
  return mark(current_stream(device));
}

void come_after(c10::Event& event, c10::Device device) {
  event.block(current_stream(device));
}

at::Tensor sent_to(c10::Device device, const at::Tensor& numbers) {
  if (device.is_cpu()) return numbers;
  const at::Tensor locked = at::empty(numbers.sizes(), numbers.options().pinned_memory(true));
  return locked.copy_(numbers).to(device, /*non_blocking=*/true);
}

void StreamOrder::write(c10::Device device) {
  if (device.is_cpu()) return;
  const c10::Stream now = current_stream(device);
  for (const c10::Stream before : streams_)
    come_after(now, before);
  streams_.assign(1, now);
}

void StreamOrder::take_over(c10::Device device) {
  if (!device.is_cpu()) streams_.assign(1, current_stream(device));
}

void StreamOrder::read(c10::Device device) {
  if (device.is_cpu()) return;
  const c10::Stream now = current_stream(device);
  if (std::ranges::find(streams_, now) != streams_.end()) return;
  if (!streams_.empty()) come_after(now, streams_.front());
  streams_.push_back(now);
}

void StreamOrder::end(c10::Device device) noexcept try { write(device); } catch (const std::exception&) {
  // A device that fails: its next use throws.
}

void StreamOrder::keep(const at::Tensor& memory, c10::Event* used) const noexcept try {
  if (!memory.defined() || memory.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(memory.device().type());
  const auto record = [&](c10::Stream stream) { guard.recordDataPtrOnStream(memory.storage().data_ptr(), stream); };
  std::ranges::for_each(streams_, record);
  if (used == nullptr) return;
  come_after(*used, memory.device());
  record(current_stream(memory.device()));
} catch (const std::exception&) {
  // A device that fails: its next use throws.
}

std::shared_ptr<c10::Event> SideStream::run(c10::Device device, const std::function<void()>& f, After after) {
  if (!stream_) stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  const c10::Stream waits = current_stream(device);
  const c10::StreamGuard guard(*stream_);
  if (after == After::Current) come_after(*stream_, waits);
  try {
    f();
  } catch (...) {
    come_after(waits, *stream_);
    throw;
  }
  return mark(device);
}

}  // namespace tessera::shard
