#include "tessera/comm/shm/shared_messages.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/comm/shm/segment.h"

namespace tessera::comm {
namespace {

constexpr size_t kMemoryPage = 4096;
constexpr int64_t kLeast = 64 << 10;  // bytes; smaller tensors are sooner copied than mapped

size_t round_to_pages(size_t bytes) {
  return (bytes + kMemoryPage - 1) / kMemoryPage * kMemoryPage;
}

// A tensor that other ranks can map.
struct Shared {
  std::shared_ptr<ShmSegment> segment;
  ShmAddress address;
  std::map<int, int64_t> sent;  // how often it was sent, by rank
};
using SharedPtr = std::shared_ptr<Shared>;

// How often rank `rank` has mapped a segment. The secret is before the counts of all ranks, the tensor behind them.
std::atomic_ref<int64_t> taken_in(const ShmSegment& segment, int rank) {
  return std::atomic_ref<int64_t>(reinterpret_cast<int64_t*>(segment.data())[1 + rank]);
}

// A tensor that was sent.
struct Sent {
  SharedPtr shared;
  int to;
  int64_t times;  // how often the rank got it, this message included

  bool is_taken() const { return taken_in(*shared->segment, to).load(std::memory_order_acquire) >= times; }
};

class SharedMessages final : public PointToPoint {
 public:
  SharedMessages(PointToPointPtr inner, std::vector<bool> near, std::chrono::milliseconds timeout)
      : inner_(std::move(inner)),
        near_(std::move(near)),
        timeout_(timeout),
        before_(round_to_pages((1 + near_.size()) * sizeof(int64_t))) {}

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
    shared->address = shared->segment->offer();
    char* const data = shared->segment->data() + before_;
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
    const ShmAddress& address = shared->address;
    const at::Tensor announced = at::empty({kWords}, at::kLong);
    std::copy_n(std::array{address.pid, address.fd, address.secret}.data(), kWords,
                announced.mutable_data_ptr<int64_t>());
    const int64_t times = ++shared->sent[to];
    const int64_t number = inner_->send(announced, to, tag, label);
    sent_.emplace(number, Sent{std::move(shared), to, times});
    return number;
  }

  at::Tensor take(at::IntArrayRef sizes, at::ScalarType dtype, int from, int tag, Label label) override {
    const int64_t bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
    if (!is_shared(bytes, from)) return inner_->take(sizes, dtype, from, tag, label);
    const at::Tensor announced = at::empty({kWords}, at::kLong);
    inner_->receive(announced, from, tag, label);
    const auto* word = announced.const_data_ptr<int64_t>();
    const auto segment = ShmSegment::attach(ShmAddress{word[0], word[1], word[2]}, size_of_segment(bytes));
    auto own = segment->map_private();
    taken_in(*segment, rank()).fetch_add(1, std::memory_order_release);
    char* const data = own.get() + before_;
    return at::from_blob(data, sizes, [own = std::move(own)](void*) {}, at::TensorOptions(dtype));
  }

  void receive(const at::Tensor& tensor, int from, int tag, Label label) override {
    if (!is_shared(static_cast<int64_t>(tensor.nbytes()), from)) return inner_->receive(tensor, from, tag, label);
    const at::NoGradGuard guard;
    tensor.copy_(take(tensor.sizes(), tensor.scalar_type(), from, tag, label));
  }

  void settle(int64_t number) override {
    inner_->settle(number);
    const auto found = sent_.extract(number);
    if (!found) return;
    const Sent& sent = found.mapped();
    // A rank that has the address maps the tensor at once: the sleeps are few.
    for (const auto end = std::chrono::steady_clock::now() + timeout_; !sent.is_taken();) {
      TESSERA_CHECK_DIST(std::chrono::steady_clock::now() < end, "comm", "rank ", rank(), " of ", size(), ": rank ",
                         sent.to, " did not take a message within ", timeout_.count(), " ms");
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  void flush() override {
    while (!sent_.empty())
      settle(sent_.begin()->first);
    inner_->flush();
  }

 private:
  static constexpr int64_t kWords = 3;

  size_t size_of_segment(int64_t bytes) const { return before_ + round_to_pages(static_cast<size_t>(bytes)); }
  bool is_shared(int64_t bytes, int peer) const {
    return bytes >= kLeast && peer >= 0 && peer < static_cast<int>(near_.size()) && near_[peer];
  }
  void sweep() {
    std::erase_if(sent_, [](const auto& entry) { return entry.second.is_taken(); });
    std::erase_if(made_, [](const auto& entry) { return entry.second.expired(); });
  }

  const PointToPointPtr inner_;
  const std::vector<bool> near_;
  const std::chrono::milliseconds timeout_;
  const size_t before_;                                // bytes of a segment that are before the tensor
  std::map<const char*, std::weak_ptr<Shared>> made_;  // by where the tensor is
  std::map<int64_t, Sent> sent_;                       // by number: messages not yet taken
};

}  // namespace

PointToPointPtr shared_messages(PointToPointPtr inner, std::vector<bool> near, std::chrono::milliseconds timeout) {
  return std::make_shared<SharedMessages>(std::move(inner), std::move(near), timeout);
}

}  // namespace tessera::comm
