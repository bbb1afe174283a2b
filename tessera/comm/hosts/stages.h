// The collectives over several hosts as stages, see group.h. All calls are collective and block. Tensors as for
// Group's calls; `text` names the call.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tessera/comm/hosts/hosts.h"
#include "tessera/comm/shm/rendezvous.h"

namespace tessera::comm {

// Where this rank stands, and what carries its data.
struct HostsPlace {
  Hosts hosts;
  int rank;
  ShmSharePtr here;  // the ranks of this host, in rank order
  GroupPtr between;  // all ranks, over the back end at hand

  int size() const { return static_cast<int>(hosts.of_rank.size()); }
};

void hosts_all_gather(const HostsPlace& place, const at::Tensor& out, const at::Tensor& in, const std::string& text);
void hosts_reduce_scatter(const HostsPlace& place, const at::Tensor& out, const at::Tensor& in, ReduceOp op,
                          const std::string& text);
void hosts_all_reduce(const HostsPlace& place, const at::Tensor& tensor, ReduceOp op, const std::string& text);
void hosts_broadcast(const HostsPlace& place, const at::Tensor& tensor, int root, const std::string& text);
// Splits count elements.
void hosts_all_to_all(const HostsPlace& place, const at::Tensor& out, const at::Tensor& in,
                      const std::vector<int64_t>& out_splits, const std::vector<int64_t>& in_splits,
                      const std::string& text);

}  // namespace tessera::comm
