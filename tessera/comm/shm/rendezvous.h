// How the ranks of a host come to share a segment.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <vector>

#include "tessera/comm/shm/world.h"

namespace tessera::comm {

// A rank's share in a new channel of its world: it leaves when nobody holds the share any more.
struct ShmShare {
  explicit ShmShare(std::shared_ptr<ShmWorld> of) : world(std::move(of)), channel(world->add_channel()) {}
  ~ShmShare() { world->leave(channel); }
  ShmShare(const ShmShare&) = delete;
  ShmShare& operator=(const ShmShare&) = delete;

  const std::shared_ptr<ShmWorld> world;
  const int channel;
};
using ShmSharePtr = std::shared_ptr<ShmShare>;

// The first channel of `size` processes of one host and user that use `store`. Collective; the store is not needed
// afterwards. DistBackendError on all ranks, with one text, when one of them cannot take part (another host or process
// namespace, no memory) or has not come within the store's timeout. `timeout`: longest wait for a rank later. `numbers`: as
// for ShmWorld.
ShmSharePtr shm_rendezvous(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout,
                           std::vector<int> numbers = {});

// Shares of threads of this process as ranks: element r is for the thread of rank r.
std::vector<ShmSharePtr> shm_thread_shares(int size, std::chrono::milliseconds timeout,
                                           const std::vector<int>& numbers = {});

}  // namespace tessera::comm
