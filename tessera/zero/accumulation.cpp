#include "tessera/zero/accumulation.h"

#include <c10/core/GradMode.h>

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::zero {

Accumulation::State Accumulation::state() const {
  driver_.adopt_grads();
  State state{driver_.unreduced(), driver_.flushed(), driver_.scaled(), driver_.reducer().replicas_agree(), {}};
  for (const ParamId id : units_.trained_ids()) {
    const Param& p = *units_[id].param;
    const Unit& unit = *units_[id].unit;
    state.counts.push_back(
        {id, p.grad.has(), p.grad.filled(), unit.has_sum(), p.grad.additions(), unit.progress().sums()});
  }
  return state;
}

std::vector<HeldGradient> Accumulation::held() const {
  std::vector<HeldGradient> all;
  for (const ParamId id : units_.trained_ids()) {
    const Place& place = units_[id];
    const Unit& unit = *place.unit;
    const Param& p = *place.param;
    const bool in_place = unit.accumulates() && unit.ranks().size() == 1;  // contributions are added to the sum itself
    if (unit.has_sum() && !in_place) {
      const shard::Range owned = unit.owned_slice(p);
      const auto [buffer, there] = unit.gradient(p, owned);
      if (!owned.empty() && buffer.has_memory())
        all.push_back({id, true, range_of(id, true), buffer.fetch(there).wait()});
    }
    if (unit.accumulates() && p.grad.filled() && !p.range.empty())
      all.push_back({id, false, {0, p.range.size()}, unit.contribution(p)});
  }
  return all;
}

bool Accumulation::reduces() const {
  return units_.placements().reduce_at == shard::ReduceAt::EveryBackward && !units_.options().reduce_at_step;
}

shard::Range Accumulation::range_of(ParamId param, bool reduced) const {
  return reduced ? units_.local_range(units_[param]) : shard::Range{0, units_[param].param->range.size()};
}

void Accumulation::begin(const State& state) {
  driver_.drop_gradients();
  for (const GradientCounts& counts : state.counts) {
    Unit& unit = *units_[counts.param].unit;
    if (!counts.has_sum || unit.has_sum()) continue;
    unit.put_sums();
  }
}

void Accumulation::put(const HeldGradient& gradient) {
  const c10::AutoGradMode no_grad(false);
  const Place& place = units_[gradient.param];
  Unit& unit = *place.unit;
  const Param& p = *place.param;
  TESSERA_ASSERT(gradient.range == range_of(gradient.param, gradient.reduced));
  if (!gradient.reduced) return driver_.reducer().put(unit, p, gradient.values);
  const shard::Range owned = unit.owned_slice(p);
  TESSERA_ASSERT(unit.has_sum());
  unit.make_run(p);
  const auto [buffer, there] = unit.gradient(p, owned);
  buffer.write(there, gradient.values);
}

void Accumulation::end(const State& state) {
  for (const GradientCounts& counts : state.counts) {
    Unit& unit = *units_[counts.param].unit;
    const Param& p = *units_[counts.param].param;
    unit.restore_grad(p, counts.has_grad, counts.filled, counts.additions);
    if (p.grad.has()) unit.make_run(p);
    unit.restore_sums(counts.sums);
  }
  driver_.resume(state.unreduced, state.flushed, state.scaled, state.replicas_agree);
}

}  // namespace tessera::zero
