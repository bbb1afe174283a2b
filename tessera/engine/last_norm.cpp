#include "tessera/engine/last_norm.h"

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>

#include <cmath>
#include <utility>

#include "tessera/shard/side_stream.h"

namespace tessera::engine {

LastNorm::LastNorm(double norm, const at::Tensor& squares, bool asked) : norm_(norm), squares_(squares) {
  if (!asked || !squares.defined() || squares.is_cpu()) return;
  squares_ = at::empty(squares.sizes(), squares.options().device(at::kCPU).pinned_memory(true));
  squares_.copy_(squares, /*non_blocking=*/true);
  came_ = shard::mark(squares.device());
}

std::optional<double> LastNorm::get() const {
  if (!squares_.defined()) return norm_;
  if (const auto came = std::exchange(came_, nullptr); came && !came->query()) came->synchronize();
  const at::Tensor squares = std::exchange(squares_, at::Tensor()).cpu();
  double sum = 0;
  for (int64_t i = 0; i < squares.numel(); ++i)
    sum += squares.const_data_ptr<double>()[i];
  norm_ = std::sqrt(sum);
  return norm_;
}

}  // namespace tessera::engine
