#include "tessera/comm/shm/world.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <bitset>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/comm/hosts/hosts.h"
#include "tessera/comm/wait_cycle.h"

namespace tessera::comm {
namespace {

constexpr auto kLook = std::chrono::milliseconds(100);  // how long a sleep is before a look at the others
constexpr auto kShortly = std::chrono::milliseconds(1);

// A wait spins first, then spins and offers the core to others, then sleeps. To be woken takes longer than most
// waits, and two ranks that sleep by turns keep each other doing so: hence the long middle part.
constexpr auto kSelfish = std::chrono::microseconds(10);
constexpr auto kSpin = std::chrono::microseconds(300);

std::string seconds_text(std::chrono::milliseconds time) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", std::chrono::duration<double>(time).count());
  return text;
}

std::vector<int> plain_numbers(int size) {
  std::vector<int> numbers(size);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

}  // namespace

ShmWorld::ShmWorld(std::shared_ptr<ShmSegment> segment, int rank, int size, std::chrono::milliseconds timeout,
                   std::vector<int> numbers)
    : segment_(std::move(segment)),
      rank_(rank),
      size_(size),
      numbers_(numbers.empty() ? plain_numbers(size) : std::move(numbers)),
      timeout_(timeout.count()),
      header_(*reinterpret_cast<ShmHeader*>(segment_->data())),
      ranks_(reinterpret_cast<ShmRank*>(segment_->data() + ShmLayout{size}.ranks())) {
  ranks_[rank].pid.store(getpid());
  ranks_[rank].start.store(start_of_process(getpid()));
}

std::vector<int> ShmWorld::unseen() const {
  std::vector<int> ranks;
  for (int r = 0; r < size_; ++r) {
    const uint64_t start = start_of_process(ranks_[r].pid.load());
    if (start == 0 || start != ranks_[r].start.load()) ranks.push_back(r);
  }
  return ranks;
}

// Holds the mutex for a moment, ahead of threads that move data.
struct ShmWorld::PriorityLock {
  explicit PriorityLock(ShmWorld& world) : world_(world) {
    world.launching_.fetch_add(1);
    world.mutex_.lock();
    world.launching_.fetch_sub(1);
  }
  ~PriorityLock() { world_.mutex_.unlock(); }
  PriorityLock(const PriorityLock&) = delete;
  PriorityLock& operator=(const PriorityLock&) = delete;
  ShmWorld& world_;
};

int ShmWorld::add_channel() {
  check_owner({.name = "sibling", .label = {}});
  const PriorityLock lock(*this);
  const int channel = static_cast<int>(channels_.size());
  TESSERA_CHECK_VALUE(channel < kChannels, "comm", "a group over shared memory has at most ", kChannels - 1,
                      " siblings");
  segment_->reserve(ShmLayout{size_}.ring(channel, rank_), kRingBytes);
  channels_.push_back(std::make_unique<ShmChannel>(segment_->data(), channel, rank_, size_, numbers_));
  users_.push_back(std::this_thread::get_id());
  return channel;
}

int ShmWorld::attach(std::shared_ptr<ShmEndpoint> endpoint) {
  const PriorityLock lock(*this);
  attached_.push_back(std::move(endpoint));
  return -static_cast<int>(attached_.size());
}

// The endpoint of a channel. The mutex is held.
ShmEndpoint& ShmWorld::endpoint(int channel) {
  return channel < 0 ? *attached_[-1 - channel] : *channels_[channel];
}

void ShmWorld::leave(int channel) {
  if (!owner_.is_here()) return;
  {
    const PriorityLock lock(*this);
    channels_[channel]->leave();
  }
  for (int r = 0; r < size_; ++r)
    ring(ranks_[r].doorbell);
}

std::string ShmWorld::cause() const {
  if (header_.cause_state.load() == 0) return {};
  // Another rank is just writing the cause, unless it died doing so.
  const auto end = Clock::now() + std::chrono::seconds(1);
  while (header_.cause_state.load() != 2 && Clock::now() < end)
    std::this_thread::yield();
  return header_.cause_state.load() == 2 ? std::string(header_.cause) : std::string("a rank failed and died");
}

void ShmWorld::fail(const std::string& text) {
  if (!owner_.is_here()) return;
  uint32_t none = 0;
  if (header_.cause_state.compare_exchange_strong(none, 1)) {
    const size_t length = std::min(text.size(), sizeof(header_.cause) - 1);
    std::memcpy(header_.cause, text.data(), length);
    header_.cause[length] = '\0';
    header_.cause_state.store(2);
  }
  for (int r = 0; r < size_; ++r)
    ring(ranks_[r].doorbell);
}

void ShmWorld::abort(const std::string& reason) {
  fail("rank " + std::to_string(numbers_[rank_]) + " aborted: " + reason);
}

void ShmWorld::check_owner(const OpInfo& info) const {
  if (!owner_.is_here()) throw_failed(rank_, size_, info, 0.0, kForkedCopy);
}

void ShmWorld::check_alive(const OpInfo& info, Clock::time_point since) const {
  check_owner(info);
  if (header_.cause_state.load() == 0) return;
  throw_failed(rank_, size_, info, std::chrono::duration<double>(Clock::now() - since).count(), cause());
}

// Moves all calls in flight; nothing once the group has failed. The mutex is held.
bool ShmWorld::progress() {
  if (header_.cause_state.load() != 0) return false;
  bool moved = false;
  const auto move = [&](ShmEndpoint& endpoint) {
    moved = endpoint.progress() || moved;
    if (!endpoint.disagreement().empty()) fail(endpoint.disagreement());
  };
  for (const auto& endpoint : attached_)
    move(*endpoint);
  for (const auto& channel : channels_)
    move(*channel);
  return moved;
}

// Does so unless another thread is at it.
bool ShmWorld::try_progress() {
  while (launching_.load() != 0)
    std::this_thread::yield();
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || !progress()) return false;
  moved_ = Clock::now().time_since_epoch().count();
  return true;
}

// When any thread of this rank has moved anything, `since` at the earliest.
ShmWorld::Clock::time_point ShmWorld::last_moved(Clock::time_point since) const {
  return std::max(since, Clock::time_point(Clock::duration(moved_.load())));
}

template <class F>
void ShmWorld::begin(const OpInfo& info, const F& body) {
  check_alive(info, Clock::now());  // before the mutex, which nobody opens in a forked copy
  const PriorityLock lock(*this);
  check_alive(info, Clock::now());
  body();
}

void ShmWorld::launch(int channel, const ShmOpPtr& op) {
  begin(op->info(), [&] {
    channels_[channel]->add(op);
    users_[channel] = std::this_thread::get_id();
    channels_[channel]->progress();
    if (const auto& text = channels_[channel]->disagreement(); !text.empty()) fail(text);
  });
}

void ShmWorld::launch(int endpoint_number, const ShmCall& call, const std::function<void()>& add) {
  begin(call.info(), [&] {
    add();
    endpoint(endpoint_number).progress();
  });
}

void ShmWorld::poll(const ShmCall& call) {
  if (call.done) return;
  check_alive(call.info(), Clock::now());
  try_progress();
}

// Says that a thread of this rank is about to sleep.
struct ShmWorld::Sleep {
  Sleep(Doorbell& doorbell, bool wants_space) : doorbell_(doorbell), wants_space_(wants_space) {
    doorbell.sleepers.fetch_add(1);
    if (wants_space) doorbell.wants_space.fetch_add(1);
  }
  ~Sleep() {
    doorbell_.sleepers.fetch_sub(1);
    if (wants_space_) doorbell_.wants_space.fetch_sub(1);
  }
  Doorbell& doorbell_;
  const bool wants_space_;
};

// Sleeps until there may be something to do. `done()`: whether there is no need to.
template <class F>
bool ShmWorld::sleep(const F& done) {
  Doorbell& doorbell = ranks_[rank_].doorbell;
  const uint32_t count = doorbell.count.load();
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) {  // another thread moves the data; it may leave at any time, so this is a short sleep
    const Sleep asleep(doorbell, false);
    if (!done()) sleep_at(doorbell, count, kShortly);
    return false;
  }
  const auto wants_space = [](const auto& endpoint) { return endpoint->wants_space(); };
  const bool space = std::any_of(attached_.begin(), attached_.end(), wants_space) ||
                     std::any_of(channels_.begin(), channels_.end(), wants_space);
  const Sleep asleep(doorbell, space);
  if (done()) return true;
  if (progress()) {
    moved_ = Clock::now().time_since_epoch().count();
    return true;
  }
  lock.unlock();
  sleep_at(doorbell, count, kLook);
  return false;
}

// Whether another rank may need this very core to go on, where it waited last.
bool ShmWorld::shares_core() {
  const int core = sched_getcpu() + 1;
  std::atomic<int>& mine = ranks_[rank_].core;
  if (mine.load() != core) mine.store(core);
  for (int r = 0; r < size_; ++r) {
    if (r != rank_ && ranks_[r].core.load() == core) return true;
  }
  return false;
}

// Shows the other ranks what this thread is blocked in, until the wait ends.
class ShmWorld::ShownWait {
 public:
  explicit ShownWait(ShmWorld& world) : world_(world), place_(world.ranks_[world.rank_].blocked) {}
  ~ShownWait() { hide(); }
  ShownWait(const ShownWait&) = delete;
  ShownWait& operator=(const ShownWait&) = delete;

  bool shows() const { return shows_; }
  void show(int channel) {
    const PriorityLock lock(world_);
    const auto front = world_.channels_[channel]->front();
    if (front && shows_ && place_.number.load() == front->number) return;
    hide();
    if (!front || place_.version.load() % 2 != 0) return;
    place_.channel.store(channel);
    place_.number.store(front->number);
    place_.place.store(front->place);
    for (int word = 0; word < static_cast<int>(std::size(place_.held)); ++word) {
      uint64_t held = 0;
      for (int c = 64 * word; c < std::min(64 * (word + 1), static_cast<int>(world_.users_.size())); ++c)
        held |= static_cast<uint64_t>(world_.users_[c] == std::this_thread::get_id()) << (c % 64);
      place_.held[word].store(held);
    }
    place_.version.fetch_add(1);
    shows_ = true;
  }

 private:
  void hide() {
    if (std::exchange(shows_, false)) place_.version.fetch_add(1);
  }

  ShmWorld& world_;
  ShmBlocked& place_;
  bool shows_ = false;
};

// What a rank shows.
struct ShmWorld::Blocked {
  int rank = 0;
  uint64_t version = 0;
  int channel = 0;
  int64_t number = 0, place = 0;
  std::bitset<kChannels> held{};
  bool operator==(const Blocked& other) const { return rank == other.rank; }
};

std::optional<ShmWorld::Blocked> ShmWorld::blocked(int rank) const {
  const ShmBlocked& shown = ranks_[rank].blocked;
  Blocked result{.rank = rank, .version = shown.version.load()};
  result.channel = static_cast<int>(shown.channel.load());
  result.number = shown.number.load();
  result.place = shown.place.load();
  for (size_t c = 0; c < kChannels; ++c)
    result.held[c] = (shown.held[c / 64].load() >> (c % 64) & 1) != 0;
  if (result.version % 2 == 0 || shown.version.load() != result.version) return std::nullopt;
  return result;
}

std::vector<ShmWorld::Blocked> ShmWorld::holding_up(const Blocked& wait) const {
  std::vector<Blocked> result;
  for (int r = 0; r < size_ && wait.channel < static_cast<int>(channels_.size()); ++r) {
    if (channels_[wait.channel]->launched(r) > wait.number) continue;
    if (const auto other = blocked(r); other && other->held[wait.channel]) result.push_back(*other);
  }
  return result;
}

// Why this rank, which shows what it is blocked in, will never go on; empty when it may. The mutex is held.
std::string ShmWorld::cycle() const {
  const auto mine = blocked(rank_);
  if (!mine) return {};
  const auto path = find_cycle(*mine, [this](const Blocked& node) { return holding_up(node); });
  std::vector<std::pair<int, std::string>> waits;
  for (const Blocked& node : path) {
    waits.emplace_back(numbers_[node.rank], channels_[node.channel]->description(node.rank, node.place));
    if (waits.back().second.empty()) return {};
  }
  // The cycle existed at one moment if all ranks are still in the same wait.
  const bool still = std::all_of(
      path.begin(), path.end(), [&](const Blocked& node) { return ranks_[node.rank].blocked.version == node.version; });
  return path.empty() || !still ? std::string() : cycle_text(std::move(waits));
}

void ShmWorld::wait(int channel, const ShmCall& call, const Wait& how) {
  ShownWait shown_wait(*this);
  const auto done = [&] { return call.done || header_.cause_state.load() != 0 || (how.until && how.until()); };
  const auto idle = [&] { return Clock::now() - last_moved(how.since); };
  while (!call.done) {
    if (how.until && how.until()) return;
    check_alive(call.info(), how.launched);
    if (try_progress() || done()) continue;
    const bool shared = shares_core();
    for (int i = 0; i < 32 && !shared; ++i)
      spin_pause();
    if (shared || idle() > kSelfish) std::this_thread::yield();
    if (idle() < kSpin || sleep(done) || done() || idle() < kLook || try_progress()) continue;
    if (channel >= 0 && !how.until && idle() >= kCycleAfter) {
      shown_wait.show(channel);
      const PriorityLock lock(*this);
      if (const auto text = shown_wait.shows() ? cycle() : std::string(); !text.empty()) fail(text);
    }
    if (const auto text = trouble(channel, call, idle(), how.limit.value_or(timeout())); !text.empty()) fail(text);
  }
}

bool ShmWorld::wait_until(const ShmCall& call, Clock::time_point end) {
  const auto over = [&] { return call.done || header_.cause_state.load() != 0 || !owner_.is_here(); };
  while (!over() && Clock::now() < end) {
    if (!try_progress() && !over()) std::this_thread::yield();
  }
  return over();
}

std::string ShmWorld::join_numbers(std::vector<int> ranks) const {
  for (int& r : ranks)
    r = numbers_[r];
  return join(ranks);
}

void ShmWorld::wake() {
  if (!owner_.is_here()) return;
  ring(ranks_[rank_].doorbell);
}

std::vector<int> ShmWorld::missing(ShmEndpoint& endpoint, const ShmCall& call) {
  const PriorityLock lock(*this);
  return endpoint.missing(call);
}

// Why a call that does not move never will; empty when it may.
std::string ShmWorld::trouble(int channel, const ShmCall& call, Clock::duration idle, std::chrono::milliseconds limit) {
  ShmEndpoint& calls = [&]() -> ShmEndpoint& {
    const PriorityLock lock(*this);
    return endpoint(channel);
  }();
  const std::vector<int> waited_for = missing(calls, call);
  const std::string here = "rank " + std::to_string(numbers_[rank_]) + " in " + describe(call.info());
  const bool any = calls.one_will_do(call);
  std::string text;
  size_t gone = 0;
  for (const int r : waited_for) {
    const int pid = ranks_[r].pid.load();
    const uint64_t start = start_of_process(pid);
    const bool ended = start == 0 || start != ranks_[r].start.load();
    if (!ended && !calls.has_left(r)) continue;
    // What a rank wrote last may arrive between the look at its records and the one at its life: look at them again.
    const std::vector<int> now = missing(calls, call);
    if (std::find(now.begin(), now.end(), r) == now.end()) continue;
    gone += 1;
    text = ended ? here + " lost rank " + std::to_string(numbers_[r]) + ": its process " + std::to_string(pid) +
                       " has ended"
                 : "rank " + std::to_string(numbers_[r]) + " destroyed its group without making this call";
    if (!any || gone == waited_for.size()) return text;
  }
  if (idle < limit) return {};
  return here + " timed out after " + seconds_text(limit) + " waiting for rank(s) " + join_numbers(waited_for) +
         " (alive, but not in this call)";
}

}  // namespace tessera::comm
