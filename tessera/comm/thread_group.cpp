// Ranks as threads. A call leaves its pointers and returns; the work is done in wait(), once all ranks
// have made the call. It is cut into one share per rank, and whoever waits takes the shares nobody has
// begun, its own first: so a rank that does not wait yet never holds up the others, and two groups
// used in crossed order cannot deadlock.
//
// Note [Shares]
//   No share writes what another share of the same operation reads or writes, in the in-place forms
//   too: a share of all_gather, broadcast and all_to_all fills the output of one rank (an in-place
//   part is skipped), one of reduce_scatter fills one rank's part, and one of all_reduce reduces a
//   segment and writes it into the tensors of all ranks. So shares need no barrier between them,
//   and a result is the same whoever computes it.
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/comm/backends.h"
#include "tessera/comm/copy_bytes.h"
#include "tessera/comm/op_info.h"
#include "tessera/comm/process_owner.h"
#include "tessera/comm/reduce_rows.h"
#include "tessera/comm/wait_cycle.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

// A call as one rank makes it.
struct RankCall {
  OpInfo info;
  char* out = nullptr;
  const char* in = nullptr;
  std::vector<int64_t> out_splits, in_splits;  // bytes, all_to_all only
  std::array<at::Tensor, 2> keeps{};           // memory of a call that was released, which others may still use
};

// One collective: slots for the calls of all ranks. Guarded by World::mutex, but calls are constant
// once all are there.
struct Op {
  explicit Op(int size) : calls(size), begun(size, false) {}

  std::vector<std::optional<RankCall>> calls;
  std::vector<bool> begun;  // shares taken
  int channel = 0;
  int called = 0, running = 0, finished = 0;
};

// The calls of one group and of each of its siblings, in the order of each rank.
struct Channel {
  explicit Channel(int size) : next(size, 0), users(size), gone(size, false), next_memory(size, 0) {}

  std::deque<std::shared_ptr<Op>> open;  // operations not yet called by all; front is position `first`
  int64_t first = 0;
  std::vector<int64_t> next;           // position of a rank's next call
  std::vector<std::thread::id> users;  // thread of each rank, see Note [Wait cycles]
  std::vector<bool> gone;              // ranks whose Group object was destroyed
  std::vector<int64_t> next_memory;
  std::map<int64_t, std::pair<std::shared_ptr<char[]>, int>> memories;  // memories not yet taken by all
};

// A wait for ranks that have not made the call.
struct Blocked {
  int rank = 0;
  const Op* op = nullptr;
  std::thread::id thread;
  Clock::time_point since;
  bool operator==(const Blocked& other) const { return rank == other.rank && thread == other.thread; }
};

// State shared by all ranks of one group and its siblings.
class World {
 public:
  World(int size, std::chrono::milliseconds timeout)
      : size_(size), timeout_(timeout), channels_(1, Channel(size)), siblings_(size, 0) {}

  int size() const { return size_; }
  std::shared_ptr<Op> launch(int channel, int rank, RankCall call);
  void wait(int rank, Op& op, Clock::time_point launched);
  bool wait_for(const Op& op, std::chrono::milliseconds limit);
  void keep(int rank, Op& op, std::array<at::Tensor, 2> memory);
  void abort(int rank, const std::string& reason);
  void leave(int channel, int rank);
  int add_channel(int rank);  // returns the rank's next sibling
  // The memory that the rank's next call is about: made by the first rank that comes.
  std::shared_ptr<char[]> memory(int channel, int rank, int64_t bytes);

 private:
  void check_owner(int rank, const OpInfo& info) const;
  void check_alive(int rank, const OpInfo& info, Clock::time_point since) const;
  void fail(std::string cause);
  void check_agreement(const Op& op);
  std::string departed(const Op& op) const;
  std::vector<Blocked> holding_up(const Blocked& wait) const;
  std::string cycle(const Blocked& wait) const;
  void await_calls(std::unique_lock<std::mutex>& lock, const Blocked& wait, Clock::time_point deadline);
  int pick_share(const Op& op, int rank) const;
  void run_share(const Op& op, int share) const;
  void all_to_all_share(const Op& op, int share) const;
  void all_reduce_share(const Op& op, int share) const;
  std::vector<int> missing(const Op& op) const;

  const ProcessOwner owner_;
  const int size_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Channel> channels_;
  std::vector<int> siblings_;  // made by each rank
  std::vector<Blocked> blocked_;
  std::string cause_;  // first failure; empty while all is well
};

// This check comes before the mutex, which nobody opens in a forked copy.
void World::check_owner(int rank, const OpInfo& info) const {
  if (!owner_.is_here()) throw_failed(rank, size_, info, 0.0, kForkedCopy);
}

void World::check_alive(int rank, const OpInfo& info, Clock::time_point since) const {
  if (cause_.empty()) return;
  throw_failed(rank, size_, info, std::chrono::duration<double>(Clock::now() - since).count(), cause_);
}

void World::fail(std::string cause) {
  if (cause_.empty()) cause_ = std::move(cause);
  changed_.notify_all();
}

std::shared_ptr<Op> World::launch(int channel, int rank, RankCall call) {
  check_owner(rank, call.info);
  const std::scoped_lock lock(mutex_);
  check_alive(rank, call.info, Clock::now());
  Channel& c = channels_[channel];
  const int64_t position = c.next[rank]++;
  c.users[rank] = std::this_thread::get_id();
  while (c.first + static_cast<int64_t>(c.open.size()) <= position) {
    c.open.push_back(std::make_shared<Op>(size_));
    c.open.back()->channel = channel;
  }
  const auto op = c.open[position - c.first];
  op->calls[rank] = std::move(call);
  op->called += 1;
  check_agreement(*op);
  if (op->called == size_) {
    while (!c.open.empty() && c.open.front()->called == size_) {
      c.open.pop_front();
      ++c.first;
    }
    changed_.notify_all();
  }
  check_alive(rank, op->calls[rank]->info, Clock::now());
  return op;
}

std::shared_ptr<char[]> World::memory(int channel, int rank, int64_t bytes) {
  const std::scoped_lock lock(mutex_);
  Channel& c = channels_[channel];
  const int64_t position = c.next_memory[rank]++;
  auto& [memory, taken] = c.memories[position];
  if (!memory) {
    constexpr std::align_val_t kAligned{64};
    const auto data = static_cast<char*>(::operator new(static_cast<size_t>(bytes), kAligned, std::nothrow));
    TESSERA_CHECK_DIST(data != nullptr, "comm", "shared memory: ", bytes, " B are needed");  // the same on every rank
    memory.reset(data, [](char* p) { ::operator delete(p, kAligned); });
    std::memset(data, 0, static_cast<size_t>(bytes));
  }
  const auto mine = memory;
  if (++taken == size_) c.memories.erase(position);
  return mine;
}

int World::add_channel(int rank) {
  check_owner(rank, {.name = "sibling", .label = {}});
  const std::scoped_lock lock(mutex_);
  const int channel = ++siblings_[rank];
  if (static_cast<size_t>(channel) == channels_.size()) channels_.emplace_back(size_);
  channels_[channel].users[rank] = std::this_thread::get_id();
  return channel;
}

void World::check_agreement(const Op& op) {
  int reference = -1;
  for (int r = 0; r < size_; ++r) {
    if (!op.calls[r]) continue;
    if (reference < 0) reference = r;
    const OpInfo& a = op.calls[reference]->info;
    const OpInfo& b = op.calls[r]->info;
    if (same_call(a, b)) continue;
    fail(disagreement(reference, describe_fully(a), r, describe_fully(b)));
    return;
  }
  if (op.called < size_ || std::string_view(op.calls[0]->info.name) != "all_to_all") return;
  for (int from = 0; from < size_; ++from) {
    for (int to = 0; to < size_; ++to) {
      const int64_t sent = op.calls[from]->in_splits[to], expected = op.calls[to]->out_splits[from];
      if (sent == expected) continue;
      fail(split_disagreement(describe(op.calls[from]->info), from, sent, to, expected));
      return;
    }
  }
}

std::vector<int> World::missing(const Op& op) const {
  std::vector<int> ranks;
  for (int r = 0; r < size_; ++r) {
    if (!op.calls[r]) ranks.push_back(r);
  }
  return ranks;
}

// Why `op` can never start: a rank it waits for has destroyed its group.
std::string World::departed(const Op& op) const {
  for (int r = 0; r < size_; ++r) {
    if (channels_[op.channel].gone[r] && !op.calls[r]) {
      return "rank " + std::to_string(r) + " destroyed its group without making this call";
    }
  }
  return {};
}

// Waits whose thread is the one that would make the call which `wait` is for.
std::vector<Blocked> World::holding_up(const Blocked& wait) const {
  std::vector<Blocked> result;
  for (const Blocked& other : blocked_) {
    const bool long_enough = Clock::now() - other.since >= kCycleAfter && other.op->called < size_;
    if (long_enough && !wait.op->calls[other.rank] && channels_[wait.op->channel].users[other.rank] == other.thread)
      result.push_back(other);
  }
  return result;
}

std::string World::cycle(const Blocked& wait) const {
  std::vector<std::pair<int, std::string>> waits;
  for (const Blocked& w : find_cycle(wait, [this](const Blocked& node) { return holding_up(node); }))
    waits.emplace_back(w.rank, describe(w.op->calls[w.rank]->info));
  return waits.empty() ? std::string() : cycle_text(std::move(waits));
}

// Waits until somebody calls or fails, or for a while.
void World::await_calls(std::unique_lock<std::mutex>& lock, const Blocked& wait, Clock::time_point deadline) {
  const auto next = std::min(deadline, Clock::now() + std::chrono::milliseconds(500));
  blocked_.push_back(wait);
  changed_.wait_until(lock, next);
  std::string cause;
  if (wait.op->called < size_ && cause_.empty()) {
    if (Clock::now() - wait.since >= kCycleAfter) cause = cycle(wait);
    if (cause.empty() && Clock::now() >= deadline)
      cause = "timed out waiting for rank(s) " + join(missing(*wait.op)) + " in " +
              describe(wait.op->calls[wait.rank]->info);
  }
  std::erase(blocked_, wait);
  if (!cause.empty()) fail(std::move(cause));
}

int World::pick_share(const Op& op, int rank) const {
  for (int i = 0; i < size_; ++i) {
    const int share = (rank + i) % size_;
    if (!op.begun[share]) return share;
  }
  return -1;
}

void World::wait(int rank, Op& op, Clock::time_point launched) {
  check_owner(rank, op.calls[rank]->info);
  std::unique_lock lock(mutex_);
  const OpInfo& info = op.calls[rank]->info;
  const auto since = Clock::now();
  while (op.finished < size_) {
    if (!cause_.empty()) {
      // Nobody may still touch our buffers when we return.
      changed_.wait(lock, [&] { return op.running == 0; });
      if (op.finished == size_) return;
      check_alive(rank, info, launched);
    }
    if (op.called < size_) {
      if (auto cause = departed(op); !cause.empty()) {
        // A rank that unwinds from an error destroys its siblings first and says a moment later why.
        changed_.wait_for(lock, std::chrono::milliseconds(200), [&] { return !cause_.empty(); });
        fail(std::move(cause));
      } else {
        await_calls(lock, {rank, &op, std::this_thread::get_id(), since}, since + timeout_);
      }
      continue;
    }
    const int share = pick_share(op, rank);
    if (share < 0) {
      changed_.wait(lock);
      continue;
    }
    op.begun[share] = true;
    op.running += 1;
    lock.unlock();
    run_share(op, share);
    lock.lock();
    op.running -= 1;
    op.finished += 1;
    if (op.running == 0) changed_.notify_all();
  }
}

// Waits until all ranks have made the call (or it failed): whoever waits for it now does what is left of it.
bool World::wait_for(const Op& op, std::chrono::milliseconds limit) {
  if (!owner_.is_here()) return true;
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, limit, [&] { return op.called == size_ || !cause_.empty(); });
}

// Keeps memory until the operation goes, with whoever waits for that.
void World::keep(int rank, Op& op, std::array<at::Tensor, 2> memory) {
  const std::scoped_lock lock(mutex_);
  if (op.finished < size_) op.calls[rank]->keeps = std::move(memory);
}

void World::abort(int rank, const std::string& reason) {
  if (!owner_.is_here()) return;
  const std::scoped_lock lock(mutex_);
  fail("rank " + std::to_string(rank) + " aborted: " + reason);
}

void World::leave(int channel, int rank) {
  if (!owner_.is_here()) return;
  const std::scoped_lock lock(mutex_);
  channels_[channel].gone[rank] = true;
  changed_.notify_all();
}

void World::run_share(const Op& op, int share) const {
  const RankCall& mine = *op.calls[share];
  const std::string_view name = mine.info.name;
  const int64_t part = mine.info.bytes / size_;
  if (name == "all_gather") {
    for (int r = 0; r < size_; ++r)
      copy_bytes(mine.out + r * part, op.calls[r]->in, part);
  } else if (name == "reduce_scatter") {
    std::vector<const void*> rows(size_);
    for (int r = 0; r < size_; ++r)
      rows[r] = op.calls[r]->in + share * part;
    const int64_t count = part / static_cast<int64_t>(c10::elementSize(mine.info.dtype));
    reduce_rows(mine.out, rows.data(), size_, count, mine.info.dtype, mine.info.op);
  } else if (name == "all_reduce") {
    all_reduce_share(op, share);
  } else if (name == "broadcast") {
    copy_bytes(mine.out, op.calls[mine.info.root]->in, mine.info.bytes);
  } else if (name == "all_to_all") {
    all_to_all_share(op, share);
  }
}

void World::all_reduce_share(const Op& op, int share) const {
  const OpInfo& info = op.calls[share]->info;
  const auto width = static_cast<int64_t>(c10::elementSize(info.dtype));
  const int64_t total = info.bytes / width;
  const int64_t begin = total * share / size_, count = total * (share + 1) / size_ - begin;
  std::vector<const void*> rows(size_);
  for (int r = 0; r < size_; ++r)
    rows[r] = op.calls[r]->in + begin * width;
  char* first = op.calls[0]->out + begin * width;
  reduce_rows(first, rows.data(), size_, count, info.dtype, info.op);
  for (int r = 1; r < size_; ++r)
    copy_bytes(op.calls[r]->out + begin * width, first, count * width);
}

void World::all_to_all_share(const Op& op, int share) const {
  const RankCall& mine = *op.calls[share];
  char* to = mine.out;
  for (int r = 0; r < size_; ++r) {
    const auto& splits = op.calls[r]->in_splits;
    const char* from = op.calls[r]->in;
    for (int before = 0; before < share; ++before)
      from += splits[before];
    copy_bytes(to, from, mine.out_splits[r]);
    to += mine.out_splits[r];
  }
}

class ThreadWork final : public Pending::Work {
 public:
  ThreadWork(std::shared_ptr<World> world, std::shared_ptr<Op> op, int rank, at::Tensor out, at::Tensor in)
      : world_(std::move(world)), op_(std::move(op)), rank_(rank), used_{std::move(out), std::move(in)} {}

  void wait() override { world_->wait(rank_, *op_, launched_); }
  bool wait_for(std::chrono::milliseconds limit) override { return world_->wait_for(*op_, limit); }
  // Whoever waits for the operation does all of it.
  void release(std::unique_ptr<Work>) override {
    if (wait_for({})) return wait();
    world_->keep(rank_, *op_, std::move(used_));
  }

 private:
  std::shared_ptr<World> world_;
  std::shared_ptr<Op> op_;
  int rank_;
  std::array<at::Tensor, 2> used_;  // memory that other ranks read and write
  Clock::time_point launched_ = Clock::now();
};

class ThreadGroup final : public Group {
 public:
  ThreadGroup(std::shared_ptr<World> world, int rank, int channel = 0)
      : world_(std::move(world)), rank_(rank), channel_(channel) {}
  ~ThreadGroup() override { world_->leave(channel_, rank_); }

  int rank() const override { return rank_; }
  int size() const override { return world_->size(); }
  std::string name() const override { return "threads"; }
  void abort(const std::string& reason) override { world_->abort(rank_, reason); }

 protected:
  Pending do_all_gather(at::Tensor out, at::Tensor in, Label label) override {
    return launch("all_gather", out, in, out, label);
  }
  Pending do_reduce_scatter(at::Tensor out, at::Tensor in, ReduceOp op, Label label) override {
    return launch("reduce_scatter", out, in, in, label, op);
  }
  Pending do_all_reduce(at::Tensor tensor, ReduceOp op, Label label) override {
    return launch("all_reduce", tensor, tensor, tensor, label, op);
  }
  Pending do_broadcast(at::Tensor tensor, int root, Label label) override {
    return launch("broadcast", tensor, tensor, tensor, label, ReduceOp::Sum, root);
  }
  Pending do_all_to_all(at::Tensor out, at::Tensor in, std::vector<int64_t> out_splits, std::vector<int64_t> in_splits,
                        Label label) override {
    RankCall call = make_call("all_to_all", out, in, in, label);
    const auto width = static_cast<int64_t>(in.element_size());
    for (int64_t& split : out_splits)
      split *= width;
    for (int64_t& split : in_splits)
      split *= width;
    call.out_splits = std::move(out_splits);
    call.in_splits = std::move(in_splits);
    return send(std::move(call), out, in);
  }
  at::Tensor do_shared_memory(int64_t bytes, Label label) override {
    RankCall call;
    call.info = {.name = "shared_memory", .label = std::string(label), .bytes = bytes};
    send(std::move(call), {}, {}).wait();
    const auto memory = world_->memory(channel_, rank_, bytes);
    return at::from_blob(memory.get(), {bytes}, [memory](void*) {}, at::kByte);
  }
  void do_barrier(Label label) override {
    RankCall call;
    call.info.name = "barrier";
    call.info.label = label;
    send(std::move(call), {}, {}).wait();
  }
  GroupPtr do_sibling(c10::Device) override {
    return std::make_shared<ThreadGroup>(world_, rank_, world_->add_channel(rank_));
  }

 private:
  RankCall make_call(const char* name, const at::Tensor& out, const at::Tensor& in, const at::Tensor& full,
                     Label label) {
    TESSERA_CHECK_VALUE(full.is_cpu(), "comm", name, " (", label, "): a group of threads takes CPU tensors, got ",
                        full.device());
    RankCall call;
    call.info = describe_call(name, full, label);
    call.out = static_cast<char*>(out.mutable_data_ptr());
    call.in = static_cast<const char*>(in.const_data_ptr());
    return call;
  }

  Pending launch(const char* name, const at::Tensor& out, const at::Tensor& in, const at::Tensor& full, Label label,
                 ReduceOp op = ReduceOp::Sum, int root = -1) {
    RankCall call = make_call(name, out, in, full, label);
    call.info.op = op;
    call.info.root = root;
    return send(std::move(call), out, in);
  }

  Pending send(RankCall call, const at::Tensor& out, const at::Tensor& in) {
    auto op = world_->launch(channel_, rank_, std::move(call));
    return Pending(std::make_unique<ThreadWork>(world_, std::move(op), rank_, out, in));
  }

  std::shared_ptr<World> world_;
  const int rank_;
  const int channel_;
};

}  // namespace

std::vector<GroupPtr> thread_groups(int size, std::chrono::milliseconds timeout) {
  TESSERA_CHECK_VALUE(size >= 1, "comm", "thread_groups: size must be at least 1, got ", size);
  auto world = make_owned<World>(size, timeout);
  std::vector<GroupPtr> groups;
  groups.reserve(size);
  for (int r = 0; r < size; ++r)
    groups.push_back(std::make_shared<ThreadGroup>(world, r));
  return groups;
}

}  // namespace tessera::comm
