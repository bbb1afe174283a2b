// Large messages between ranks of one host, without a copy at the receiver.
#pragma once

#include <chrono>
#include <vector>

#include "tessera/comm/point_to_point.h"

namespace tessera::comm {

// `inner`, which is for tensors on the CPU, but that tensors of 64 KiB and more go to ranks r with near[r], of this host, as the place of a
// segment (Note [Reserved before use] in shm/segment.h): share() writes it, once, and take() maps it, with writes that stay the
// receiver's own. What has been taken by all it was sent to is let go of at the next send. All ranks have such an object, and the
// same view of who is near whom.
// `timeout`: longest wait of settle() and flush() for a rank to map a tensor.
PointToPointPtr shared_messages(PointToPointPtr inner, std::vector<bool> near, std::chrono::milliseconds timeout);

}  // namespace tessera::comm
