#include "tessera/zero/host_grads.h"

#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>

#include <utility>

#include "tessera/optim/norm.h"

namespace tessera::zero {

namespace {
constexpr size_t kLeaving = 1;  // buckets that are copied while the next one fills

// Runs f() on `stream`, once `before`, which may be null, is over there.
std::shared_ptr<c10::Event> after(const std::shared_ptr<c10::Event>& before, shard::SideStream& stream,
                                  c10::Device device, const std::function<void()>& f) {
  return stream.run(device, [&] {
    if (before) shard::come_after(*before, device);
    f();
  });
}
}  // namespace

HostGrads::HostGrads(int64_t size, const at::TensorOptions& of_device)
    : size_(size), options_(of_device.device(at::kCPU)) {}

void HostGrads::take_memory(const shard::HostSlabsPtr& slabs) {
  values_ =
      slabs && size_ > 0 ? slabs->take(bytes()).view(options_.dtype().toScalarType()) : at::zeros({size_}, options_);
}

shard::PendingView HostGrads::fetch(shard::Range range) {
  squares_.reset();
  // This view is torch's, which counts what is written to it: squares() looks at that.
  const at::Tensor there = values_.narrow(0, range.begin, range.size());
  return copied_ ? shard::PendingView(there, {copied_}) : shard::PendingView(there);
}

void HostGrads::store(shard::Range range, const at::Tensor& values) {
  fetch(range).wait().copy_(values);
}

void GradCopies::abandon() noexcept try { finish(); } catch (const std::exception&) {
  // A device that fails: its next use throws.
}

void GradCopies::leave(const at::Tensor& from, HostGrads& to, Release release) {
  try {
    to.squares_ = optim::squares_there(from);
    to.copied_ = after(to.copied_, there_, from.device(), [&] { to.values_.copy_(from, /*non_blocking=*/true); });
    to.version_ = to.values_._version();
  } catch (...) {
    release(nullptr);
    throw;
  }
  leaving_.push_back({to.copied_, std::move(release)});
  while (leaving_.size() > kLeaving || (!leaving_.empty() && leaving_.front().copied->query()))
    release_oldest();
}

void GradCopies::release_oldest() {
  const Leaving oldest = std::move(leaving_.front());
  leaving_.pop_front();
  oldest.release(oldest.copied);
}

std::shared_ptr<c10::Event> GradCopies::come_back(HostGrads& from, const at::Tensor& to) {
  return from.copied_ = after(from.copied_, back_, to.device(), [&] { to.copy_(from.values_, /*non_blocking=*/true); });
}

void GradCopies::finish() {
  while (!leaving_.empty())
    release_oldest();
}

}  // namespace tessera::zero
