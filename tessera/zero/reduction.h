// Reduction: a sum of a unit's gradients on its way, and what all of them share: how sums are averaged, how long a rank waits for
// the others, and the buckets.
#pragma once

#include <algorithm>
#include <chrono>

#include "tessera/zero/bucket_pool.h"
#include "tessera/zero/unit.h"

namespace tessera::zero {

inline bool one_rank(const Unit& unit) {
  return unit.ranks().size() == 1;
}

struct Reduction {
  Unit* unit = nullptr;
  comm::Pending pending{};
  at::Tensor sent{};    // where the unit travels in another dtype: its contributions
  at::Tensor sum{};     // of the owned range
  at::Tensor bucket{};  // the contributions
  bool pooled = false;  // the contributions lie in a bucket of the pool
  shard::Buffer own{};  // memory that outlives the reduction, made for the first sum of a step
  // By parameter, with a sink: whether any rank has a gradient. It need not be asked where this rank has all gradients.
  at::Tensor present{};
  comm::Pending presence{};
  bool has_all = false;
  at::Tensor before{};  // of gradients in host memory: the sum so far, on its way back
  std::shared_ptr<c10::Event> came{};
};

// Note [Averaging] in reducer.h.
class Averaging {
 public:
  explicit Averaging(double factor) : factor_(factor) {}

  // How a unit's sum gets its factor: by the reduction `op`, and by the rest that it leaves.
  struct Mean {
    comm::ReduceOp op;
    double rest;
  };
  Mean mean_of(const Unit& unit) const {
    const int n = unit.ranks().size();
    if (factor_ == 1.0 / n) return {comm::ReduceOp::Avg, 1.0};
    if (factor_ == 1.0) return {comm::ReduceOp::Sum, 1.0};
    return {comm::ReduceOp::Avg, factor_ * n};
  }
  // The sum over ranks is the mean of what they added, times this factor.
  double contributions(const Unit& unit) const { return one_rank(unit) ? 1.0 : factor_ * unit.ranks().size(); }

 private:
  double factor_;
};

// How long a launch waits for a collective: Note [Waits] in reducer.h.
class Patience {
 public:
  bool comes_soon(comm::Pending& pending) {
    const bool came = pending.wait_for(now_);
    now_ = came ? std::min(now_ + kLeast, kMost) : std::max(now_ / 2, kLeast);
    return came;
  }

 private:
  static constexpr std::chrono::milliseconds kLeast{1}, kMost{100};
  std::chrono::milliseconds now_ = kMost;
};

// Memory on the device that gradients pass through.
struct GradBuckets {
  BucketPool contributions{2};
  BucketPool travel{2};    // of a dtype in which they travel
  BucketPool returned{2};  // of sums that come back from host memory
  GradCopies copies;

  // Casts `values` to the dtype in which the unit travels; undefined where the unit travels as it is.
  at::Tensor cast_to_travel(const Unit& unit, const at::Tensor& values);
  void free();
  // Bytes in use and kept.
  int64_t bytes() const { return contributions.bytes() + travel.bytes() + returned.bytes(); }
  int64_t peak_bytes() const {  // of each pool by itself
    return contributions.peak_bytes() + travel.peak_bytes() + returned.peak_bytes();
  }
};

}  // namespace tessera::zero
