#include "tessera/optim/norm.h"

#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/parallel.h"
#include "tessera/kernels/elementwise.h"
#include "tessera/shard/dtype.h"

namespace tessera::optim {

namespace {
constexpr int64_t kBlock = 65536;  // elements; fixes the order of summation
}

double sum_of_squares(const at::Tensor& tensor) {
  TESSERA_CHECK_VALUE(tensor.defined() && tensor.is_cpu() && tensor.is_contiguous(), "optim.sum_of_squares",
                      "expected a contiguous CPU tensor");
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

double clip_coefficient(double norm, double max_norm) {
  TESSERA_CHECK_VALUE(max_norm >= 0, "optim.clip_coefficient", "max_norm must not be negative, got ", max_norm);
  if (max_norm == 0) return 1;
  const double coefficient = max_norm / (norm + 1e-6);
  return coefficient > 1 ? 1 : coefficient;  // NaN stays NaN
}

}  // namespace tessera::optim
