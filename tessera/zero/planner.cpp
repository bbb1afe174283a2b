#include "tessera/zero/planner.h"

#include "tessera/base/error.h"

namespace tessera::zero {

bool Planner::holds(const Options& options, const ParamSpec& param) {
  if (param.group >= 0) return true;
  const at::ScalarType dtype = param.tensor.scalar_type();
  const bool fits = options.cast ? at::isFloatingType(dtype) : dtype == options.precision.param;
  return fits && shard::placements_of_stage(options.stage).params == shard::Placement::Shard &&
         param.tensor.numel() > options.gather.persistence_threshold;
}

bool Planner::is_cut(const ParamSpec& param) const {
  return partitions() && (sets_.of(param).ranks.shard->size() > 1 || options_.weight_home);
}

at::ScalarType Planner::travel_of(const ParamSpec& param) const {
  if (sets_.of(param).ranks.size() == 1) return options_.precision.grad;
  return param.comm.value_or(options_.communication.value_or(options_.precision.grad));
}

at::ScalarType Planner::gather_dtype_of(const ParamSpec& param) const {
  const at::ScalarType own = options_.precision.param;
  if (sets_.of(param).ranks.size() == 1 || !param.comm) return own;
  return c10::elementSize(*param.comm) < c10::elementSize(own) ? *param.comm : own;
}

// PlanItem::travels of a parameter.
std::string Planner::travels_of(int kind, const ParamSpec& param) const {
  const at::ScalarType asked = param.comm.value_or(options_.communication.value_or(at::kFloat));
  TESSERA_CHECK_VALUE(asked == at::kFloat || asked == at::kHalf || asked == at::kBFloat16, "zero", "parameter '",
                      param.name, "' cannot travel in ", asked, "; choose Float, Half or BFloat16");
  std::string text;
  const at::ScalarType gathered = gather_dtype_of(param), travel = travel_of(param);
  if (partitions() && kind != kResident && gathered != options_.precision.param) {
    text += std::string(" (gathered in ") + c10::toString(gathered) + ")";
  }
  if (kind != kFrozen && travel != options_.precision.grad) {
    text += std::string(" (reduced in ") + c10::toString(travel) + ")";
  }
  if (const comm::Axes axes = sets_.differs(param); !axes.empty()) text += " (differs along " + axes.name() + ")";
  return text;
}

std::vector<PlannedUnit> Planner::plan(const std::vector<ParamSpec>& params,
                                       const std::vector<ParamId>& trained) const {
  int64_t resident = 0;
  std::vector<PlanItem> items;
  std::vector<ParamId> ids = trained;
  for (const ParamId id : trained) {
    const ParamSpec& p = params[id];
    const int64_t n = p.tensor.numel();
    const bool stays =
        is_cut(p) && n <= options_.gather.persistence_threshold && n <= options_.gather.model_persistence - resident;
    if (stays) resident += n;
    const int kind = stays ? kResident : kPartitioned;
    items.push_back({p.unit, n, p.group, kind, travels_of(kind, p)});
  }
  for (size_t i = 0; i < params.size(); ++i) {
    const ParamSpec& p = params[i];
    if (p.group >= 0 || !holds(options_, p)) continue;
    items.push_back({p.unit, p.tensor.numel(), 0, kFrozen, travels_of(kFrozen, p)});
    ids.push_back(static_cast<ParamId>(i));
  }
  return plan_of(items, ids);
}

// `ids`: of the items.
std::vector<PlannedUnit> Planner::plan_of(const std::vector<PlanItem>& items, const std::vector<ParamId>& ids) const {
  std::vector<PlannedUnit> units = plan_units(items, options_.min_unit_elements, options_.reduce_bucket_size);
  for (PlannedUnit& unit : units)
    for (int& item : unit.items)
      item = ids[item];
  return units;
}

std::vector<PlannedUnit> Planner::plan_joining(const std::vector<ParamSpec>& params, const std::vector<ParamId>& ids,
                                               const std::vector<bool>& whole) const {
  std::vector<PlanItem> items;
  for (size_t i = 0; i < ids.size(); ++i) {
    const ParamSpec& p = params[ids[i]];
    const int kind = partitions() && whole[i] ? kResident : kPartitioned;
    items.push_back({p.unit, p.tensor.numel(), p.group, kind, travels_of(kind, p)});
  }
  return plan_of(items, ids);
}

}  // namespace tessera::zero
