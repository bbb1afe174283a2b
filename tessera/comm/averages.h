// Sums and means over the ranks that gradients are averaged over: those of other batches (kBatchAxes) and of other parts of a
// sequence (Axis::Sp). Collective over them, all with tensors of the same shape and dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/comm/mesh.h"

namespace tessera::comm {

// Without autograd, in memory of its own.
at::Tensor sum_over_batch(const Mesh& mesh, const at::Tensor& value);
// Whole numbers become fp64.
at::Tensor mean_over_batch(const Mesh& mesh, const at::Tensor& value);
// A loss of masked tokens: `sum` of this rank's losses (a scalar, with autograd) and `count` of its tokens become the loss whose
// gradient, averaged over ranks as every step averages, is that of the mean over all tokens of all ranks: sum times the number of
// ranks over the count of all. The mean over ranks of the result is that mean. A count of all of 0 is a value error.
at::Tensor token_mean(const Mesh& mesh, const at::Tensor& sum, const at::Tensor& count);

}  // namespace tessera::comm
