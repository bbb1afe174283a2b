#include "tessera/comm/c10d/core.h"

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/comm/c10d/watched_store.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kTick = std::chrono::milliseconds(200);  // how soon a blocked wait hears of another rank's failure
constexpr auto kRollCall = std::chrono::milliseconds(2000);
constexpr auto kCompareAfter =
    std::chrono::seconds(3);  // a wait of this length compares calls, see Note [Different calls]
constexpr auto kCompareEvery = std::chrono::seconds(1);
constexpr int kPeersCompared = 32;  // the ranks behind this one: bounds the load on the store, and every pair of
                                    // neighbours is compared by one of them
// What an ended process has sent may still be on its way: so long may a wait go on after its end was seen.
constexpr auto kEndedFor = std::chrono::seconds(5);
constexpr size_t kBuffersKept = 2;
constexpr auto kAborted = " aborted: ";

// The first line of an error of the back end, without the place in torch's sources.
std::string plain(const std::string& error) {
  std::string text = error.substr(0, error.find('\n'));
  if (const auto end = text.find("] "); text.starts_with("[/") && end != std::string::npos) text.erase(0, end + 2);
  return text.substr(0, text.find(". This is typically"));
}

// The count lives in the group's store, under a key of this rank: nothing global in the process.
int64_t next_instance(c10d::ProcessGroup& group) {
  const auto store = group.getStore();
  if (!store) return 1;
  return store->add("tessera/groups/" + group.getGroupName() + "/" + std::to_string(group.getRank()), 1);
}

FaultBoard board_of(c10d::ProcessGroup& group, int64_t instance) {
  return job_board(group.getStore(), group.getRank(), group.getSize(),
                   group.getGroupName() + "/" + std::to_string(instance));
}

}  // namespace

std::shared_ptr<c10d::ProcessGroup> hold_group(const HoldProcessGroup& hold,
                                               c10::intrusive_ptr<c10d::ProcessGroup> group) {
  if (hold) return hold(std::move(group));
  c10d::ProcessGroup* const held = group.get();
  return {held, [group = std::move(group)](c10d::ProcessGroup*) {}};
}

C10dCore::C10dCore(HoldProcessGroup hold, c10::intrusive_ptr<c10d::ProcessGroup> group)
    : hold_(std::move(hold)),
      group_(hold_group(hold_, std::move(group))),
      rank_(group_->getRank()),
      size_(group_->getSize()),
      instance_(next_instance(*group_)),
      board_(board_of(*group_, instance_)),
      calls_(rank_) {
  if (size_ == 1) return;
  board_.show_process();
  watcher_ = std::thread([this] { watch(); });
}

c10::intrusive_ptr<c10d::Store> C10dCore::watched_store(const std::string& name) const {
  const auto store = group_->getStore();
  TESSERA_CHECK_VALUE(store, "comm", "process group '", group_->getGroupName(), "' has no store");
  const auto part = c10::make_intrusive<c10d::PrefixStore>("tessera/" + group_->getGroupName() + "/" + name, store);
  return c10::make_intrusive<WatchedStore>(part, board_of(*group_, instance_), rank_, size_);
}

int64_t C10dCore::count_instance() {
  check_owner({.name = "sibling", .label = {}});
  const int64_t instance = next_instance(*group_);
  calls_.use(instance);
  return instance;
}

C10dCore::~C10dCore() {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_all();
  if (watcher_.joinable()) watcher_.join();
  end_left();
}

// Shows this rank's calls to the others and looks at theirs. Returns the cause that all ranks end with, if there is one.
std::optional<std::string> C10dCore::compare_calls() {
  board_.show_calls(calls_.text());
  for (int d = 1; d < size_ && d <= kPeersCompared; ++d) {
    const int peer = (rank_ + d) % size_;
    if (const auto difference = calls_.difference(peer, board_.shown_calls(peer))) return board_.report(*difference);
  }
  return std::nullopt;
}

// Looks for a cycle of ranks: see Note [Different calls] for why it has to be seen twice.
std::optional<std::string> C10dCore::look_for_cycle() {
  const auto before = std::exchange(cycle_, calls_.cycle([this](int rank) { return board_.shown_calls(rank); }));
  if (!before || !cycle_ || before->calls != cycle_->calls) return std::nullopt;
  for (const auto& [rank, look] : cycle_->looks) {
    const auto known = before->looks.find(rank);
    if (known == before->looks.end()) return std::nullopt;
    if (known->second < look) continue;
    cycle_ = before;  // the cycle was not shown again yet
    return std::nullopt;
  }
  return board_.report(cycle_->text);
}

// Gloo does not always end a wait when the peer dies amid a message, and none that waits for another peer: a process of
// this host that has ended is found by its id. Returns the cause that all ranks end with, if there is one.
std::optional<std::string> C10dCore::look_for_ended(Clock::time_point waiting_since) {
  const auto now = Clock::now();
  for (int d = 1; d < size_; ++d) {
    if (std::min(d, size_ - d) > kPeersCompared) continue;
    const int peer = (rank_ + d) % size_;
    const auto pid = board_.ended_process(peer);
    if (!pid) continue;
    if (!ended_at_) ended_at_ = now;
    if (now - std::max(*ended_at_, waiting_since) < kEndedFor) return std::nullopt;
    return board_.report("rank " + std::to_string(rank_) + " lost rank " + std::to_string(peer) + ": its process " +
                         std::to_string(*pid) + " has ended");
  }
  return std::nullopt;
}

void C10dCore::watch() {
  std::unique_lock lock(mutex_);
  auto compared = Clock::now();
  while (!stop_.wait_for(lock, kTick, [&] { return stopping_; })) {
    if (current_ == nullptr || Clock::now() - waiting_since_ < kTick) continue;
    const auto* const before = current_;
    const auto since = waiting_since_;
    lock.unlock();
    auto cause = board_.reported();
    if (const auto now = Clock::now(); !cause && now - since >= kCompareAfter && now - compared >= kCompareEvery) {
      cause = compare_calls();
      if (!cause) cause = look_for_cycle();
      if (!cause) cause = look_for_ended(since);
      compared = now;
    }
    lock.lock();
    if (!cause) continue;
    if (cause_.empty()) cause_ = std::move(*cause);
    if (current_ == before && waiting_since_ == since) interrupt();
  }
}

void C10dCore::interrupt() {
  if (current_ == nullptr) return;
  for (const Transfer& transfer : *current_) {
    try {
      if (transfer.work) transfer.work->abort();
    } catch (const std::exception&) {
      // This back end cannot interrupt a wait: its own timeout ends it.
    }
  }
}

std::string C10dCore::cause() {
  const std::scoped_lock lock(mutex_);
  return cause_;
}

void C10dCore::check_owner(const OpInfo& info) const {
  if (!owner_.is_here()) throw_failed(rank_, size_, info, 0.0, kForkedCopy);
}

void C10dCore::check_alive(const OpInfo& info) {
  check_owner(info);
  if (auto text = cause(); !text.empty()) throw_failed(rank_, size_, info, 0.0, text);
}

void C10dCore::finish(std::vector<Transfer>& transfers, const C10dCall& call, Clock::time_point launched) {
  check_owner(call.info);
  bool failed_before = false;
  {
    const std::scoped_lock lock(mutex_);
    current_ = &transfers;
    waiting_since_ = Clock::now();
    failed_before = !cause_.empty();
  }
  int peer = -1;
  std::string failure;
  for (const Transfer& transfer : transfers) {
    peer = transfer.peer;
    if (failed_before && peer >= 0) {
      failure = "interrupted";
      break;
    }
    calls_.block(call.instance, call.number, peer);
    try {
      if (!transfer.work->wait()) failure = "interrupted";
    } catch (const std::exception& error) {
      failure = error.what();
    }
    if (!failure.empty()) break;
  }
  calls_.block(call.instance, call.number, -1);
  {
    const std::scoped_lock lock(mutex_);
    current_ = nullptr;
  }
  transfers.clear();  // a work that has not ended lets go of its buffer here
  if (!failure.empty()) fail(call.info, launched, peer, failure);
}

void C10dCore::fail(const OpInfo& info, Clock::time_point launched, int peer, const std::string& what) {
  const double seconds = std::chrono::duration<double>(Clock::now() - launched).count();
  std::string text;
  bool asked = false;
  {
    const std::scoped_lock lock(mutex_);
    text = cause_;
    asked = std::exchange(asked_, true);
  }
  if (text.empty()) {
    text = "rank " + std::to_string(rank_) + " in " + describe(info);
    text += peer < 0 ? ": " : " lost rank " + std::to_string(peer) + ": ";
    text = board_.report(text + plain(what));
  }
  if (!asked) {  // other collectives in flight fail too; one of them asks who is still there
    const bool aborted = text.find(kAborted) != std::string::npos, disagree = text.starts_with(kDisagreement);
    // Ranks that disagree all wait: a process that ends with its error before the others know would take the store
    // or a connection with it, and they would speak of a lost rank.
    const std::string silent = board_.roll_call(aborted ? std::chrono::milliseconds(0) : kRollCall);
    if (!aborted && !disagree && !silent.empty()) text += "; " + silent;
    const std::scoped_lock lock(mutex_);
    cause_ = text;
  }
  throw_failed(rank_, size_, info, seconds, text);
}

void C10dCore::abort(const std::string& reason) {
  if (!owner_.is_here()) return;
  const std::string text = board_.report("rank " + std::to_string(rank_) + kAborted + reason);
  const std::scoped_lock lock(mutex_);
  if (cause_.empty()) cause_ = text;
  interrupt();
}

at::Tensor C10dCore::take_buffer(int64_t bytes) {
  {
    const std::scoped_lock lock(mutex_);
    for (auto it = buffers_.begin(); it != buffers_.end(); ++it) {
      if (it->numel() < bytes) continue;
      at::Tensor buffer = std::move(*it);
      buffers_.erase(it);
      return buffer;
    }
  }
  return at::empty({bytes}, at::TensorOptions(at::kByte));
}

void C10dCore::give_buffer(at::Tensor buffer) {
  const std::scoped_lock lock(mutex_);
  buffers_.push_back(std::move(buffer));
  std::sort(buffers_.begin(), buffers_.end(), [](const auto& a, const auto& b) { return a.numel() < b.numel(); });
  if (buffers_.size() > kBuffersKept) buffers_.erase(buffers_.begin());
}

std::optional<bool> C10dCore::marks_have_come(const std::vector<Transfer>& transfers) const {
  int marks = 0;
  for (const Transfer& transfer : transfers) {
    if (!transfer.mark.defined()) break;
    if (__atomic_load_n(static_cast<const char*>(transfer.mark.const_data_ptr()), __ATOMIC_ACQUIRE) == 0) return false;
    ++marks;
  }
  if (marks < size_ - 1) return std::nullopt;
  return true;
}

// Asks a collective of the back end, unless that throws what the collective failed with.
bool C10dCore::have_come(const LeftTransfers& left) const {
  bool come = marks_have_come(left.transfers).value_or(false);
  if (!come)
    attempt([&] {
      come = std::ranges::all_of(left.transfers, [](const Transfer& t) { return t.peer < 0 && t.work->isCompleted(); });
    });
  return come;
}

void C10dCore::keep(LeftTransfers left) {
  std::vector<LeftTransfers> come;  // destroyed after the lock: a process group may take others
  const std::scoped_lock lock(mutex_);
  for (LeftTransfers& one : left_)
    if (have_come(one)) come.push_back(std::exchange(one, {}));
  std::erase_if(left_, [](const LeftTransfers& one) { return one.transfers.empty(); });
  left_.push_back(std::move(left));
}

void C10dCore::end_left() {
  std::erase_if(left_, [](const LeftTransfers& one) { return !one.backend; });
  const auto over = [this](const LeftTransfers& one) { return have_come(one); };
  for (const auto until = Clock::now() + kOthersEnd; !failed() && Clock::now() < until;) {
    if (std::ranges::all_of(left_, over)) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  for (LeftTransfers& one : left_) {
    if (!over(one)) attempt([&] { one.backend->abort(); });
    one.group.reset();
    if (over(one)) continue;
    attempt([&] { std::thread([left = std::move(one)]() mutable { left.backend.reset(); }).detach(); });
  }
}

}  // namespace tessera::comm
