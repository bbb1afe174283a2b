// Segments: the elements of a unit that one call of the update's kernel covers.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/zero/unit.h"

namespace tessera::zero {

// Consecutive elements of an owned range with the hyper-parameters of one update.
struct Segment {
  shard::Range range;  // in the coordinates of the owned range
  int group = 0;
  int64_t step = 0;
  bool adopts = false;           // see Unit::adopts()
  const Param* param = nullptr;  // the first one
  // Numbers of the elements in the model, where they matter: see optim::UpdateSlice.
  uint64_t first = 0;
  int64_t run = 0, stride = 0;

  bool continues(const Segment& s) const {
    return group == s.group && step == s.step && adopts == s.adopts && param->run == s.param->run;
  }
  // Appends elements that follow at once, if their numbers go on as those of this segment.
  bool append(shard::Range next, uint64_t number);
  // The segment's elements [begin, end) of the owned range, which lie in one run or begin with one.
  Segment part(int64_t begin, int64_t end) const;
};

// Segments of the parameters that are `present`, by number. Gaps between parameters hold zeros, and are updated with them where
// nothing is `numbered`. Else a parameter that is cut out of a whole one is a segment too where its numbers are regular: a slice
// along one dimension.
std::vector<Segment> segments_of(const Unit& unit, const std::vector<bool>& present, bool numbered);
// `segments` cut at multiples of kTile.
std::vector<Segment> in_tiles(const std::vector<Segment>& segments);

}  // namespace tessera::zero
