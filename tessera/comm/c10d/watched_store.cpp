#include "tessera/comm/c10d/watched_store.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <thread>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/comm/c10d/reach_store.h"
#include "tessera/comm/op_info.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Host = std::optional<FaultBoard::Process>;

constexpr auto kSlice = milliseconds(500);
constexpr auto kHearing = std::chrono::seconds(2);
constexpr auto kConnection = std::chrono::seconds(2);  // until the host is looked at again
constexpr auto kAnswer = std::chrono::seconds(5);      // for the answer of a store that is there
constexpr auto kEnd = std::chrono::seconds(2);         // for the end of a process whose connections have ended

std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

std::string lost(int rank, int pid) {
  return "lost rank " + std::to_string(rank) + ": its process " + std::to_string(pid) + " has ended";
}

// What an error of the store means that process `host` of rank 0 may have hosted. A process loses its connections before it
// has ended.
std::string unreachable(const std::exception& error, const Host& host = std::nullopt) {
  const auto end = Clock::now() + kEnd;
  while (host && host->start != 0 && !host->has_ended() && Clock::now() < end)
    std::this_thread::sleep_for(milliseconds(20));
  if (host && host->has_ended()) return lost(0, host->pid);
  return "the store cannot be reached; the process that hosts it (usually rank 0) may have ended: " + first_line(error);
}

std::string both_have(int rank) {
  return " both have RANK " + std::to_string(rank);
}

// What is known to be wrong; empty while all may be well.
std::string trouble(FaultBoard& board, int rank, int size) {
  if (const auto cause = board.reported()) return *cause;
  for (int r = 0; r < size; ++r) {
    const auto pid = r == rank ? std::nullopt : board.ended_process(r);
    if (pid) return lost(r, *pid);
  }
  return {};
}

[[noreturn]] void fail(int rank, int size, const std::string& text) {
  TESSERA_CHECK_DIST(false, "comm", "rank ", rank, " of ", size, ": ", text);
}

// The store that open_job_store() returns: it knows where all ranks of the job have shown their processes.
class JobStore final : public c10d::PrefixStore {
 public:
  JobStore(const std::string& prefix, StorePtr job, int size) : PrefixStore(prefix, std::move(job)), size_(size) {}
  StorePtr clone() override { return c10::make_intrusive<JobStore>(prefix_, store_->clone(), size_); }
  const StorePtr& job() const { return store_; }
  int size() const { return size_; }

 private:
  const int size_;
};

// Where the ranks of `store` have shown their processes before, where those are all of the job's.
StorePtr job_of(StorePtr store, int size) {
  while (auto* const part = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    if (const auto* const job = dynamic_cast<JobStore*>(part)) return job->size() == size ? job->job() : nullptr;
    store = part->getUnderlyingStore();
  }
  return nullptr;
}

// Who hosted the store at a place when this process was there before. Where the host has ended and nobody has come in its place,
// torch would wait for it. Never destroyed, as the hosts may be used at the end of the process.
struct StoreHosts {
  std::mutex mutex;
  std::map<std::string, FaultBoard::Process> by_place;

  static StoreHosts& known() {
    static auto& hosts = *new StoreHosts;
    return hosts;
  }
  void note(const std::string& place, const FaultBoard::Process& host) {
    const std::scoped_lock lock(mutex);
    by_place[place] = host;
  }
  Host at(const std::string& place) {
    const std::scoped_lock lock(mutex);
    const auto host = by_place.find(place);
    return host == by_place.end() ? std::nullopt : std::optional(host->second);
  }
};

std::string store_place(const std::string& address, int port) {
  return address + ":" + std::to_string(port);
}

// The store at a place, which `host` hosts where that is known, or hosted: who listens there once the host has ended is the new
// rank 0, or what is left of the host for a moment. So each try is short.
StorePtr connect(const std::string& address, c10d::TCPStoreOptions options, const Host& host, int rank, int size) {
  if (!host) return reach_store(address, options);
  const auto timeout = options.timeout;
  const auto end = Clock::now() + timeout;
  options.timeout = std::min<milliseconds>(timeout, kConnection);
  while (!host->has_ended() || listens(address, options.port) == true) {
    try {
      const StorePtr store = reach_store(address, options);
      store->setTimeout(timeout);
      return store;
    } catch (const c10::DistError&) {
      if (Clock::now() >= end) throw;
    }
  }
  fail(rank, size, lost(0, host->pid));
}

// Throws the error once the others have had the time to hear of it, through a store that may go with this process.
[[noreturn]] void fail_all(FaultBoard& board, int rank, int size, const std::string& text) {
  const std::string first = board.report(text);
  std::this_thread::sleep_for(kHearing);
  fail(rank, size, first);
}

// Calls come_together() at a store that `host` hosts, where that is known.
void find_ranks(const StorePtr& store, int rank, int size, const Host& host) {
  FaultBoard board = job_board(store, rank, size);
  if (const auto both = board.show_process()) {
    const std::string text = *both + both_have(rank);
    board.report(text);
    std::this_thread::sleep_for(kHearing);
    TESSERA_CHECK_VALUE(false, "comm", text, "; give every process a RANK of its own, from 0 to ", size - 1);
  }
  const auto begin = Clock::now();
  std::vector<int> missing(size), came;
  std::iota(missing.begin(), missing.end(), 0);
  while (true) {
    try {
      const auto there =
          std::stable_partition(missing.begin(), missing.end(), [&](int r) { return !board.has_shown(r); });
      came.insert(came.end(), there, missing.end());
      missing.erase(there, missing.end());
    } catch (const std::exception& error) {
      fail(rank, size, unreachable(error, host));
    }
    if (missing.empty()) return;
    std::string text = trouble(board, rank, size);
    const auto waited = std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - begin);
    if (text.empty() && waited >= store->getTimeout()) {
      std::sort(came.begin(), came.end());
      text = "rank(s) " + join(missing) + " did not come within " + std::to_string(waited.count()) + " s, rank(s) " +
             join(came) + " did";
    }
    if (!text.empty()) fail_all(board, rank, size, text);
    board.await_process(missing.front(), kSlice);
  }
}

}  // namespace

WatchedStore::WatchedStore(const StorePtr& store, FaultBoard board, int rank, int size)
    : PrefixStore("watched", store), board_(std::move(board)), rank_(rank), size_(size) {
  board_.ended_process(0);  // it may host the store: has to be known before that is gone
}

StorePtr WatchedStore::clone() {
  const std::scoped_lock lock(mutex_);
  return c10::make_intrusive<WatchedStore>(store_->clone(), board_, rank_, size_);
}

// Throws when the keys will never come.
void WatchedStore::look(const std::vector<std::string>& keys) {
  const std::scoped_lock lock(mutex_);
  std::string text = trouble(board_, rank_, size_);
  try {
    if (check(keys)) return;  // whatever became of who set them
  } catch (const std::exception& error) {
    if (text.empty()) text = unreachable(error, board_.process_of(0));
  }
  if (!text.empty()) fail_all(board_, rank_, size_, text);
}

std::vector<uint8_t> WatchedStore::get(const std::string& key) {
  wait({key});
  return PrefixStore::get(key);
}

void WatchedStore::wait(const std::vector<std::string>& keys) {
  wait(keys, getTimeout());
}

void WatchedStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  const auto end = Clock::now() + timeout;
  while (true) {
    const auto left = std::chrono::duration_cast<milliseconds>(end - Clock::now());
    try {
      if (come_within(*this, keys, std::clamp(left, milliseconds(0), kSlice))) return;
    } catch (const std::exception&) {
      // look() says what it means
    }
    look(keys);
    if (left <= kSlice) return PrefixStore::wait(keys, milliseconds(1));  // its error
  }
}

void store_lost(int rank, int size, const std::exception& error) {
  fail(rank, size, unreachable(error));
}

std::string what_happened(const std::exception& error, const std::string& address, int port) {
  const bool of_store = dynamic_cast<const c10::DistError*>(&error) != nullptr &&
                        dynamic_cast<const c10::DistBackendError*>(&error) == nullptr;
  const Host host = of_store ? StoreHosts::known().at(store_place(address, port)) : std::nullopt;
  return host ? unreachable(error, host) : first_line(error);
}

FaultBoard job_board(const StorePtr& store, int rank, int size, const std::string& group) {
  return {store, rank, size, group, job_of(store, size)};
}

StorePtr fresh_store(const StorePtr& store, const std::string& name, int rank) {
  const std::string prefix = "tessera/" + name;
  const int64_t count = store->add(prefix + "/" + std::to_string(rank), 1);
  return c10::make_intrusive<c10d::PrefixStore>(prefix + "_" + std::to_string(count), store);
}

StorePtr watch_store(const StorePtr& store, int rank, int size) {
  FaultBoard board = job_board(store, rank, size);
  board.show_process();
  return c10::make_intrusive<WatchedStore>(store, std::move(board), rank, size);
}

StorePtr watch_fresh_store(const StorePtr& store, const std::string& name, int rank, int size) {
  FaultBoard board = job_board(store, rank, size);
  board.show_process();
  return c10::make_intrusive<WatchedStore>(fresh_store(store, name, rank), std::move(board), rank, size);
}

void come_together(const StorePtr& store, int rank, int size) {
  find_ranks(store, rank, size, std::nullopt);
}

StorePtr open_job_store(const std::string& address, int port, int rank, int size, milliseconds timeout) {
  // A torchrun agent keeps its store over restarts, and a process may come several times: none may see another's keys.
  const std::string prefix =
      "tessera/attempt_" + std::to_string(env::get_int("TORCHELASTIC_RESTART_COUNT").value_or(0));
  const bool hosted = env::get("TORCHELASTIC_USE_AGENT_STORE").value_or("") != "True";
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.isServer = rank == 0 && hosted;
  options.waitWorkers = false;  // come_together() follows
  options.timeout = timeout;
  options.multiTenant = true;
  const std::string place = store_place(address, port);
  const auto open = [&] {
    const Host host = options.isServer ? std::nullopt : StoreHosts::known().at(place);
    StorePtr store = c10::make_intrusive<c10d::PrefixStore>(prefix, connect(address, options, host, rank, size));
    find_ranks(store, rank, size, host);
    if (const Host now = job_board(store, rank, size).process_of(0); hosted && now)
      StoreHosts::known().note(place, *now);
    return store;
  };
  StorePtr store;
  try {
    store = open();
  } catch (const c10::DistNetworkError& error) {
    if (!options.isServer) throw;
    // The port is taken. If another rank 0 has it, that one has to hear of it.
    options.isServer = false;
    options.timeout = kAnswer;
    try {
      open();
    } catch (const std::exception& refused) {
      // Whichever of the two came second says it; any other error means that the port is somebody else's.
      if (std::string(refused.what()).find(both_have(rank)) != std::string::npos) throw;
    }
    fail(rank, size, first_line(error));
  }
  const int64_t count = store->add("groups_of_rank_" + std::to_string(rank), 1);
  return c10::make_intrusive<JobStore>(std::to_string(count), store, size);
}

}  // namespace tessera::comm
