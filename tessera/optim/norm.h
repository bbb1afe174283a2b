// Global gradient norm and clipping.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::optim {

// Sum of squares of a contiguous tensor (fp32, bf16, fp16) in double; not finite if an element is not. On the CPU
// multi-threaded; blocks of fixed size are added in order, so the bits do not depend on the number of threads. Waits for
// a device.
double sum_of_squares(const at::Tensor& tensor);
// Sums of squares of several tensors; those that are not on the CPU are on one device. One launch for all of them, and one wait.
std::vector<double> sums_of_squares(const std::vector<at::Tensor>& tensors);
// Returns the sum without a wait: a number (0-d, double) where the tensor is.
at::Tensor squares_there(const at::Tensor& tensor);
// Part of a row of elements, 1-D, from element `begin` on.
struct Piece {
  int64_t begin;
  at::Tensor values;
};
// Returns squares_there() of `size` elements in a row, with the same bits: those of `pieces`, in order and without overlap, and
// zeros between them.
at::Tensor squares_there(int64_t size, const std::vector<Piece>& pieces, const at::TensorOptions& options);
// Reads numbers on the CPU and on one device. Waits for the device once.
std::vector<double> read_numbers(const std::vector<at::Tensor>& numbers);

// Factor of torch.nn.utils.clip_grad_norm_: min(1, max_norm / (norm + 1e-6)); 1 when max_norm is 0
// (clipping off).
double clip_coefficient(double norm, double max_norm);

}  // namespace tessera::optim
