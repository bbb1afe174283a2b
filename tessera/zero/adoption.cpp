#include "tessera/zero/adoption.h"

#include <c10/core/GradMode.h>

#include "tessera/base/error.h"
#include "tessera/shard/device.h"
#include "tessera/shard/storage.h"

namespace tessera::zero {

bool is_bound(const Param& param, const Unit& unit) {
  return shard::is_bound(param.tensor, unit.flat().whole(), param.range, param.form);
}

void adopt_param(const Place& place, bool compare) {
  const c10::AutoGradMode no_grad(false);
  const Param& p = *place.param;
  Unit& unit = *place.unit;
  // Sharded parameters are written to in regions only, which take the values along; sent ones have no data.
  if (unit.flat().sharded() || unit.flat().has_private_copy(place.item) || unit.flat().is_sent()) return;
  if (is_bound(p, unit)) {
    const bool written = p.writes.any(p.tensor);
    bool followed = false;
    if (written && unit.residual().defined()) {
      unit.adopt_beside_residual(p);
    } else if (written && unit.master().defined() &&
               !unit.adopts(p)) {  // the master was set before: the later write holds
      unit.set_master_from(p, p.tensor.detach());
      followed = true;
    } else if (compare) {
      unit.adopt_written(p);
    }
    unit.know_writes(p, followed);  // last: who has no memory for the above tries again
    return;
  }
  TESSERA_CHECK(p.tensor.sizes() == p.form.sizes && p.tensor.scalar_type() == unit.flat().dtype(), "engine",
                "parameter '", p.name, "' became a tensor of shape ", p.tensor.sizes(), " and dtype ",
                p.tensor.scalar_type(), "; build a new engine for a changed model");
  TESSERA_CHECK(!unit.flat().shares(), "zero", "the data of parameter '", p.name,
                "' was replaced (by setting its data, or by to() of a module), but all ranks share it "
                "(tessera.shared_parameters); "
                "write to it inside GatheredParameters with modifier_rank 0 instead");
  shard::check_device(p.tensor.device());
  if (!unit.master_is_weight()) unit.adopt_replaced(p, unit.owned_values(place.item));
  unit.flat().take_replaced(place.item);
  unit.know_writes(p);
}

void adopt_params(const Units& units, bool compare) {
  for (const ParamId id : units.trained_ids())
    adopt_param(units[id], compare);
}

}  // namespace tessera::zero
