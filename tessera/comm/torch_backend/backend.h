// Shared memory as a back end of torch.distributed, so that DDP, FSDP2 and every other user of a process group may have
// it: the same records and sums as those of Tessera's own group (Note [Shared memory] in shm/group.h).
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>

#include "tessera/comm/shm/rendezvous.h"
#include "tessera/comm/torch_backend/side_threads.h"

namespace tessera::comm {

// Makes the back end of another group, of ranks that use `store`: see tessera_backend().
using MakeBackend = std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout)>;

// The back end takes CPU tensors of any dtype and layout; it reduces floating, integer and bool ones, added in rank order, bf16
// and fp16 in fp32. Sum and product of bool are or and and. All ranks make the same collectives in one order; messages
// (send, recv) need no order among them. Sparse tensors can be summed by allreduce. Errors of arguments are value errors,
// others DistBackendError. `make`: for split() and merge(); none: it has neither. `threads`: many back ends may share them.
c10::intrusive_ptr<c10d::Backend> shm_backend(ShmSharePtr share, MakeBackend make = nullptr,
                                              SideThreadsPtr threads = std::make_shared<SideThreads>());

}  // namespace tessera::comm
