#include "tessera/nn/together.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <cmath>

#include "tessera/base/error.h"

namespace tessera::nn {

std::vector<std::vector<double>> rows_of(const comm::Parts& parts, const std::vector<double>& own, comm::Label label) {
  const auto count = static_cast<int64_t>(own.size());
  const at::Tensor mine = at::tensor(own, at::kDouble);
  const at::Tensor all = at::empty({parts.everyone->size() * count}, at::kDouble);
  parts.everyone->all_gather(all, mine, label).wait();
  const auto* data = all.const_data_ptr<double>();
  std::vector<std::vector<double>> rows;
  for (int rank = 0; rank < parts.everyone->size(); ++rank, data += count)
    rows.emplace_back(data, data + count);
  return rows;
}

bool step_together(Session& engine, const comm::Parts& parts) {
  if (parts.shapes.size() == 1) return engine.step();
  const engine::Engine& core = engine.core();
  const bool boundary = !core.options().managed_accumulation || core.is_gradient_accumulation_boundary();
  for (const auto& row : rows_of(parts, {boundary ? 1.0 : 0.0}, "engines that step together"))
    TESSERA_CHECK((row[0] != 0) == boundary, "engine.step",
                  "the engines were stepped apart: some are at an accumulation boundary, others between two; give them "
                  "the same gradient_accumulation_steps and step them together only");
  if (!boundary) return engine.step();
  double squares = 0;
  for (const auto& row : rows_of(parts, {engine.core().norm_contribution()}, "the norm of several engines"))
    squares += row[0];
  return engine.step(std::sqrt(squares));
}

}  // namespace tessera::nn
