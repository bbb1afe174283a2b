// Boxes: what the ranks of one side of a link hold of a tensor, and which part goes from which rank to which: pure arithmetic, of
// the links of both front ends.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/mesh.h"

namespace tessera::pipeline {

using Sizes = std::vector<int64_t>;
// A range (begin, end) of each dim of the whole tensor, which a single rank would have.
using Box = std::vector<std::pair<int64_t, int64_t>>;

// The ranks of one side: `batch` of them have other samples, `sequence` share the sequence of a sample, `replicas` have the
// same activations (tensor parallel). Ranks are numbered as on a mesh.
struct Layout {
  int batch = 1, sequence = 1, replicas = 1;

  static Layout of(const comm::MeshShape& shape);
  int ranks() const { return parts() * replicas; }
  // Ranks that an engine averages gradients over: all but the replicas.
  int parts() const { return batch * sequence; }
  int part(int rank) const { return rank / replicas; }
  // The rank that gives `part` to rank `taker` of the other side; replicas take turns.
  int holder(int part, int taker) const { return part * replicas + taker % replicas; }
};

// The dim of every tensor along which the ranks' batches lie, and the one along which a sequence is cut. They may be one dim, for
// packed tokens: then each batch has its own stretch of the dim. Tensors without dims are never cut.
struct Dims {
  int batch = 0;
  std::optional<int> sequence;
};

// Value error, beginning with `where`, where the ranks of a side share a sequence and no dim of it is known.
void check(const Dims& dims, const Layout& layout, const std::string& where);

struct WholeTensor {
  Sizes sizes;
  std::vector<Box> held;  // by part
};
// `shapes`: those of the parts of `layout`. Sizes need not be equal; value error, beginning with `where`, if they do not fit
// together.
WholeTensor whole_of(const Layout& layout, const Dims& dims, const std::vector<Sizes>& shapes,
                     const std::string& where);

// What each part of `layout` gets of a tensor: nearly equal numbers of samples, and of each nearly equal parts of the sequence,
// the larger ones first. `samples`: how many rows of the batch dim each sample has; none: one.
std::vector<Box> wanted_of(const Layout& layout, const Dims& dims, const Sizes& whole,
                           const std::optional<Sizes>& samples, const std::string& where);

// What `part` of the giving side sends of what a rank wants. Parts never overlap, so a gradient that goes the same way back is
// never counted twice. A tensor without dims comes from part 0.
std::optional<Box> route(const std::vector<Box>& held, int part, const Box& wanted);

}  // namespace tessera::pipeline
