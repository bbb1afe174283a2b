#include "tessera/comm/shm_world.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <thread>

#include "tessera/base/error.h"

namespace tessera::comm {
namespace {

constexpr auto kLook = std::chrono::milliseconds(100);  // how long a sleep is before a look at the others

// Spinning is faster than a sleep while every rank has a core, and in the way where not.
std::chrono::microseconds spin_time(int ranks) {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int cores = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  return std::chrono::microseconds(ranks <= cores ? 50 : 2);
}

std::string seconds_text(std::chrono::milliseconds time) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", std::chrono::duration<double>(time).count());
  return text;
}

}  // namespace

ShmWorld::ShmWorld(std::shared_ptr<ShmSegment> segment, int rank, int size, std::chrono::milliseconds timeout)
    : segment_(std::move(segment)),
      rank_(rank),
      size_(size),
      timeout_(timeout),
      header_(*reinterpret_cast<ShmHeader*>(segment_->data())),
      ranks_(reinterpret_cast<ShmRank*>(segment_->data() + ShmLayout{size}.ranks())),
      spin_(spin_time(size)) {
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

int ShmWorld::add_channel() {
  const std::scoped_lock lock(mutex_);
  const int channel = static_cast<int>(channels_.size());
  TESSERA_CHECK_VALUE(channel < kChannels, "comm", "a group over shared memory has at most ", kChannels - 1,
                      " siblings");
  segment_->reserve(ShmLayout{size_}.ring(channel, rank_), kRingBytes);
  channels_.push_back(std::make_unique<ShmChannel>(segment_->data(), channel, rank_, size_));
  return channel;
}

void ShmWorld::leave(int channel) {
  {
    const std::scoped_lock lock(mutex_);
    channels_[channel]->leave();
  }
  for (int r = 0; r < size_; ++r)
    ring(ranks_[r].bell);
}

std::string ShmWorld::cause() const {
  if (header_.cause_state.load() == 0) return {};
  // Another rank is just writing it, unless it died doing so.
  const auto end = Clock::now() + std::chrono::seconds(1);
  while (header_.cause_state.load() != 2 && Clock::now() < end)
    std::this_thread::yield();
  return header_.cause_state.load() == 2 ? std::string(header_.cause) : std::string("a rank failed and died");
}

void ShmWorld::fail(const std::string& text) {
  uint32_t none = 0;
  if (header_.cause_state.compare_exchange_strong(none, 1)) {
    const size_t length = std::min(text.size(), sizeof(header_.cause) - 1);
    std::memcpy(header_.cause, text.data(), length);
    header_.cause[length] = '\0';
    header_.cause_state.store(2);
  }
  for (int r = 0; r < size_; ++r)
    ring(ranks_[r].bell);
}

void ShmWorld::abort(const std::string& reason) {
  fail("rank " + std::to_string(rank_) + " aborted: " + reason);
}

void ShmWorld::check_alive(const OpInfo& info, Clock::time_point since) const {
  if (header_.cause_state.load() == 0) return;
  throw_failed(rank_, size_, info, std::chrono::duration<double>(Clock::now() - since).count(), cause());
}

// Moves all calls in flight; nothing once the group has failed.
bool ShmWorld::progress() {
  if (header_.cause_state.load() != 0) return false;
  bool moved = false;
  for (const auto& channel : channels_) {
    moved = channel->progress() || moved;
    if (!channel->disagreement().empty()) fail(channel->disagreement());
  }
  return moved;
}

void ShmWorld::launch(int channel, const ShmOpPtr& op) {
  const std::scoped_lock lock(mutex_);
  check_alive(op->info(), Clock::now());
  channels_[channel]->add(op);
  channels_[channel]->progress();
  if (const auto& text = channels_[channel]->disagreement(); !text.empty()) fail(text);
}

// Says that a thread of this rank is about to sleep.
struct ShmWorld::Sleep {
  Sleep(Bell& bell, bool wants_space) : bell_(bell), wants_space_(wants_space) {
    bell.sleepers.fetch_add(1);
    if (wants_space) bell.wants_space.fetch_add(1);
  }
  ~Sleep() {
    bell_.sleepers.fetch_sub(1);
    if (wants_space_) bell_.wants_space.fetch_sub(1);
  }
  Bell& bell_;
  const bool wants_space_;
};

void ShmWorld::wait(int channel, ShmOp& op, Clock::time_point launched) {
  auto moved = Clock::now();  // when anything last did
  Bell& bell = ranks_[rank_].bell;
  std::unique_lock lock(mutex_);
  while (true) {
    if (progress()) moved = Clock::now();
    if (op.done) return;
    check_alive(op.info(), launched);
    for (int i = 0; i < 32; ++i)
      spin_pause();
    if (Clock::now() - moved < spin_) continue;
    const uint32_t count = bell.count.load();
    const bool space = std::any_of(channels_.begin(), channels_.end(), [](auto& c) { return c->wants_space(); });
    const Sleep asleep(bell, space);
    if (progress() || op.done || header_.cause_state.load() != 0) continue;
    lock.unlock();
    sleep_at(bell, count, kLook);
    lock.lock();
    if (op.done || header_.cause_state.load() != 0 || Clock::now() - moved < kLook) continue;
    if (progress()) {
      moved = Clock::now();
    } else if (const auto text = trouble(channel, op.info(), moved); !text.empty()) {
      fail(text);
    }
  }
}

// Why a call that does not move never will; empty when it may.
std::string ShmWorld::trouble(int channel, const OpInfo& info, Clock::time_point since) {
  ShmChannel& calls = *channels_[channel];
  const std::vector<int> missing = calls.missing();
  const std::string here = "rank " + std::to_string(rank_) + " in " + describe(info);
  // What a rank wrote last may arrive between the look at its records and the one at its life: look at them again.
  const auto still_missing = [&](int r) {
    const std::vector<int> now = calls.missing();
    return std::find(now.begin(), now.end(), r) != now.end();
  };
  for (const int r : missing) {
    const int pid = ranks_[r].pid.load();
    const uint64_t start = start_of_process(pid);
    const bool ended = start == 0 || start != ranks_[r].start.load();
    if ((!ended && !calls.has_left(r)) || !still_missing(r)) continue;
    if (!ended) return "rank " + std::to_string(r) + " destroyed its group without making this call";
    return here + " lost rank " + std::to_string(r) + ": its process " + std::to_string(pid) + " has ended";
  }
  if (Clock::now() - since < timeout_) return {};
  return here + " timed out after " + seconds_text(timeout_) + " waiting for rank(s) " + join(missing) +
         " (alive, but not in this call)";
}

}  // namespace tessera::comm
