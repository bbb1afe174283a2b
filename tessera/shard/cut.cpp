#include "tessera/shard/cut.h"

#include "tessera/base/error.h"

namespace tessera::shard {

CutPtr cut_along(const std::vector<int64_t>& sizes, int64_t dim, int64_t begin, int64_t end) {
  const auto dims = static_cast<int64_t>(sizes.size());
  TESSERA_CHECK_VALUE(dim >= 0 && dim < dims, "shard", "a parameter of ", dims, " dims has no dim ", dim, " to cut");
  TESSERA_CHECK_VALUE(0 <= begin && begin <= end && end <= sizes[dim], "shard", "there is no slice [", begin, ", ", end,
                      ") along dim ", dim, " of size ", sizes[dim]);
  int64_t outer = 1, inner = 1;
  for (int64_t d = 0; d < dims; ++d)
    (d < dim ? outer : inner) *= d == dim ? 1 : sizes[d];
  Cut cut;
  cut.numel = outer * sizes[dim] * inner;
  const int64_t length = (end - begin) * inner;
  for (int64_t o = 0; o < (length == 0 ? 1 : outer); ++o)
    cut.stretches.push_back({o * length, (o * sizes[dim] + begin) * inner});
  return std::make_shared<const Cut>(std::move(cut));
}

}  // namespace tessera::shard
