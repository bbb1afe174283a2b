// Ranks as threads that count as ranks of several hosts: over Gloo between them.
#pragma once

#include "tessera/comm/c10d/group.h"
#include "tessera/comm/hosts/group.h"
#include "tests/comm/c10d/gloo_threads.h"

namespace tessera::testing {

// `host_of[r]`: host of rank r. fn(rank, its share in the memory of its host, maker of groups of all ranks).
inline void run_hosts(const std::vector<int>& host_of,
                      const std::function<void(int, comm::ShmSharePtr, std::function<comm::GroupPtr()>)>& fn) {
  const comm::Hosts hosts{host_of};
  std::vector<comm::ShmSharePtr> shares(host_of.size());
  for (int h = 0; h < hosts.count(); ++h) {
    const auto ranks = hosts.ranks_on(h);
    auto of_host = comm::shm_thread_shares(static_cast<int>(ranks.size()), std::chrono::minutes(2), ranks);
    for (size_t i = 0; i < ranks.size(); ++i)
      shares[ranks[i]] = std::move(of_host[i]);
  }
  run_gloo_threads(static_cast<int>(host_of.size()), [&](int rank, TorchGroup torch) {
    fn(rank, std::move(shares[rank]),
       [torch] { return comm::make_c10d_group(nullptr, torch, comm::C10dPath::ByDevice); });
  });
}

// Everything in one order: hosts of one size, of different ones, a lone rank, ranks dealt out in turns.
inline const std::vector<std::vector<int>> kHosts = {
    {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 1}, {0, 1, 1, 1}, {0, 1, 2, 0, 1}};

}  // namespace tessera::testing
