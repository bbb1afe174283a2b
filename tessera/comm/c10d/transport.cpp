#include "tessera/comm/c10d/transport.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/comm/c10d/watched_store.h"
#include "tessera/comm/hosts/group.h"
#include "tessera/comm/op_info.h"
#include "tessera/comm/shm/group.h"

namespace tessera::comm {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr auto kAtHand = "gloo";
constexpr auto kShared = "shared_memory";
constexpr auto kAuto = "auto";
constexpr auto kWell = "ok";
// The network speaks first when ranks of several hosts do not come: it knows who.
constexpr auto kLonger = std::chrono::seconds(10);

std::string read_transport() {
  const std::string name = env::get("TESSERA_TRANSPORT").value_or(kAuto);
  TESSERA_CHECK_VALUE(name == kAtHand || name == kShared || name == kAuto, "comm", "TESSERA_TRANSPORT is '", name,
                      "'; it may be auto, gloo or shared_memory");
  return name;
}

void warn(int rank, const std::string& text) {
  if (rank == 0) {
    TORCH_WARN(text, "; the ranks talk through the network instead");
  }
}

// Shares memory within each host. Null when a host cannot share it.
GroupPtr share_within_hosts(const StorePtr& store, const Hosts& hosts, int rank, std::chrono::milliseconds timeout,
                            const std::function<GroupPtr()>& at_hand) {
  const int host = hosts.of_rank[rank];
  const std::vector<int> ranks = hosts.ranks_on(host);
  const auto place = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  ShmSharePtr here;
  std::string announced = kWell;
  try {
    c10d::PrefixStore of_host("host_" + std::to_string(host), store);
    here = ranks.size() == 1 ? shm_thread_shares(1, timeout + kLonger, ranks)[0]
                             : shm_rendezvous(of_host, place, static_cast<int>(ranks.size()), timeout + kLonger, ranks);
  } catch (const c10::DistBackendError& error) {
    announced = cause_of(error);
  }
  for (const std::string& text : exchange(*store, rank, static_cast<int>(hosts.of_rank.size()), "shares", announced)) {
    if (text == kWell) continue;
    warn(rank, text);
    return nullptr;
  }
  return hosts_group(hosts, rank, std::move(here), at_hand);
}

}  // namespace

std::vector<std::string> exchange_all(const StorePtr& store, int rank, int size, const std::string& topic,
                                      const std::string& text) {
  const StorePtr fresh = watch_fresh_store(store, topic, rank, size);
  std::vector<std::string> texts = exchange(*fresh, rank, size, topic, text);
  leave_together(*fresh, rank, size);
  return texts;
}

std::optional<Hosts> find_hosts(c10d::Store& store, int rank, int size) {
  const std::string mine = read_transport();
  std::vector<std::string> ids = exchange(store, rank, size, "host", mine + "\n" + host_id());
  for (int r = 0; r < size; ++r) {
    const std::string theirs = ids[r].substr(0, ids[r].find('\n'));
    TESSERA_CHECK_VALUE(theirs == mine, "comm", "TESSERA_TRANSPORT is '", mine, "' on rank ", rank, " and '", theirs,
                        "' on rank ", r, "; it must be the same everywhere");
  }
  if (mine == kAtHand) return std::nullopt;
  Hosts hosts = group_by_host(ids);
  TESSERA_CHECK_DIST(mine == kAuto || hosts.count() == 1, "comm", "TESSERA_TRANSPORT is ", kShared, ", but the ", size,
                     " ranks are on ", hosts.count(), " hosts");
  return hosts;
}

bool try_sharing(int rank, const std::function<void()>& share) {
  const bool must = read_transport() == kShared;
  try {
    share();
    return true;
  } catch (const c10::DistBackendError& error) {
    if (must) throw;
    warn(rank, error.what_without_backtrace());
    return false;
  }
}

void check_transport() {
  read_transport();
}

GroupPtr choose_transport(const StorePtr& store, int rank, int size, std::chrono::milliseconds timeout,
                          const std::function<GroupPtr()>& at_hand) {
  const auto hosts = find_hosts(*store, rank, size);
  GroupPtr group;
  if (hosts && hosts->count() == 1) try_sharing(rank, [&] { group = shm_group(*store, rank, size, timeout); });
  if (hosts && hosts->count() > 1 && hosts->count() < size)
    group = share_within_hosts(store, *hosts, rank, timeout, at_hand);
  return group ? group : at_hand();
}

}  // namespace tessera::comm
