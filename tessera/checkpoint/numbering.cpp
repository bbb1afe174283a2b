#include "tessera/checkpoint/numbering.h"

#include <algorithm>
#include <numeric>

namespace tessera::checkpoint {

int64_t numel_of(const std::vector<int64_t>& shape, const Slice* slice) {
  int64_t numel = 1;
  for (int64_t d = 0; d < static_cast<int64_t>(shape.size()); ++d) {
    if (slice == nullptr || d != slice->dim) {
      numel *= shape[d];
      continue;
    }
    int64_t size = 0;
    for (const shard::Range& range : slice->ranges)
      size += range.size();
    numel *= size;
  }
  return numel;
}

std::vector<Run> runs_of(const std::vector<int64_t>& shape, const Slice* slice, shard::Range range) {
  if (range.empty()) return {};
  if (slice == nullptr) return {{range.begin, range.begin, range.size()}};
  int64_t inner = 1;
  for (size_t d = static_cast<size_t>(slice->dim) + 1; d < shape.size(); ++d)
    inner *= shape[d];
  int64_t rows = 0;  // of the slice, in one element of the dims before
  for (const shard::Range& part : slice->ranges)
    rows += part.size();
  const int64_t length = rows * inner;
  std::vector<Run> runs;
  for (int64_t outer = range.begin / length; outer * length < range.end; ++outer) {
    int64_t local = outer * length;
    for (const shard::Range& part : slice->ranges) {
      const shard::Range mine = shard::intersect(range, {local, local + part.size() * inner});
      const int64_t first = (outer * shape[slice->dim] + part.begin) * inner;
      if (!mine.empty()) runs.push_back({first + mine.begin - local, mine.begin, mine.size()});
      local += part.size() * inner;
    }
  }
  return runs;
}

std::vector<int64_t> order_of(const shard::Form& form) {
  std::vector<int64_t> order(form.sizes.size());
  std::iota(order.begin(), order.end(), 0);
  // A dim of one element has any stride: it keeps its place at the front.
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    if (form.sizes[a] == 1 || form.sizes[b] == 1) return form.sizes[a] == 1 && form.sizes[b] != 1;
    return form.strides[a] > form.strides[b];
  });
  std::vector<int64_t> large;
  std::copy_if(order.begin(), order.end(), std::back_inserter(large), [&](int64_t d) { return form.sizes[d] != 1; });
  if (std::is_sorted(large.begin(), large.end())) return {};
  return order;
}

}  // namespace tessera::checkpoint
