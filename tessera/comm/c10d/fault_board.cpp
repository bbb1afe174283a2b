#include "tessera/comm/c10d/fault_board.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <thread>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/hosts/hosts.h"
#include "tessera/comm/op_info.h"

namespace tessera::comm {

bool come_within(c10d::Store& store, const std::vector<std::string>& keys, std::chrono::milliseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  for (auto pause = std::chrono::milliseconds(1); !store.check(keys);
       pause = std::min(2 * pause, std::chrono::milliseconds(100))) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(pause);
  }
  return true;
}

std::string announced_by(c10d::Store& store, const std::string& key, int rank) try {
  return store.get_to_str(key);
} catch (const c10::DistStoreError& error) {
  TESSERA_FAIL(c10::DistBackendError, "[comm] rank ", rank, " did not come within ", store.getTimeout().count() / 1000,
               " s (dead, or busy elsewhere): ", error.what_without_backtrace());
}

void leave_together(c10d::Store& store, int rank, int size) {
  const auto key = [](const char* what, int r) { return "end/" + std::string(what) + "_" + std::to_string(r); };
  const auto await_others = [&](const char* what) {
    for (int r = 1; r < size; ++r)
      announced_by(store, key(what, r), r);
  };
  if (rank > 0) {
    store.set(key("here", rank), std::string("1"));
    announced_by(store, key("all", 0), 0);
    store.set(key("leaves", rank), std::string("1"));
    return;
  }
  await_others("here");
  store.set(key("all", 0), std::string("1"));
  await_others("leaves");
}

namespace {

// The key of a process, the same for all groups over a store, whose ranks are the same.
std::string process_key(int rank) {
  return "tessera/fault/process/" + std::to_string(rank);
}

}  // namespace

FaultBoard::FaultBoard(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::string group,
                       c10::intrusive_ptr<c10d::Store> job)
    : store_(std::move(store)), job_(std::move(job)), rank_(rank), size_(size), group_(std::move(group)) {}

std::string FaultBoard::key(const std::string& what) const {
  return "tessera/fault/" + group_ + "/" + what;
}

std::string FaultBoard::report(const std::string& cause) {
  if (!store_) return cause;
  try {
    return store_->compareSet(key("cause"), std::string(), cause);
  } catch (const std::exception&) {
    return cause;  // the roll call reports the store
  }
}

std::optional<std::string> FaultBoard::reported() {
  if (!store_) return std::nullopt;
  try {
    if (!store_->check({key("cause")})) return std::nullopt;
    return store_->get_to_str(key("cause"));
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

void FaultBoard::show_calls(const std::string& calls) {
  if (!store_) return;
  try {
    store_->set(key("calls/" + std::to_string(rank_)), calls);
  } catch (const std::exception&) {
    // The wait that goes on notices what is wrong with the store's host.
  }
}

std::string FaultBoard::shown_calls(int rank) {
  const std::string name = key("calls/" + std::to_string(rank));
  try {
    return store_ && store_->check({name}) ? store_->get_to_str(name) : std::string();
  } catch (const std::exception&) {
    return {};
  }
}

std::optional<std::string> FaultBoard::show_process() {
  if (!store_) return std::nullopt;
  const int pid = getpid();
  const std::string name = process_key(rank_);
  const std::string mine = std::to_string(pid) + " " + std::to_string(start_of_process(pid)) + " " + host_id();
  try {
    const std::string there = store_->compareSet(name, std::string(), mine);
    if (there == mine) return std::nullopt;
    const auto other = process_of(rank_);
    if (other && other->has_ended()) {  // a process of an earlier attempt
      store_->set(name, mine);
      processes_.erase(rank_);
      return std::nullopt;
    }
    return "processes " + there.substr(0, there.find(' ')) + " and " + std::to_string(pid) +
           (other && other->start != 0 ? " of one host" : " of two hosts");
  } catch (const std::exception&) {
    return std::nullopt;  // the first collective notices what is wrong with the store's host
  }
}

bool FaultBoard::has_shown(int rank) {
  return processes_.contains(rank) || store_->check({process_key(rank)});
}

void FaultBoard::await_process(int rank, std::chrono::milliseconds limit) {
  try {
    come_within(*store_, {process_key(rank)}, limit);
  } catch (const std::exception&) {
    // has_shown() says what is wrong
  }
}

bool FaultBoard::Process::has_ended() const {
  return start != 0 && start_of_process(pid) != start;
}

std::optional<FaultBoard::Process> FaultBoard::process_of(int rank) {
  if (const auto known = processes_.find(rank); known != processes_.end()) return known->second;
  const std::string name = process_key(rank);
  try {
    c10d::Store* there = nullptr;
    for (c10d::Store* store : {store_.get(), job_.get()})
      if (there == nullptr && store != nullptr && store->check({name})) there = store;
    if (there == nullptr) return std::nullopt;
    std::istringstream text(there->get_to_str(name));
    Process process;
    std::string host;
    std::getline(text >> process.pid >> process.start >> std::ws, host);
    if (host != host_id()) process.start = 0;
    return processes_[rank] = process;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

std::optional<int> FaultBoard::ended_process(int rank) {
  const auto process = process_of(rank);
  return process && process->has_ended() ? std::optional(process->pid) : std::nullopt;
}

std::string FaultBoard::roll_call(std::chrono::milliseconds limit) {
  if (!store_) return {};
  const auto deadline = std::chrono::steady_clock::now() + limit;
  std::vector<int> missing;
  try {
    store_->set(key("alive/" + std::to_string(rank_)), std::string("1"));
    for (int r = 0; r < size_; ++r) {
      if (r != rank_) missing.push_back(r);
    }
    while (true) {
      std::erase_if(missing, [&](int r) { return store_->check({key("alive/" + std::to_string(r))}); });
      if (missing.empty()) return {};
      if (std::chrono::steady_clock::now() >= deadline) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  } catch (const std::exception&) {
    return "the group's store cannot be reached: the process that hosts it (usually rank 0) may be dead";
  }
  char seconds[16];
  std::snprintf(seconds, sizeof(seconds), "%.1f s", std::chrono::duration<double>(limit).count());
  return std::string("no answer within ") + seconds + " from rank(s) " + join(missing) +
         " (dead, or busy outside of any collective)";
}

}  // namespace tessera::comm
