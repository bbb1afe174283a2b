#include "tessera/comm/c10d/point_to_point.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <limits>
#include <map>
#include <set>

#include "tessera/base/error.h"
#include "tessera/comm/c10d/gloo.h"
#include "tessera/comm/c10d/watched_store.h"
#include "tessera/comm/hosts/hosts.h"
#include "tessera/comm/shm/shared_messages.h"
#include "tessera/comm/torch_backend/backend.h"

namespace tessera::comm {

at::Tensor PointToPoint::take(at::IntArrayRef sizes, at::ScalarType dtype, int from, int tag, Label label) {
  at::Tensor tensor = at::empty(sizes, at::TensorOptions(dtype).device(device()));
  receive(tensor, from, tag, label);
  return tensor;
}

at::Tensor PointToPoint::share(const at::Tensor& tensor) {
  const at::NoGradGuard guard;
  return at::empty(tensor.sizes(), at::TensorOptions(tensor.scalar_type()).device(device())).copy_(tensor);
}

namespace {

class Sibling final : public PointToPoint {
 public:
  Sibling(PointToPointPtr way, int first_tag) : way_(std::move(way)), first_tag_(first_tag) {}
  int rank() const override { return way_->rank(); }
  int size() const override { return way_->size(); }
  at::Device device() const override { return way_->device(); }
  at::Tensor share(const at::Tensor& tensor) override { return way_->share(tensor); }

  int64_t send(const at::Tensor& tensor, int to, int tag, Label label) override {
    return *sent_.insert(way_->send(tensor, to, mine(tag), label)).first;
  }
  void receive(const at::Tensor& tensor, int from, int tag, Label label) override {
    way_->receive(tensor, from, mine(tag), label);
  }
  at::Tensor take(at::IntArrayRef sizes, at::ScalarType dtype, int from, int tag, Label label) override {
    return way_->take(sizes, dtype, from, mine(tag), label);
  }
  void settle(int64_t number) override {
    sent_.erase(number);
    way_->settle(number);
  }
  void flush() override {
    while (!sent_.empty())
      settle(*sent_.begin());
  }

 private:
  int mine(int tag) const {
    TESSERA_ASSERT(tag < kSiblingTags, "tag ", tag);
    return tag < 0 ? tag : first_tag_ + tag;  // one below 0 is the way's error
  }

  const PointToPointPtr way_;
  const int first_tag_;
  std::set<int64_t> sent_;  // numbers of what nobody has asked for yet
};

class C10dPointToPoint final : public PointToPoint {
 public:
  C10dPointToPoint(c10::intrusive_ptr<c10d::Backend> backend, at::Device device)
      : backend_(std::move(backend)), device_(device) {}

  int rank() const override { return backend_->getRank(); }
  int size() const override { return backend_->getSize(); }
  at::Device device() const override { return device_; }

  int64_t send(const at::Tensor& tensor, int to, int tag, Label label) override {
    check("send", tensor, to, tag, label);
    while (!sent_.empty() && sent_.begin()->second.work->isCompleted())
      settle(sent_.begin()->first);
    if (tensor.numel() == 0) return next_++;
    Sent message{{}, tensor, to, "send", std::string(label)};
    start(message, [&](std::vector<at::Tensor>& one) { return backend_->send(one, to, tag); });
    sent_.emplace(next_, std::move(message));
    return next_++;
  }

  void receive(const at::Tensor& tensor, int from, int tag, Label label) override {
    check("receive", tensor, from, tag, label);
    if (tensor.numel() == 0) return;
    Sent message{{}, tensor, from, "receive", std::string(label)};
    start(message, [&](std::vector<at::Tensor>& one) { return backend_->recv(one, from, tag); });
    wait(message);
  }

  void settle(int64_t number) override {
    if (const auto sent = sent_.extract(number)) wait(sent.mapped());
  }

  void flush() override {
    while (!sent_.empty())
      settle(sent_.begin()->first);
  }

 private:
  struct Sent {
    c10::intrusive_ptr<c10d::Work> work;
    at::Tensor tensor;
    int peer;
    const char* call;
    std::string label;
  };

  void check(const char* call, const at::Tensor& tensor, int peer, int tag, Label label) const {
    TESSERA_CHECK_VALUE(peer >= 0 && peer < size() && peer != rank(), "comm", call, " (", label, "): rank ", rank(),
                        " of ", size(), " has no rank ", peer, " to talk to");
    TESSERA_CHECK_VALUE(tag >= 0, "comm", call, " (", label, "): a tag must be >= 0, got ", tag);
    TESSERA_CHECK_VALUE(tensor.defined() && tensor.device().type() == device_.type() && tensor.is_contiguous(), "comm",
                        call, " (", label, "): takes contiguous tensors on ", device_);
  }

  template <class F>
  void start(Sent& message, const F& body) {
    guarded(message, [&] {
      // Messages are bytes: back ends know fewer dtypes than torch.
      const at::AutoDispatchBelowADInplaceOrView guard;
      std::vector<at::Tensor> one = {message.tensor.reshape(-1).view(at::kByte)};
      message.work = body(one);
    });
  }
  void wait(const Sent& message) {
    guarded(message, [&] { message.work->wait(); });
  }

  template <class F>
  void guarded(const Sent& message, const F& body) const {
    std::string text;
    try {
      body();
      return;
    } catch (const c10::Error& error) {
      text = error.what_without_backtrace();
    } catch (const std::exception& error) {
      text = error.what();
    }
    TESSERA_CHECK_DIST(false, "comm", "rank ", rank(), " of ", size(), ": ", message.call, " ",
                       std::string_view(message.call) == "send" ? "to" : "from", " rank ", message.peer, " (",
                       message.label, ", ", message.tensor.nbytes(), " B) failed: ", text);
  }

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const at::Device device_;
  std::map<int64_t, Sent> sent_;  // by number
  int64_t next_ = 0;
};

}  // namespace

PointToPointPtr sibling(const PointToPointPtr& way, int64_t number) {
  constexpr int kApart = 2 * kSiblingTags;
  TESSERA_CHECK(number <= std::numeric_limits<int>::max() / kApart, "comm", "messages between the same ranks have had ",
                number, " siblings, of which each has tags of its own; make comm::Parts anew");
  way->siblings_ = std::max(way->siblings_, number + 1);
  return std::make_shared<Sibling>(way, static_cast<int>(number) * kApart);
}

PointToPointPtr c10d_point_to_point(c10::intrusive_ptr<c10d::Backend> backend, at::Device device) {
  return std::make_shared<C10dPointToPoint>(std::move(backend), device);
}

PointToPointPtr store_point_to_point(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                     std::chrono::milliseconds timeout, bool shares, const SideThreadsPtr& threads) {
  const auto fresh = watch_fresh_store(store, "messages", rank, size);
  const auto at = [&](const char* name) { return c10::make_intrusive<c10d::PrefixStore>(name, fresh); };
  const auto hosts = group_by_host(exchange(*fresh, rank, size, "hosts", host_id()));
  const bool one_host = hosts.count() == 1;
  if (!shares) return c10d_point_to_point(gloo_backend(at("gloo"), rank, size, timeout, one_host));
  std::vector<bool> near;
  for (const int host : hosts.of_rank)
    near.push_back(host == hosts.of_rank[rank]);
  return shared_messages(c10d_point_to_point(point_to_point_backend(at("any"), rank, size, timeout, one_host, threads)),
                         std::move(near), timeout);
}

std::vector<PointToPointPtr> thread_point_to_point(int size, std::chrono::milliseconds timeout) {
  std::vector<PointToPointPtr> p2p;
  for (auto& share : shm_thread_shares(size, timeout))
    p2p.push_back(c10d_point_to_point(shm_backend(std::move(share))));
  return p2p;
}

}  // namespace tessera::comm
