// Sums of squares in two passes, so that many threads share the work and the bits are the reference's: a thread adds
// what one lane of one block has, in order, then a thread adds the lanes of one block.
#include <type_traits>

#include "tessera/kernels/cuda/cuda.h"
#include "tessera/kernels/cuda/launch.cuh"
#include "tessera/kernels/element.h"

namespace tessera::kernels::cuda {
namespace {

constexpr int kAhead = 8;  // elements that a thread loads before it adds the first: their latencies overlap

__device__ double with_square(double sum, double x) {
  return sum + x * x;  // the product of two floats is exact in double
}

// Lane i % kSumLanes of block i / kSumLanes. Threads beside each other read elements beside each other.
template <DType dtype>
struct LaneSums {
  const void* src;
  int64_t n;
  double* lanes;

  __device__ void operator()(int64_t i) const {
    using Stored = std::conditional_t<dtype == DType::F32, float, uint16_t>;
    const int64_t block = i / kSumLanes;
    const int64_t end = std::min(n, (block + 1) * kSumBlock);
    int64_t at = block * kSumBlock + i % kSumLanes;
    double sum = 0;
    for (; at + (kAhead - 1) * kSumLanes < end; at += kAhead * kSumLanes) {
      Stored stored[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k)
        stored[k] = read<Stored>(src, at + k * kSumLanes);
#pragma unroll
      for (int k = 0; k < kAhead; ++k)
        sum = with_square(sum, load(stored, dtype, k));
    }
#pragma unroll 1
    for (; at < end; at += kSumLanes)
      sum = with_square(sum, load(src, dtype, at));
    lanes[i] = sum;
  }
};

// Lanes l, l + width, l + 2 * width and so on: a node of the reference's tree. By recursion, because nvcc keeps the
// reference's loops, and with them the lanes in memory.
template <int width>
__device__ double tree_sum(const double* lane, int l) {
  if constexpr (width == kSumLanes) {
    return lane[l];
  } else {
    return tree_sum<2 * width>(lane, l) + tree_sum<2 * width>(lane, l + width);
  }
}

struct BlockSum {
  const double* lanes;
  double* sums;

  __device__ void operator()(int64_t i) const { sums[i] = tree_sum<1>(lanes + i * kSumLanes, 0); }
};

}  // namespace

void sum_of_squares(const void* src, DType dtype, int64_t n, double* lanes, double* sums, void* stream) {
  const int64_t blocks = sum_blocks(n);
  const auto add_lanes = [&](const auto& body) { launch(blocks * kSumLanes, stream, body); };
  switch (dtype) {
    case DType::F32:
      add_lanes(LaneSums<DType::F32>{src, n, lanes});
      break;
    case DType::BF16:
      add_lanes(LaneSums<DType::BF16>{src, n, lanes});
      break;
    case DType::F16:
      add_lanes(LaneSums<DType::F16>{src, n, lanes});
      break;
  }
  launch(blocks, stream, BlockSum{lanes, sums});
}

}  // namespace tessera::kernels::cuda
