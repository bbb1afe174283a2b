#include "tessera/shard/cut.h"

#include "tessera/base/error.h"

namespace tessera::shard {

int64_t Cut::numel() const {
  int64_t numel = 1;
  for (const int64_t size : sizes)
    numel *= size;
  return numel;
}

CutPtr cut_along(const std::vector<int64_t>& sizes, int64_t dim, const std::vector<Range>& ranges) {
  const auto dims = static_cast<int64_t>(sizes.size());
  TESSERA_CHECK_VALUE(dim >= 0 && dim < dims, "shard", "a parameter of ", dims, " dims has no dim ", dim, " to cut");
  for (const Range& r : ranges)
    TESSERA_CHECK_VALUE(0 <= r.begin && r.begin <= r.end && r.end <= sizes[dim], "shard", "there is no slice [",
                        r.begin, ", ", r.end, ") along dim ", dim, " of size ", sizes[dim]);
  int64_t outer = 1, inner = 1;
  for (int64_t d = 0; d < dims; ++d)
    (d < dim ? outer : inner) *= d == dim ? 1 : sizes[d];
  Cut cut{sizes, dim, ranges, {}};
  int64_t local = 0;
  for (int64_t o = 0; o < outer; ++o) {
    for (const Range& r : ranges) {
      if (r.size() * inner == 0 && !cut.stretches.empty()) continue;
      cut.stretches.push_back({local, (o * sizes[dim] + r.begin) * inner});
      local += r.size() * inner;
    }
  }
  return std::make_shared<const Cut>(std::move(cut));
}

}  // namespace tessera::shard
