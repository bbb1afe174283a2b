// Ranks of one host over shared memory; users call environment_group() of backends.h.
//
// Note [Shared memory]
//   A Group of its own rather than a torch back end under the c10d group: a call of a few KiB costs about a microsecond
//   here, and c10d's dispatch, its Work and the messages between pairs would each cost more than that. Data goes through
//   rings in a segment (segment.h) as records of up to 64 KiB that stay in the caches between the writer and its
//   readers (op.h, channel.h); sums are added straight from the others' rings in rank order, so the bits are
//   those of Note [Order of summation]. Every record says which call it belongs to: different calls are named at once.
//   world.h has the waits and what happens when a rank is lost.
//
//     group      the Group                           op, sum   collectives as scripts of steps
//     rendezvous how ranks come together             pieces    how tensors are cut into records
//     world      one rank: waits, faults             layout    what lies where
//     channel    calls in flight, records            signal    futex
//     endpoint   what moves with the channels        segment   the memory
//                                                    memory    memory for tensors of all ranks
//   ../torch_backend has the same for torch.distributed.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::comm {

// The group of `size` processes of one host and user that use `store`. Collective. DistBackendError on all
// ranks when one cannot take part (another host, no memory) or has not come after `timeout`, which is also the longest
// wait for a rank later.
GroupPtr shm_group(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout);

// Groups over shared memory whose ranks are threads of this process: element r is for the thread of rank r. For tests.
std::vector<GroupPtr> shm_thread_groups(int size, std::chrono::milliseconds timeout);

}  // namespace tessera::comm
