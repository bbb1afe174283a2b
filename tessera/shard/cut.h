// Cut: which elements of a whole parameter a rank's parameter is, where the model itself is cut (tensor parallelism) or
// has parameters of their own on every rank (experts).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/shard/layout.h"

namespace tessera::shard {

// Example: columns [2, 4) of a whole of 3 x 4 elements are a parameter of 3 x 2, elements 2 3, 6 7 and 10 11 of the whole:
// stretches {0, 2}, {2, 6}, {4, 10}.
struct Cut {
  struct Stretch {
    int64_t begin;   // elements of the parameter from here on
    int64_t number;  // they are elements of the whole from here on
  };
  std::vector<int64_t> sizes;      // of the whole
  int64_t dim = 0;                 // along which it is cut
  std::vector<Range> ranges;       // slices of that dim, joined in this order
  std::vector<Stretch> stretches;  // ascending; the first begins at 0

  int64_t numel() const;  // of the whole
};
using CutPtr = std::shared_ptr<const Cut>;

// Slices `ranges` along `dim` of a contiguous whole of `sizes`, joined: several where sub-parameters lie one after the other
// (query, key and value in one). Value error for a dim or a slice that is not there.
CutPtr cut_along(const std::vector<int64_t>& sizes, int64_t dim, const std::vector<Range>& ranges);

// Calls f(piece, number) for the stretches of `range` of a parameter, in order: elements `piece` of the parameter are those of
// the whole from `number` on. Without a cut the parameter is the whole.
template <class F>
void for_stretches(const CutPtr& cut, Range range, F&& f) {
  if (cut == nullptr) {
    if (!range.empty()) f(range, range.begin);
    return;
  }
  for (size_t i = 0; i < cut->stretches.size(); ++i) {
    const Cut::Stretch& s = cut->stretches[i];
    const int64_t end = i + 1 < cut->stretches.size() ? cut->stretches[i + 1].begin : range.end;
    const Range piece = intersect(range, {s.begin, end});
    if (!piece.empty()) f(piece, s.number + piece.begin - s.begin);
  }
}

}  // namespace tessera::shard
