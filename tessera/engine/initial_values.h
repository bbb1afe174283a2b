// Initial values: parameters without optimizer states (frozen ones, those of no group) get rank 0's values when an engine is built,
// as trained parameters do.
#pragma once

#include <vector>

#include "tessera/engine/engine.h"
#include "tessera/zero/ranks.h"

namespace tessera::engine {

// Parameters that the units do not hold: on all ranks along which they do not differ the values of the first, in the compute
// dtype where floating ones are cast. Collective.
void broadcast_unmanaged(const comm::Mesh& mesh, const zero::Options& options, const std::vector<ParamSpec>& params);

// An engine could not be built: parameters that have data have the dtypes again that they came with, as far as there is memory;
// of those that were converted, the values that rounding left. Local.
void cast_back(const std::vector<ParamSpec>& params, const std::vector<at::ScalarType>& dtypes) noexcept;

}  // namespace tessera::engine
