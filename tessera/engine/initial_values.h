// Initial values: what has no optimizer states starts with rank 0's values, as trained parameters do.
#pragma once

#include <optional>
#include <vector>

#include "tessera/engine/engine.h"
#include "tessera/zero/data_parallel.h"

namespace tessera::engine {

// Parameters that the model does not hold (`place_of` < 0): rank 0's values on all ranks, in `dtype` where they are
// floating and it is given. Collective.
void share_unmanaged(const zero::DataParallel& ranks, const std::vector<ParamSpec>& params,
                     const std::vector<int>& place_of, std::optional<at::ScalarType> dtype);

// Rank 0's values of a module's buffers (strided, of any dtype), in place. `device`: where ranks talk. Collective; all
// ranks have buffers of the same sizes and dtypes.
void share_buffers(const zero::DataParallel& ranks, const std::vector<at::Tensor>& buffers, c10::Device device);

}  // namespace tessera::engine
