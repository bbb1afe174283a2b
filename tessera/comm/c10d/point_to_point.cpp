#include "tessera/comm/c10d/point_to_point.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <map>

#include "tessera/base/error.h"
#include "tessera/comm/torch_backend/backend.h"

namespace tessera::comm {
namespace {

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
    Message message{{}, tensor, to, "send", std::string(label)};
    start(message, [&](std::vector<at::Tensor>& one) { return backend_->send(one, to, tag); });
    sent_.emplace(next_, std::move(message));
    return next_++;
  }

  void receive(const at::Tensor& tensor, int from, int tag, Label label) override {
    check("receive", tensor, from, tag, label);
    if (tensor.numel() == 0) return;
    Message message{{}, tensor, from, "receive", std::string(label)};
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
  struct Message {
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
  void start(Message& message, const F& body) {
    guarded(message, [&] {
      // As bytes: back ends know fewer dtypes than torch.
      const at::AutoDispatchBelowADInplaceOrView guard;
      std::vector<at::Tensor> one = {message.tensor.reshape(-1).view(at::kByte)};
      message.work = body(one);
    });
  }
  void wait(const Message& message) {
    guarded(message, [&] { message.work->wait(); });
  }

  template <class F>
  void guarded(const Message& message, const F& body) const {
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
  std::map<int64_t, Message> sent_;  // by number
  int64_t next_ = 0;
};

}  // namespace

PointToPointPtr c10d_point_to_point(c10::intrusive_ptr<c10d::Backend> backend, at::Device device) {
  return std::make_shared<C10dPointToPoint>(std::move(backend), device);
}

std::vector<PointToPointPtr> thread_point_to_point(int size, std::chrono::milliseconds timeout) {
  std::vector<PointToPointPtr> p2p;
  for (auto& share : shm_thread_shares(size, timeout))
    p2p.push_back(c10d_point_to_point(shm_backend(std::move(share))));
  return p2p;
}

}  // namespace tessera::comm
