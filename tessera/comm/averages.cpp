#include "tessera/comm/averages.h"

#include "tessera/base/error.h"

namespace tessera::comm {
namespace {

int averaged_ranks(const Mesh& mesh) {
  return mesh.size(kBatchAxes.with(Axis::Sp));
}

}  // namespace

at::Tensor sum_over_batch(const Mesh& mesh, const at::Tensor& value) {
  TESSERA_CHECK_VALUE(value.defined(), "engine.sum", "the tensor is undefined");
  at::Tensor result = value.detach().clone(at::MemoryFormat::Contiguous);
  mesh.group(kBatchAxes)->all_reduce(result, ReduceOp::Sum, "sum of the batch ranks").wait();
  mesh.group(Axis::Sp)->all_reduce(result, ReduceOp::Sum, "sum of the ranks of a sequence").wait();
  return result;
}

at::Tensor mean_over_batch(const Mesh& mesh, const at::Tensor& value) {
  TESSERA_CHECK_VALUE(value.defined(), "engine.mean", "the tensor is undefined");
  return sum_over_batch(mesh, value.is_floating_point() ? value : value.to(at::kDouble)).div(averaged_ranks(mesh));
}

at::Tensor token_mean(const Mesh& mesh, const at::Tensor& sum, const at::Tensor& count) {
  TESSERA_CHECK_VALUE(sum.defined() && count.defined(), "engine.token_mean", "a tensor is undefined");
  const double tokens = sum_over_batch(mesh, count.to(at::kDouble)).sum().item<double>();
  TESSERA_CHECK_VALUE(tokens > 0, "engine.token_mean", "no rank has a token that counts (", tokens, " in all)");
  return sum.mul(averaged_ranks(mesh) / tokens);
}

}  // namespace tessera::comm
