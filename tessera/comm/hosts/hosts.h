// Which ranks of a group share a host, so that they can share memory, and whether a process of this host still runs.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::comm {

// The host's id, equal for two processes that can map each other's memory: one boot of one machine, one process namespace, one
// user. TESSERA_HOST_ID takes its place where it is set.
std::string host_id();

// When the process with this id began, in ticks since the machine did; 0 when there is none or it has ended (a zombie
// too). Together with the id it names one process for good.
uint64_t start_of_process(int pid);

struct Hosts {
  std::vector<int> of_rank;  // hosts are numbered in the order of their first ranks

  int count() const;
  // The ranks of a host, ascending.
  std::vector<int> ranks_on(int host) const;
};

// `ids[r]`: host_id() of rank r.
Hosts group_by_host(const std::vector<std::string>& ids);

// Returns what every rank says about `topic`, by rank. Collective over the ranks that use `store`; an error of the store when one
// does not come within its timeout.
std::vector<std::string> exchange(c10d::Store& store, int rank, int size, const std::string& topic,
                                  const std::string& text);

}  // namespace tessera::comm
