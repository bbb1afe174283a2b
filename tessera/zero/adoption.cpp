#include "tessera/zero/adoption.h"

#include <c10/core/GradMode.h>

#include "tessera/base/error.h"
#include "tessera/shard/device.h"
#include "tessera/shard/storage.h"

namespace tessera::zero {

bool is_bound(const Param& param, const Unit& unit) {
  return shard::is_bound(param.tensor, unit.flat->whole(), param.range, param.form);
}

void adopt_param(const Place& place, bool compare) {
  const c10::AutoGradMode no_grad(false);
  Param& p = *place.param;
  Unit& unit = *place.unit;
  // Written to in regions only, which take the values along; or away, without data.
  if (unit.flat->sharded() || unit.flat->has_private_copy(place.item) || unit.flat->is_sent()) return;
  const at::Tensor& weights = unit.flat->whole();
  const bool bound = is_bound(p, unit);
  if (bound && !p.writes.any(p.tensor)) {
    p.writes.forget(p.tensor);
    if (compare) unit.adopt_written(p);
    return;
  }
  TESSERA_CHECK(p.tensor.sizes() == p.form.sizes && p.tensor.scalar_type() == weights.scalar_type(), "engine",
                "parameter '", p.name, "' became a tensor of shape ", p.tensor.sizes(), " and dtype ",
                p.tensor.scalar_type(), "; build a new engine for a changed model");
  TESSERA_CHECK(
      bound || !unit.flat->shares(), "zero", "the data of parameter '", p.name,
      "' was replaced (p.data = ..., module.to(...)), but all ranks share it (tessera.shared_parameters); write "
      "to it inside GatheredParameters(..., modifier_rank=0) instead");
  bool changed = true;
  if (!bound) {
    shard::check_device(p.tensor.device());
    const at::Tensor mine = shard::view_as_param(weights, p.range, p.form);
    changed = !mine.equal(p.tensor.detach());  // a conversion there and back leaves the master its bits
    if (changed) mine.copy_(p.tensor.detach());
  }
  if (changed && !unit.master_is_weight()) unit.set_master_from(p, p.tensor.detach());
  if (!bound) shard::bind(p.tensor, weights, p.range, p.form);
  p.writes.forget(p.tensor);
  p.ahead = false;
}

void adopt_params(const Units& units, bool compare) {
  for (const ParamId id : units.trained_ids())
    adopt_param(units[id], compare);
}

}  // namespace tessera::zero
