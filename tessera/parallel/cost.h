// What a rank sends in one training step of a stack of transformer blocks: bytes and messages along each axis of the mesh, from the
// sizes alone. Bytes are those of comm::OpStats: the least that a rank must send. Left out is what depends on values: agreeing on
// norm, skips and overflow takes some bytes a step.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "tessera/comm/mesh.h"

namespace tessera::parallel {

// Blocks of attention and MLP between norms, an embedding before and a head after them (vocabulary 0: neither).
struct BlockStack {
  int64_t layers = 0, hidden = 0, heads = 0, kv_heads = 0, head_dim = 0, inner = 0, vocabulary = 0;
  bool gated = true;  // gate and up in the MLP, else up alone
  bool bias = false;
};

struct Training {
  std::map<comm::Axis, int> ranks = {};  // along each axis; 1 where there is none
  int stage = 0;
  int64_t batch = 1,
          length = 1;  // sequences of a micro-batch of one data-parallel rank; of how many tokens, over all of sp
  int64_t micro_batches = 1;  // of a step
  int64_t activation_bytes = 2, parameter_bytes = 2, gradient_bytes = 2;
  bool sequence_regions = false;  // activations between blocks are cut along tp
  bool whole_ends = false;        // then: whole on every rank before the first block and after the last norm (AutoTP)
  bool keep_gathered = false;     // Region::keep_gathered
  bool shared_inputs = true;      // layers of one input enter together (Entrance)
  bool vocab_parallel = false;    // embedding and head are cut over the vocabulary, cross entropy without gathering
  bool recompute = false;         // activation checkpointing of every block
};

struct Traffic {
  int64_t calls = 0, bytes = 0;
  bool operator==(const Traffic&) const = default;
};

struct Cost {
  // By axes "tp", "sp", "dp_shard x sp", "dp_replicate" and operation "all_reduce", "all_gather", "reduce_scatter", "all_to_all".
  std::map<std::string, std::map<std::string, Traffic>> axes;
  int64_t parameters = 0;  // of a rank of tp, before ZeRO cuts them

  Traffic of(const std::string& axis, const std::string& operation) const;
  int64_t bytes(const std::string& axis) const;  // of all operations
  std::string text() const;                      // a table
};

// Value errors for sizes that are not positive, heads and lengths that do not divide.
Cost cost(const BlockStack& model, const Training& training);

}  // namespace tessera::parallel
