#include "tessera/optim/norm.h"

#include <ATen/ops/empty.h>
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

// Of tensors on one device: a number each on it, once its stream is there.
std::vector<at::Tensor> sums_on_device(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> sums;
  std::vector<kernels::SumSegment> segments;
  for (const at::Tensor& tensor : tensors) {
    const int64_t n = tensor.numel();
    sums.push_back(at::empty({kernels::sum_blocks(n)}, tensor.options().dtype(at::kDouble)));
    segments.push_back({tensor.const_data_ptr(), shard::kernel_dtype(tensor.scalar_type()), n,
                        sums.back().mutable_data_ptr<double>()});
  }
  shard::on_device(tensors[0].device(), [&](const kernels::DeviceTable& table, void* stream) {
    table.sum_of_squares(segments.data(), static_cast<int64_t>(segments.size()), stream);
  });
  for (at::Tensor& sum : sums)
    sum = sum.sum();
  return sums;
}

}  // namespace

double sum_of_squares(const at::Tensor& tensor) {
  return sums_of_squares({tensor})[0];
}

std::vector<double> sums_of_squares(const std::vector<at::Tensor>& tensors) {
  std::vector<double> sums(tensors.size());
  std::vector<at::Tensor> on_device;
  std::vector<size_t> places;
  for (size_t i = 0; i < tensors.size(); ++i) {
    check(tensors[i]);
    if (tensors[i].is_cpu()) {
      sums[i] = sum_on_cpu(tensors[i]);
    } else {
      on_device.push_back(tensors[i]);
      places.push_back(i);
    }
  }
  if (on_device.empty()) return sums;
  const at::Tensor read = at::stack(sums_on_device(on_device)).cpu();
  for (size_t i = 0; i < places.size(); ++i)
    sums[places[i]] = read.const_data_ptr<double>()[i];
  return sums;
}

double clip_coefficient(double norm, double max_norm) {
  TESSERA_CHECK_VALUE(max_norm >= 0, "optim.clip_coefficient", "max_norm must not be negative, got ", max_norm);
  if (max_norm == 0) return 1;
  const double coefficient = max_norm / (norm + 1e-6);
  return coefficient > 1 ? 1 : coefficient;  // NaN stays NaN
}

}  // namespace tessera::optim
