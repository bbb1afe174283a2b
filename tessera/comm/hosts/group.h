// A group whose ranks are on several hosts: over shared memory within a host, over the back end at hand between hosts.
//
// Note [Order of summation over hosts]
//   Every host adds what its ranks bring in rank order; the sums of the hosts are added in the order of their first ranks.
//   Additions are in fp32 for fp32, bf16 and fp16 (double for double, integers in their own type), and a sum is rounded once. As
//   in a group within a host, an element's bits depend neither on timing, nor on its place, nor on reduce_scatter or all_reduce;
//   but only sums that are exact are the same as with all ranks on one host.
// Note [Stages]
//   A collective goes through stages within hosts and between them. A thread of the group takes the calls through theirs in
//   the order of launching, so ranks need not wait in one order, siblings (each with a thread) do not hold each other up,
//   and calls overlap with computation. Ranks of equal place on their hosts talk to each other: every rank sends between
//   hosts what is its share of the host's data, and nothing travels twice.
#pragma once

#include <functional>

#include "tessera/comm/hosts/hosts.h"
#include "tessera/comm/shm/rendezvous.h"

namespace tessera::comm {

// `here`: this rank among those of its host, in rank order, which has world numbers (ShmWorld) of `hosts`. `between` makes a
// group of all ranks over the back end at hand, each with an order of its own. Collective.
GroupPtr hosts_group(Hosts hosts, int rank, ShmSharePtr here, std::function<GroupPtr()> between);

}  // namespace tessera::comm
