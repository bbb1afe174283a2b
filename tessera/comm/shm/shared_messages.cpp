#include "tessera/comm/shm/shared_messages.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>

#include "tessera/base/error.h"
#include "tessera/comm/shm/segment.h"

namespace tessera::comm {
namespace {

constexpr size_t kBefore = 4096;      // before the tensor: the segment's secret, and how many have taken it
constexpr int64_t kLeast = 64 << 10;  // bytes; smaller ones are sooner copied than mapped

size_t size_of_segment(int64_t bytes) {
  return kBefore + (static_cast<size_t>(bytes) + kBefore - 1) / kBefore * kBefore;
}

std::atomic_ref<int64_t> taken_in(const ShmSegment& segment) {
  return std::atomic_ref<int64_t>(reinterpret_cast<int64_t*>(segment.data())[1]);
}

// A tensor that others can map.
struct Shared {
  std::shared_ptr<ShmSegment> segment;
  ShmPlace place;
  int64_t sent = 0;  // to so many ranks

  char* data() const { return segment->data() + kBefore; }
  bool is_taken() const { return taken_in(*segment).load(std::memory_order_acquire) >= sent; }
};
using SharedPtr = std::shared_ptr<Shared>;

class SharedMessages final : public PointToPoint {
 public:
  SharedMessages(PointToPointPtr inner, std::vector<bool> near) : inner_(std::move(inner)), near_(std::move(near)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  at::Device device() const override { return inner_->device(); }

  at::Tensor share(const at::Tensor& tensor) override {
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    const bool any = std::find(near_.begin(), near_.end(), true) != near_.end();
    if (bytes < kLeast || !any) return inner_->share(tensor);
    sweep();
    auto shared = std::make_shared<Shared>();
    shared->segment = ShmSegment::create(size_of_segment(bytes));
    shared->segment->reserve(0, shared->segment->size());
    shared->place = shared->segment->offer();
    char* const data = shared->data();
    made_[data] = shared;
    const at::Tensor copy =
        at::from_blob(data, tensor.sizes(), [shared](void*) {}, tensor.options().device(at::kCPU).requires_grad(false));
    const at::NoGradGuard guard;
    copy.copy_(tensor);
    return copy;
  }

  int64_t send(const at::Tensor& tensor, int to, int tag, Label label) override {
    sweep();
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    if (!is_shared(bytes, to)) return inner_->send(tensor, to, tag, label);
    const auto found = made_.find(static_cast<const char*>(tensor.const_data_ptr()));
    SharedPtr shared = found == made_.end() ? nullptr : found->second.lock();
    if (!shared || shared->segment->size() != size_of_segment(bytes)) {
      const at::Tensor copy = share(tensor);
      shared = made_.at(static_cast<const char*>(copy.const_data_ptr())).lock();
    }
    const ShmPlace& place = shared->place;
    const at::Tensor said = at::empty({kWords}, at::kLong);
    std::copy_n(std::array{place.pid, place.fd, place.secret}.data(), kWords, said.mutable_data_ptr<int64_t>());
    ++shared->sent;
    const int64_t number = inner_->send(said, to, tag, label);
    sent_.emplace(number, std::move(shared));
    return number;
  }

  at::Tensor take(at::IntArrayRef sizes, at::ScalarType dtype, int from, int tag, Label label) override {
    const int64_t bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
    if (!is_shared(bytes, from)) return inner_->take(sizes, dtype, from, tag, label);
    const at::Tensor said = at::empty({kWords}, at::kLong);
    inner_->receive(said, from, tag, label);
    const auto* word = said.const_data_ptr<int64_t>();
    const auto segment = ShmSegment::attach(ShmPlace{word[0], word[1], word[2]}, size_of_segment(bytes));
    auto own = segment->map_private();
    taken_in(*segment).fetch_add(1, std::memory_order_release);
    char* const data = own.get() + kBefore;
    return at::from_blob(data, sizes, [own = std::move(own)](void*) {}, at::TensorOptions(dtype));
  }

  void receive(const at::Tensor& tensor, int from, int tag, Label label) override {
    if (!is_shared(static_cast<int64_t>(tensor.nbytes()), from)) return inner_->receive(tensor, from, tag, label);
    const at::NoGradGuard guard;
    tensor.copy_(take(tensor.sizes(), tensor.scalar_type(), from, tag, label));
  }

  void settle(int64_t number) override {
    inner_->settle(number);
    sent_.erase(number);
  }
  // What is not mapped by then stays as it is: who has the place of a segment maps it soon, or never.
  void flush() override {
    inner_->flush();
    sweep();
  }

 private:
  static constexpr int64_t kWords = 3;

  bool is_shared(int64_t bytes, int peer) const {
    return bytes >= kLeast && peer >= 0 && peer < static_cast<int>(near_.size()) && near_[peer];
  }
  void sweep() {
    std::erase_if(sent_, [](const auto& entry) { return entry.second->is_taken(); });
    std::erase_if(made_, [](const auto& entry) { return entry.second.expired(); });
  }

  const PointToPointPtr inner_;
  const std::vector<bool> near_;
  std::map<const char*, std::weak_ptr<Shared>> made_;  // by where the tensor is
  std::map<int64_t, SharedPtr> sent_;                  // by number: not yet taken
};

}  // namespace

PointToPointPtr shared_messages(PointToPointPtr inner, std::vector<bool> near) {
  return std::make_shared<SharedMessages>(std::move(inner), std::move(near));
}

}  // namespace tessera::comm
