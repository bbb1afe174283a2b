// PointToPoint over a back end of torch.distributed.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

#include "tessera/comm/point_to_point.h"
#include "tessera/comm/torch_backend/side_threads.h"

namespace tessera::comm {

// Makes messages over a back end which need no order among collectives, for tensors on `device`.
PointToPointPtr c10d_point_to_point(c10::intrusive_ptr<c10d::Backend> backend, at::Device device = at::kCPU);

// A back end for such messages, of ranks that use `store`, which has no other use: shared memory where it is the choice and this
// build has it as a back end, Gloo elsewhere. Collective. `threads`: as of tessera_backend().
c10::intrusive_ptr<c10d::Backend> point_to_point_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout, bool loopback,
    const SideThreadsPtr& threads = std::make_shared<SideThreads>());

// Messages between ranks that use `store`, which may have been used before: over memory within a host (large ones as of
// shm/shared_messages.h) and over Gloo between hosts; without `shares` over Gloo everywhere. Collective; other calls wait for
// a rank `timeout` at most, this one as long as the store does.
PointToPointPtr store_point_to_point(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                     std::chrono::milliseconds timeout, bool shares,
                                     const SideThreadsPtr& threads = std::make_shared<SideThreads>());

}  // namespace tessera::comm
