// PointToPoint over a back end of torch.distributed.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

#include "tessera/comm/point_to_point.h"

namespace tessera::comm {

// A back end whose messages need no order among collectives, for tensors on `device`.
PointToPointPtr c10d_point_to_point(c10::intrusive_ptr<c10d::Backend> backend, at::Device device = at::kCPU);

// A back end for it, of ranks that meet at `store`, which has no other use: shared memory where that is the choice and this
// build has it as a back end, Gloo elsewhere. Collective.
c10::intrusive_ptr<c10d::Backend> point_to_point_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                         int size, std::chrono::milliseconds timeout, bool loopback);

}  // namespace tessera::comm
