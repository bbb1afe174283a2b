// Global gradient norm and clipping.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::optim {

// Sum of squares of a contiguous tensor (fp32, bf16, fp16) in double; not finite if an element is not. On the CPU
// multi-threaded; blocks of fixed size are added in order, so the bits do not depend on the number of threads. Waits for
// a device.
double sum_of_squares(const at::Tensor& tensor);
// That of each; those that are not on the CPU are on one device. One launch for all of them, and one wait.
std::vector<double> sums_of_squares(const std::vector<at::Tensor>& tensors);

// Factor of torch.nn.utils.clip_grad_norm_: min(1, max_norm / (norm + 1e-6)); 1 when max_norm is 0
// (clipping off).
double clip_coefficient(double norm, double max_norm);

}  // namespace tessera::optim
