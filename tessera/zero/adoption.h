// Adoption: what a user did to a compute parameter between our calls becomes the master's.
//
// Note [Writes that torch does not count]
//   p.data.clamp_() moves no version counter. Where the compute weight is the master, or half of it, such a write holds by
//   itself. Beside an fp32 master it shows in that the weight is not the master's rounding, which an update leaves behind
//   everywhere: so the update's own pass takes such weights for masters as it reads them, which costs one stream of 16-bit
//   words, and neither memory nor a pass. Reading a master and saving compare, too. Writing to a master makes the same
//   difference: what is set (Param::ahead) and what is edited in a view (its version) is known, and its weights are left out
//   until they have followed. A write through .data of a master that a client's optimizer was given is not known, and lost.
#pragma once

#include "tessera/zero/units.h"

namespace tessera::zero {

// `param` is still a view of its unit's flat space.
bool is_bound(const Param& param, const Unit& unit);

// Masters from compute parameters that were edited since our last write. Edits are known by the tensor's version or its
// storage; `compare` also finds those that leave both alone, see the note. Data that was replaced moves back into the flat
// space. Local. State error for a parameter that became one of another shape or dtype.
void adopt_param(const Place& place, bool compare);
void adopt_params(const Units& units, bool compare);

}  // namespace tessera::zero
