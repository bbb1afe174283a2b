// Activations between blocks that are cut along the sequence (tessera.sequence_parallel_norms): Note [Sequence regions] in
// parallel/sequence_regions.h, for modules whose forward is seen (Hooked, or a unit()).
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "tessera/comm/group.h"

namespace tessera::nn {

// What the cut modules of one model share. Used by one thread at a time.
class SequenceCut {
 public:
  explicit SequenceCut(comm::GroupPtr group) : group_(std::move(group)) {}

  // Whether sequences are cut in the forward that runs: without gradients one that cannot be stays whole.
  bool is_on() const;
  // This rank's part of what comes into the first block, at `path`. Value error for a shape that cannot be cut.
  at::Tensor split(const at::Tensor& x, const std::string& path);
  // The whole of what the last norm, at `path`, returns, on every rank.
  at::Tensor join(const at::Tensor& x, const std::string& path) const;

 private:
  comm::GroupPtr group_;
  bool keeps_whole_ = false;  // the last forward without gradients could not cut its sequence
};

}  // namespace tessera::nn
