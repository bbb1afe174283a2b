// Accumulation: the gradients that an optimizer step has gathered so far, between two backwards, as one rank holds them.
// A checkpoint saves it: given back as it was, it lets the run go on with the same bits.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/zero/backward_driver.h"

namespace tessera::zero {

struct HeldGradient {
  ParamId param = -1;
  // True: `values` are this rank's part of the sum over the shard group. False: all elements, as this rank alone has added them.
  bool reduced = false;
  shard::Range range;  // of the parameter's elements, in the order of its memory
  at::Tensor values;   // the range's elements, 1-D: a view, in host memory where the gradients live there
};

// Counts and flags that go with the gradients of one parameter on one rank.
struct GradientCounts {
  ParamId param = -1;
  bool has_grad = false, filled = false;
  bool has_sum = false;  // its unit holds a sum over ranks
  uint64_t additions = 0, sums = 0;
};

class Accumulation {
 public:
  struct State {
    bool unreduced = false, flushed = false, scaled = false;
    bool replicas_agree = false;  // sums are over all replicas, else within this rank's one
    std::vector<GradientCounts> counts;
  };

  Accumulation(Units& units, BackwardDriver& driver) : units_(units), driver_(driver) {}

  bool begun() const { return driver_.has_gradients(); }
  State state() const;
  std::vector<HeldGradient> held() const;
  // reduces(): every backward reduces. range_of(): a parameter's elements in held(), of a sum (`reduced`) or a contribution.
  bool reduces() const;
  shard::Range range_of(ParamId param, bool reduced) const;
  // A gradient over all ranks is the mean of what the ranks have added, times this factor.
  double contributions(ParamId param) const { return driver_.reducer().contributions(*units_[param].unit); }

  // Local, called in this order. begin() drops the gradients that are there; put() gets reduced gradients first.
  void begin(const State& state);
  void put(const HeldGradient& gradient);
  void end(const State& state);

 private:
  Units& units_;
  BackwardDriver& driver_;
};

}  // namespace tessera::zero
