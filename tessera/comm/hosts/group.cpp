#include "tessera/comm/hosts/group.h"

#include <ATen/core/grad_mode.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/comm/hosts/stages.h"
#include "tessera/comm/process_owner.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

// What the siblings have in common: the first cause of failure, and whom to tell.
class FailureState {
 public:
  explicit FailureState(std::shared_ptr<ShmWorld> here) : here_(std::move(here)) {}

  std::string cause() {
    const std::scoped_lock lock(mutex_);
    return cause_;
  }
  void add(const GroupPtr& between) {
    const std::scoped_lock lock(mutex_);
    between_.push_back(between);
  }
  // The ranks of this host hear of a failure in memory; the others that this one aborts, through the back end at hand.
  void fail(const std::string& cause, const std::string& reason) {
    if (!owner_.is_here()) return;
    std::vector<GroupPtr> groups;
    {
      const std::scoped_lock lock(mutex_);
      if (!cause_.empty()) return;
      cause_ = cause;
      for (const auto& group : between_) {
        if (auto held = group.lock()) groups.push_back(std::move(held));
      }
    }
    here_->fail(cause);
    for (const GroupPtr& group : groups)
      group->abort(reason);
  }

 private:
  const ProcessOwner owner_;
  const std::shared_ptr<ShmWorld> here_;
  std::mutex mutex_;
  std::string cause_;
  std::vector<std::weak_ptr<Group>> between_;
};

// A call on its way through the stages.
struct QueuedCall {
  OpInfo info;
  std::function<void()> go;
  Clock::time_point launched = Clock::now();
  bool finished = false;  // the queue's mutex guards it, as the rest
  std::string cause{};    // why the call failed; empty when it did not
};
using QueuedCallPtr = std::shared_ptr<QueuedCall>;

// The thread of one group; made by make_owned(). It holds what calls in flight need, and ends with the group and its last handle.
class CallQueue {
 public:
  CallQueue(HostsPlace place, std::shared_ptr<FailureState> failure)
      : place_(std::move(place)), failure_(std::move(failure)), thread_([this] { run(); }) {
    failure_->add(place_.between);
  }
  ~CallQueue() {
    {
      const std::scoped_lock lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  CallQueue(const CallQueue&) = delete;
  CallQueue& operator=(const CallQueue&) = delete;

  const HostsPlace& place() const { return place_; }
  FailureState& failure() const { return *failure_; }
  const std::shared_ptr<FailureState>& shared_failure() const { return failure_; }

  QueuedCallPtr launch(OpInfo info, std::function<void()> go) {
    check_owner(info);
    if (const auto cause = failure_->cause(); !cause.empty())
      throw_failed(place_.rank, place_.size(), info, 0.0, cause);
    auto call = std::make_shared<QueuedCall>(QueuedCall{.info = std::move(info), .go = std::move(go)});
    {
      const std::scoped_lock lock(mutex_);
      queue_.push_back(call);
    }
    changed_.notify_all();
    return call;
  }

  void wait(QueuedCall& call) {
    check_owner(call.info);
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return call.finished; });
    if (call.cause.empty()) return;
    const double seconds = std::chrono::duration<double>(Clock::now() - call.launched).count();
    throw_failed(place_.rank, place_.size(), call.info, seconds, call.cause);
  }

  bool wait_for(const QueuedCall& call, std::chrono::milliseconds limit) {
    if (!owner_.is_here()) return true;
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, [&] { return call.finished; });
  }

 private:
  void check_owner(const OpInfo& info) const {
    if (!owner_.is_here()) throw_failed(place_.rank, place_.size(), info, 0.0, kForkedCopy);
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const QueuedCallPtr call = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      std::string cause = go(*call);
      call->go = nullptr;  // lets go of the tensors
      lock.lock();
      call->cause = std::move(cause);
      call->finished = true;
      changed_.notify_all();
    }
  }

  std::string go(QueuedCall& call) {
    const at::NoGradGuard no_grad;
    if (auto cause = failure_->cause(); !cause.empty()) return cause;
    try {
      call.go();
      return {};
    } catch (const std::exception& error) {
      const std::string cause = cause_of(error);
      failure_->fail(cause, cause);
    }
    return failure_->cause();
  }

  const ProcessOwner owner_;
  const HostsPlace place_;
  const std::shared_ptr<FailureState> failure_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::deque<QueuedCallPtr> queue_;
  std::thread thread_;
};

class HostsPending final : public Pending::Work {
 public:
  HostsPending(std::shared_ptr<CallQueue> calls, QueuedCallPtr call)
      : calls_(std::move(calls)), call_(std::move(call)) {}
  void wait() override { calls_->wait(*call_); }
  bool wait_for(std::chrono::milliseconds limit) override { return calls_->wait_for(*call_, limit); }
  void release(std::unique_ptr<Work>) override {
    if (wait_for({})) wait();
  }  // the queue has the call, and the call its tensors

 private:
  std::shared_ptr<CallQueue> calls_;
  QueuedCallPtr call_;
};

class HostsGroup final : public Group {
 public:
  HostsGroup(std::shared_ptr<CallQueue> calls, std::function<GroupPtr()> between)
      : calls_(std::move(calls)), between_(std::move(between)) {}

  int rank() const override { return place().rank; }
  int size() const override { return place().size(); }
  std::string name() const override { return "shared memory and " + place().between->name(); }
  void abort(const std::string& reason) override {
    calls_->failure().fail("rank " + std::to_string(rank()) + " aborted: " + reason, reason);
  }

 protected:
  Pending do_all_gather(at::Tensor out, at::Tensor in, Label label) override {
    return launch(describe_call("all_gather", out, label), [=, this_place = &place()](const std::string& text) {
      hosts_all_gather(*this_place, out, in, text);
    });
  }
  Pending do_reduce_scatter(at::Tensor out, at::Tensor in, ReduceOp op, Label label) override {
    return launch(describe_call("reduce_scatter", in, label, op), [=, this_place = &place()](const std::string& text) {
      hosts_reduce_scatter(*this_place, out, in, op, text);
    });
  }
  Pending do_all_reduce(at::Tensor tensor, ReduceOp op, Label label) override {
    return launch(describe_call("all_reduce", tensor, label, op), [=, this_place = &place()](const std::string& text) {
      hosts_all_reduce(*this_place, tensor, op, text);
    });
  }
  Pending do_broadcast(at::Tensor tensor, int root, Label label) override {
    return launch(
        describe_call("broadcast", tensor, label, ReduceOp::Sum, root),
        [=, this_place = &place()](const std::string& text) { hosts_broadcast(*this_place, tensor, root, text); });
  }
  Pending do_all_to_all(at::Tensor out, at::Tensor in, std::vector<int64_t> out_splits, std::vector<int64_t> in_splits,
                        Label label) override {
    OpInfo info = describe_call("all_to_all", in, label);
    TESSERA_CHECK_VALUE(out_splits[rank()] == in_splits[rank()], "comm", describe(info), ": rank ", rank(), " sends ",
                        in_splits[rank()], " elements to itself and expects ", out_splits[rank()]);
    return launch(info, [=, this_place = &place()](const std::string& text) {
      hosts_all_to_all(*this_place, out, in, out_splits, in_splits, text);
    });
  }
  void do_barrier(Label label) override {
    launch({.name = "barrier", .label = std::string(label)}, [this_place = &place()](const std::string& text) {
      this_place->between->barrier(text);
    }).wait();
  }
  GroupPtr do_sibling(c10::Device) override {
    HostsPlace place = calls_->place();
    place.here = std::make_shared<ShmShare>(place.here->world);
    place.between = between_();
    return std::make_shared<HostsGroup>(make_owned<CallQueue>(std::move(place), calls_->shared_failure()), between_);
  }

 private:
  const HostsPlace& place() const { return calls_->place(); }
  // `go` gets the name of the call's stages, which is the whole call, so that different ones are never matched.
  Pending launch(const OpInfo& info, std::function<void(const std::string&)> go) {
    auto call = calls_->launch(info, [go = std::move(go), text = agreement(info)] { go(text); });
    return Pending(std::make_unique<HostsPending>(calls_, std::move(call)));
  }

  const std::shared_ptr<CallQueue> calls_;
  const std::function<GroupPtr()> between_;
};

}  // namespace

GroupPtr hosts_group(Hosts hosts, int rank, ShmSharePtr here, std::function<GroupPtr()> between) {
  auto failure = std::make_shared<FailureState>(here->world);
  HostsPlace place{.hosts = std::move(hosts), .rank = rank, .here = std::move(here), .between = between()};
  return std::make_shared<HostsGroup>(make_owned<CallQueue>(std::move(place), std::move(failure)), std::move(between));
}

}  // namespace tessera::comm
