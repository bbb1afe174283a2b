#include "tessera/zero/segments.h"

#include <algorithm>

namespace tessera::zero {

bool Segment::append(shard::Range next, uint64_t number) {
  const int64_t size = range.size();
  if (next.begin != range.end) return false;
  if (run == 0 && number != first + static_cast<uint64_t>(size)) {  // a second run
    if (next.size() > size || number < first) return false;
    run = size;
    stride = static_cast<int64_t>(number - first);
  } else if (run > 0) {
    const bool fits = size % run == 0 && next.size() <= run;
    if (!fits || number != first + static_cast<uint64_t>(size / run * stride)) return false;
  }
  range.end = next.end;
  return true;
}

Segment Segment::part(int64_t begin, int64_t end) const {
  const int64_t skipped = begin - range.begin, of_run = run == 0 ? range.size() : run;
  Segment s = *this;
  s.range = {begin, end};
  s.first += static_cast<uint64_t>(skipped / of_run * stride + skipped % of_run);
  if (end - begin <= of_run) s.run = s.stride = 0;
  return s;
}

std::vector<Segment> segments_of(const Unit& unit, const std::vector<bool>& present, bool numbered) {
  std::vector<Segment> segments;
  bool open = false;
  const auto add = [&](const Segment& s) {
    Segment* last = open ? &segments.back() : nullptr;
    if (last != nullptr && last->continues(s) && !numbered) {
      last->range.end = s.range.end;
    } else if (last == nullptr || !last->continues(s) || !last->append(s.range, s.first)) {
      segments.push_back(s);
    }
    open = true;
  };
  for (const Param& p : unit.params()) {
    const shard::Range mine = unit.owned_slice(p);
    if (mine.empty()) continue;
    if (!present[p.id]) {
      open = false;
      continue;
    }
    const Segment whole{mine, p.group, p.step + 1, unit.adopts(p), &p};
    if (!numbered) {
      add(whole);
      continue;
    }
    const int64_t skipped = unit.owned().begin + mine.begin - p.range.begin;
    shard::for_stretches(p.cut, {skipped, skipped + mine.size()}, [&](shard::Range r, int64_t number) {
      Segment s = whole;
      s.range = {mine.begin + r.begin - skipped, mine.begin + r.end - skipped};
      s.first = p.first + static_cast<uint64_t>(number);
      add(s);
    });
  }
  return segments;
}

std::vector<Segment> in_tiles(const std::vector<Segment>& segments) {
  std::vector<Segment> pieces;
  for (const Segment& s : segments) {
    for (int64_t begin = s.range.begin; begin < s.range.end; begin = pieces.back().range.end) {
      int64_t end = std::min((begin / kTile + 1) * kTile, s.range.end);
      const int64_t within = s.run == 0 ? 0 : (begin - s.range.begin) % s.run;
      if (within > 0) end = std::min(end, begin + s.run - within);  // the rest of a run
      pieces.push_back(s.part(begin, end));
    }
  }
  return pieces;
}

}  // namespace tessera::zero
