// Planner: which units the parameters of an engine form, and in which dtypes they travel.
#pragma once

#include <string>
#include <vector>

#include "tessera/shard/placement.h"
#include "tessera/zero/options.h"
#include "tessera/zero/param_spec.h"
#include "tessera/zero/plan.h"
#include "tessera/zero/rank_sets.h"

namespace tessera::zero {

// Kinds of parameters, see PlanItem.
inline constexpr int kPartitioned = 0, kResident = 1, kFrozen = 2;

class Planner {
 public:
  // All must outlive this.
  Planner(const Options& options, const shard::StagePlacements& placements, const RankSets& sets)
      : options_(options), placements_(placements), sets_(sets) {}

  // The units of `trained`, by number in `params`, and of those that are held without being trained; items are numbers there, too.
  std::vector<PlannedUnit> plan(const std::vector<ParamSpec>& params, const std::vector<ParamId>& trained) const;
  // The units of parameters that begin to be trained. `whole`: by parameter of `ids`, whether it is not partitioned.
  std::vector<PlannedUnit> plan_joining(const std::vector<ParamSpec>& params, const std::vector<ParamId>& ids,
                                        const std::vector<bool>& whole) const;
  // Whether a parameter is held: it is optimized, or partitioned without that.
  static bool holds(const Options& options, const ParamSpec& param);
  // The dtype that a gradient travels in.
  at::ScalarType travel_of(const ParamSpec& param) const;
  // The dtype to gather in, never wider than the parameter's: there is nothing to gain.
  at::ScalarType gather_dtype_of(const ParamSpec& param) const;

 private:
  bool partitions() const { return placements_.params == shard::Placement::Shard; }
  bool is_cut(const ParamSpec& param) const;
  std::string travels_of(int kind, const ParamSpec& param) const;
  std::vector<PlannedUnit> plan_of(const std::vector<PlanItem>& items, const std::vector<ParamId>& ids) const;

  const Options& options_;
  const shard::StagePlacements& placements_;
  const RankSets& sets_;
};

}  // namespace tessera::zero
