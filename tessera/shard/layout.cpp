#include "tessera/shard/layout.h"

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::shard {

namespace {
int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
}  // namespace

Range intersect(Range a, Range b) {
  Range r{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return r.empty() ? Range{} : r;
}

Layout::Layout(std::span<const int64_t> numels, int shards) : shards_(shards) {
  TESSERA_CHECK_VALUE(shards >= 1, "shard.layout", "a layout needs at least 1 shard, got ", shards);
  int64_t end = 0;
  params_.reserve(numels.size());
  for (const int64_t numel : numels) {
    TESSERA_CHECK_VALUE(numel >= 0, "shard.layout", "negative parameter size ", numel);
    const int64_t begin = round_up(end, kAlignment);
    params_.push_back({begin, begin + numel});
    end = begin + numel;
  }
  size_ = round_up(end, kAlignment * shards);
}

std::vector<Range> Layout::padding() const {
  std::vector<Range> gaps;
  int64_t end = 0;
  for (const Range& p : params_) {
    if (p.begin > end) gaps.push_back({end, p.begin});
    end = p.end;
  }
  if (size_ > end) gaps.push_back({end, size_});
  return gaps;
}

}  // namespace tessera::shard
