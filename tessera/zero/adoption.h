// Adoption: what a user did to a compute parameter between our calls becomes the master's.
#pragma once

#include "tessera/zero/units.h"

namespace tessera::zero {

// `param` is still a view of its unit's flat space.
bool is_bound(const Param& param, const Unit& unit);

// Masters from compute parameters that were edited since our last write. Edits are known by the tensor's version or its
// storage; `compare` also finds those that leave both alone (p.data.copy_()), for a read of all values. Data that was
// replaced moves back into the flat space. Local. State error for a parameter that became one of another shape or dtype.
void adopt_param(const Place& place, bool compare);
void adopt_params(const Units& units, bool compare);

}  // namespace tessera::zero
