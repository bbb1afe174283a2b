// Initial values: parameters without optimizer states (frozen ones, those of no group) get rank 0's values when an engine is built,
// as trained parameters do.
#pragma once

#include <vector>

#include "tessera/engine/engine.h"
#include "tessera/zero/ranks.h"

namespace tessera::engine {

// Broadcasts parameters that the units do not hold: the first rank's values along axes on which they do not differ, in the
// compute dtype where floating ones are cast. Collective.
void broadcast_unmanaged(const comm::Mesh& mesh, const zero::Options& options, const std::vector<ParamSpec>& params);

// After an engine could not be built: gives parameters that have data the dtypes that they came with, as far as there is memory;
// converted ones keep the values that rounding left. Local.
void cast_back(const std::vector<ParamSpec>& params, const std::vector<at::ScalarType>& dtypes) noexcept;

}  // namespace tessera::engine
