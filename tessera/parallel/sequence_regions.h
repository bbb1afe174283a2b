// Where a model that is cut over tensor-parallel ranks has activations that are cut along the sequence (Megatron-LM, arXiv 2205.05198,
// section 4.2.2). Pure, as plan.h.
//
// Note [Sequence regions]
//   Before the first block each rank takes its part of the sequence, after the last norm the parts are joined; between them norms,
//   dropouts and residuals work on parts. A module with column-parallel layers (attention, MLP) is given the whole sequence where it is
//   entered, because its code looks at sizes; its layers know that tensor again, so that what they keep for the backward is the part
//   (Entrance::open). Its row-parallel layer ends in a reduce-scatter. So the code of the model sees whole sequences wherever it
//   computes masks, positions and heads, and parts where a token is by itself. Parameters that work on parts get the sum of the
//   ranks' gradients; a bias that row_linear() adds has the whole one already, as its backward gathers. Without gradients a
//   sequence that cannot be cut (a token that is generated) stays whole.
//
// Note [Mixed regions]
//   Experts with their router, and attention with low-rank projections, have layers that are whole beside those that are cut. Such a
//   module is given the whole sequence as well, and nothing inside of it talks: what its layers compute are terms of sums over the
//   ranks, because all that follows up to the sum is linear in them. The sum is the reduce-scatter where the module ends: of its
//   row-parallel layer, or of what comes out. Gradients inside are terms of sums, too: of what comes in, that is the reduce-scatter
//   of its gather; of layers that are whole it is that of their parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <set>
#include <string>
#include <vector>

#include "tessera/parallel/plan.h"

namespace tessera::parallel {

// The warning where a model has none.
constexpr const char* kNoRegions =
    "[config] tessera.sequence_parallel_norms has no effect: the model is not cut (tensor_parallel.autotp_size)";

constexpr int64_t kSequenceDim = 1;  // of activations between blocks, [batch, sequence, hidden]

// Paths in the model.
struct SequenceRegions {
  std::string first, last;         // the first block; the norm after the last one
  std::vector<std::string> inner;  // modules of the blocks that need the whole sequence
  std::vector<std::string> norms;  // modules whose parameters work on parts
  std::vector<std::string> mixed;  // modules of the blocks that enter a region themselves: Note [Mixed regions]
  std::vector<std::string> sums;   // those of them that leave it themselves; the others end in a row layer
  std::vector<std::string> whole;  // in them: modules whose parameters are whole

  // Modules whose parameters' gradients are summed over the ranks.
  std::vector<std::string> summed() const;
  std::string text() const;  // one line
};

struct RegionFacts {
  std::string model_type = {};
  // Only types of Transformers' models are taken whose code is known to treat each token by itself between attention and MLP, and
  // of those that have them mixed modules; else the program answers for its code, and there are none.
  bool known_types = true;
  bool router_loss = false;           // a loss of the routers' own outputs is on
  std::set<std::string> jitter = {};  // paths of modules that multiply what comes in by noise
};

// Value error with the reason for models that do not take it.
SequenceRegions find_sequence_regions(const std::vector<Module>& modules, const std::vector<Decision>& decisions,
                                      const RegionFacts& facts);

// Whether activations that come into the first block, at `path`, stay whole in this forward. Value error where they must be cut into
// the parts of `ranks`, and cannot.
bool stays_whole(const at::Tensor& x, int ranks, const std::string& path);

}  // namespace tessera::parallel
