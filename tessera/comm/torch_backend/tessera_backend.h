// The back end "tessera" of torch.distributed, an option of the build (TESSERA_TORCH_BACKEND): this is the door to it.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

#include "tessera/comm/torch_backend/side_threads.h"

namespace tessera::comm {

// Shared memory as a back end, or Gloo where that is the choice (Note [Choice of transport] in c10d/transport.h). Collective;
// `store` may have been used before. `threads`: those of this back end and of its splits. Value error in a build without it.
c10::intrusive_ptr<c10d::Backend> tessera_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                  std::chrono::milliseconds timeout,
                                                  const SideThreadsPtr& threads = std::make_shared<SideThreads>());

}  // namespace tessera::comm
