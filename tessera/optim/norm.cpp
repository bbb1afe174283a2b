#include "tessera/optim/norm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>

#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/parallel.h"
#include "tessera/kernels/elementwise.h"
#include "tessera/shard/device.h"
#include "tessera/shard/dtype.h"

namespace tessera::optim {

namespace {

constexpr int64_t kBlock = 65536;  // elements; fixes the order of summation on the CPU

void check(const at::Tensor& tensor) {
  TESSERA_CHECK_VALUE(tensor.defined() && tensor.is_contiguous(), "optim.sum_of_squares",
                      "expected a contiguous tensor");
}

double sum_on_cpu(const at::Tensor& tensor) {
  const int64_t n = tensor.numel();
  if (n == 0) return 0;
  const auto dtype = shard::kernel_dtype(tensor.scalar_type());
  const char* data = static_cast<const char*>(tensor.const_data_ptr());
  const auto bytes = static_cast<int64_t>(kernels::size_of(dtype));
  const auto block_sum = [&](int64_t begin) {
    return kernels::sum_of_squares(data + begin * bytes, dtype, std::min(kBlock, n - begin));
  };
  if (n <= kBlock) return block_sum(0);
  std::vector<double> partial((n + kBlock - 1) / kBlock);
  parallel_ranges(n, kBlock, kBlock, [&](int64_t begin, int64_t end) {
    for (; begin < end; begin += kBlock)
      partial[begin / kBlock] = block_sum(begin);
  });
  double sum = 0;
  for (double part : partial)
    sum += part;
  return sum;
}

// A number on the tensor's device, once its stream is there.
at::Tensor sum_on_device(const at::Tensor& tensor) {
  const auto dtype = shard::kernel_dtype(tensor.scalar_type());
  const int64_t n = tensor.numel(), blocks = kernels::sum_blocks(n);
  const auto options = tensor.options().dtype(at::kDouble);
  const at::Tensor sums = at::empty({blocks}, options), lanes = at::empty({blocks * kernels::kSumLanes}, options);
  shard::on_device(tensor.device(), [&](const kernels::DeviceTable& table, void* stream) {
    table.sum_of_squares(tensor.const_data_ptr(), dtype, n, lanes.mutable_data_ptr<double>(),
                         sums.mutable_data_ptr<double>(), stream);
  });
  return sums.sum();
}

}  // namespace

double sum_of_squares(const at::Tensor& tensor) {
  return sums_of_squares({tensor})[0];
}

at::Tensor squares_there(const at::Tensor& tensor) {
  check(tensor);
  return tensor.is_cpu() ? at::scalar_tensor(sum_on_cpu(tensor), at::kDouble) : sum_on_device(tensor);
}

std::vector<double> sums_of_squares(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> numbers;
  numbers.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors)
    numbers.push_back(squares_there(tensor));
  return read_numbers(numbers);
}

std::vector<double> read_numbers(const std::vector<at::Tensor>& numbers) {
  std::vector<double> values(numbers.size());
  std::vector<at::Tensor> on_device;
  std::vector<size_t> places;
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i].is_cpu()) {
      values[i] = numbers[i].item<double>();
    } else {
      on_device.push_back(numbers[i]);
      places.push_back(i);
    }
  }
  if (on_device.empty()) return values;
  const at::Tensor read = at::stack(on_device).cpu();
  for (size_t i = 0; i < places.size(); ++i)
    values[places[i]] = read.const_data_ptr<double>()[i];
  return values;
}

double clip_coefficient(double norm, double max_norm) {
  TESSERA_CHECK_VALUE(max_norm >= 0, "optim.clip_coefficient", "max_norm must not be negative, got ", max_norm);
  if (max_norm == 0) return 1;
  const double coefficient = max_norm / (norm + 1e-6);
  return coefficient > 1 ? 1 : coefficient;  // NaN stays NaN
}

}  // namespace tessera::optim
