#include "tessera/engine/initial_values.h"

#include <c10/core/GradMode.h>

#include "tessera/shard/storage.h"
#include "tessera/zero/memory_for.h"
#include "tessera/zero/planner.h"

namespace tessera::engine {

void broadcast_unmanaged(const comm::Mesh& mesh, const zero::Options& options, const std::vector<ParamSpec>& params) {
  const c10::AutoGradMode no_grad(false);
  const at::ScalarType dtype = options.precision.param;
  for (const ParamSpec& spec : params) {
    if (zero::Planner::holds(options, spec)) continue;
    if (spec.restore) spec.restore();
    at::Tensor tensor = spec.tensor;
    const at::Tensor value = tensor.detach();
    zero::Ranks ranks(mesh, spec.varies);
    ranks.device = value.device();
    const auto settle = [&] {
      broadcast_words(ranks, {value}, 0, "initial value of '" + spec.name + "'");
      if (options.cast && at::isFloatingType(value.scalar_type()) && value.scalar_type() != dtype)
        shard::set_data(tensor, value.to(dtype));
    };
    zero::memory_for(settle, "the value of parameter '", spec.name, "'");
  }
}

void cast_back(const std::vector<ParamSpec>& params, const std::vector<at::ScalarType>& dtypes) noexcept {
  const c10::AutoGradMode no_grad(false);
  for (size_t i = 0; i < params.size(); ++i) {
    try {
      at::Tensor tensor = params[i].tensor;
      if (tensor.scalar_type() != dtypes[i]) shard::set_data(tensor, tensor.detach().to(dtypes[i]));
    } catch (const std::exception&) {
      // This parameter has no data, or there is no memory: the others are what they were.
    }
  }
}

}  // namespace tessera::engine
