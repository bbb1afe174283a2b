// ShmEndpoint: what a rank has in flight through rings of one kind: the collectives of a channel, or what a user of the world
// attaches, as the back end for torch does with its messages.
#pragma once

#include <string>
#include <vector>

#include "tessera/comm/shm/op.h"

namespace tessera::comm {

// One thread at a time may use an endpoint.
class ShmEndpoint {
 public:
  virtual ~ShmEndpoint() = default;
  // Moves what can be moved, up to some MiB, and tells the other ranks; returns whether there was anything.
  virtual bool progress() = 0;
  // What the ranks disagree about; progress ends with it. Empty while all is well.
  virtual const std::string& disagreement() const = 0;
  // Whether a ring with no free slot is in the way.
  virtual bool wants_space() = 0;
  // Ranks without which the call does not move, and whether one of them would do.
  virtual std::vector<int> missing(const ShmCall& call) = 0;
  virtual bool one_will_do(const ShmCall&) const { return false; }
  // Whether a rank makes no more calls.
  virtual bool has_left(int rank) const = 0;
};

}  // namespace tessera::comm
