#include "tessera/comm/timed_group.h"

#include <algorithm>
#include <array>

#include "tessera/base/error.h"

namespace tessera::comm {
namespace {

constexpr size_t kMostCalls = 1 << 14;  // calls that are kept one by one
constexpr std::array kOps{"all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "barrier"};
using Clock = std::chrono::steady_clock;

class TimedWork final : public Pending::Work {
 public:
  TimedWork(Pending pending, CallTime call, Clock::time_point began, std::shared_ptr<CallRecord> record)
      : pending_(std::move(pending)), call_(std::move(call)), began_(began), record_(std::move(record)) {}

  void wait() override {
    pending_.wait();
    call_.seconds = std::chrono::duration<double>(Clock::now() - began_).count();
    record_->add(std::move(call_));
  }
  bool wait_for(std::chrono::milliseconds limit) override { return pending_.wait_for(limit); }
  void release(std::unique_ptr<Work>) override { pending_.release(); }

 private:
  Pending pending_;
  CallTime call_;
  Clock::time_point began_;
  std::shared_ptr<CallRecord> record_;
};

class TimedGroup final : public Group {
 public:
  TimedGroup(GroupPtr group, std::shared_ptr<CallRecord> record)
      : group_(std::move(group)), record_(std::move(record)) {}

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  std::string name() const override { return group_->name(); }
  void abort(const std::string& reason) override { group_->abort(reason); }

 protected:
  Pending do_all_gather(at::Tensor out, at::Tensor in, Label label) override {
    return timed("all_gather", label, out, [&] { return group_->all_gather(out, in, label); });
  }
  Pending do_reduce_scatter(at::Tensor out, at::Tensor in, ReduceOp op, Label label) override {
    return timed("reduce_scatter", label, in, [&] { return group_->reduce_scatter(out, in, op, label); });
  }
  Pending do_all_reduce(at::Tensor tensor, ReduceOp op, Label label) override {
    return timed("all_reduce", label, tensor, [&] { return group_->all_reduce(tensor, op, label); });
  }
  Pending do_broadcast(at::Tensor tensor, int root, Label label) override {
    return timed("broadcast", label, tensor, [&] { return group_->broadcast(tensor, root, label); });
  }
  // The splits are in elements of flat tensors by now.
  Pending do_all_to_all(at::Tensor out, at::Tensor in, std::vector<int64_t> out_splits, std::vector<int64_t> in_splits,
                        Label label) override {
    return timed("all_to_all", label, in, [&] {
      return group_->all_to_all(out.view(-1), in.view(-1), std::move(out_splits), std::move(in_splits), label);
    });
  }
  void do_barrier(Label label) override {
    timed("barrier", label, at::Tensor(), [&] {
      group_->barrier(label);
      return Pending();
    }).wait();
  }
  GroupPtr do_sibling(c10::Device device) override { return timed_group(group_->sibling(device), record_); }
  at::Tensor do_shared_memory(int64_t bytes, Label label) override { return group_->shared_memory(bytes, label); }

 private:
  template <class F>
  Pending timed(const char* op, Label label, const at::Tensor& message, const F& call) {
    const Clock::time_point began = Clock::now();
    Pending pending = call();
    if (!record_->wants(op)) return pending;
    const int64_t bytes = message.defined() ? static_cast<int64_t>(message.nbytes()) : 0;
    return Pending(std::make_unique<TimedWork>(std::move(pending), CallTime{op, std::string(label), bytes, size()},
                                               began, record_));
  }

  GroupPtr group_;
  std::shared_ptr<CallRecord> record_;
};

}  // namespace

double CallTimes::algorithm_bandwidth() const {
  return seconds > 0 ? static_cast<double>(bytes * calls) / seconds : 0;
}

double CallTimes::bus_bandwidth() const {
  const double others = static_cast<double>(ranks - 1) / ranks;
  const double share = op == "all_reduce" ? 2 * others : (op == "broadcast" ? 1 : others);
  return algorithm_bandwidth() * share;
}

CallRecord::CallRecord(std::vector<std::string> ops) : ops_(std::move(ops)) {
  for (const std::string& op : ops_)
    TESSERA_CHECK_VALUE(std::find(kOps.begin(), kOps.end(), op) != kOps.end(), "comm", "'", op,
                        "' is no collective that can be timed; there are ", c10::Join(", ", kOps));
}

bool CallRecord::wants(std::string_view op) const {
  return ops_.empty() || std::find(ops_.begin(), ops_.end(), op) != ops_.end();
}

void CallRecord::add(CallTime call) {
  const std::scoped_lock lock(mutex_);
  const auto same = [&](const CallTimes& t) {
    return t.op == call.op && t.bytes == call.bytes && t.ranks == call.ranks;
  };
  auto row = std::find_if(totals_.begin(), totals_.end(), same);
  if (row == totals_.end()) row = totals_.insert(totals_.end(), {call.op, call.bytes, call.ranks});
  row->calls += 1;
  row->seconds += call.seconds;
  if (calls_.size() == kMostCalls) calls_.erase(calls_.begin(), calls_.begin() + kMostCalls / 2);
  calls_.push_back(std::move(call));
}

std::vector<CallTimes> CallRecord::totals() const {
  const std::scoped_lock lock(mutex_);
  std::vector<CallTimes> rows = totals_;
  std::sort(rows.begin(), rows.end(), [](const CallTimes& a, const CallTimes& b) {
    return std::tie(a.op, a.bytes, a.ranks) < std::tie(b.op, b.bytes, b.ranks);
  });
  return rows;
}

std::vector<CallTime> CallRecord::take_calls() {
  const std::scoped_lock lock(mutex_);
  return std::exchange(calls_, {});
}

void CallRecord::reset() {
  const std::scoped_lock lock(mutex_);
  totals_.clear();
  calls_.clear();
}

GroupPtr timed_group(GroupPtr group, std::shared_ptr<CallRecord> record) {
  return std::make_shared<TimedGroup>(std::move(group), std::move(record));
}

Mesh timed_mesh(const Mesh& mesh, const std::shared_ptr<CallRecord>& record) {
  MeshShape shape;
  for (const Axis axis : kAxes)
    shape.sizes[static_cast<size_t>(axis)] = mesh.size(axis);
  Mesh timed;
  for (const Axes axes : shape.groups())
    timed.set(axes, timed_group(mesh.group(axes), record));
  return timed;
}

}  // namespace tessera::comm
