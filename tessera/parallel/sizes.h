// Sizes of the parts of one dim: whose heads, columns or rows a rank of a tensor- or sequence-parallel group holds. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/shard/layout.h"

namespace tessera::parallel {

using Sizes = std::vector<int64_t>;
int64_t sum_of(const Sizes& sizes);
using Ranges = std::vector<shard::Range>;

// `heads` > 0: only whole heads (key/value heads, where several query heads share one) are dealt out, total / heads elements
// each. `grain`: otherwise all parts but the last are multiples of it.
struct SizeRule {
  int64_t heads = 0;
  int64_t grain = 1;
};

// The rule is by heads where these are known and divide `total`, unless `name` is of an MLP, an expert or a vocabulary head.
SizeRule rule_for(const std::string& name, int64_t total, int64_t kv_heads, int64_t grain = 1);

// Deals `total` elements to `parts` ranks: nearly even, earlier ranks first, what the grain leaves over to the last one. Ranks
// beyond the number of heads get nothing. Value error where `heads` does not divide `total`, or a number is not positive.
Sizes part_sizes(int64_t total, int parts, SizeRule rule = {});

// The range of each rank where parts of `sizes` lie one after the other.
Ranges ranges_of(const Sizes& sizes);

// Sub-parameters of a packed dim, as `shape` and `partition_dim` of a partition rule say. The entry at `dim` is a list of sizes
// or how many equal sub-parameters there are; one other entry may be -1 and is inferred, as is the entry at `dim` itself. The
// last entry is the weight's inputs, the others multiply to its outputs. Examples: (3, -1) of a weight of 96 x 32 is
// {32, 32, 32}, ((64, 16, 16), -1) is {64, 16, 16}; (2, -1, 32) cut at dim 1, two experts in one weight, is {48, 48}.
struct PackedShape {
  std::vector<Sizes> entries;  // one number each, or the sizes of a nested list
  int nested = -1;             // which entry is a nested list; -1: none
  int dim = 0;                 // partition_dim, in entries
};
struct SubParams {
  int64_t dim = 0;   // of the weight that is cut: 0 (outputs) or 1 (inputs)
  Sizes sizes;       // of the sub-parameters, along dim
  int64_t unit = 1;  // elements along dim that stay together: cuts lie at multiples
  Sizes view;        // the shape with every entry known
};
// Resolves a shape. Value errors name `where`.
SubParams resolve(const PackedShape& shape, const Sizes& weight_sizes, const std::string& where);
// Checks a shape without a weight: the same value errors, early.
void check_shape(const PackedShape& shape, const std::string& where);

// Every sub-parameter is cut by itself and a rank's pieces are joined in order: [q_r | k_r | v_r]. For each rank the ranges of
// the dim, neighbours joined; one empty range for a rank that gets nothing. `rules`: one for each sub-parameter, or one for all.
std::vector<Ranges> packed_ranges(const Sizes& sub_sizes, int parts, const std::vector<SizeRule>& rules);

}  // namespace tessera::parallel
