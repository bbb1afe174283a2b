// Sums of squares with the bits of the reference: each lane of a block is added in the order of its elements, then the
// lanes in the reference's tree.
#include <algorithm>

#include "tessera/kernels/cuda/cuda.h"
#include "tessera/kernels/cuda/eight.cuh"
#include "tessera/kernels/cuda/launch.cuh"

namespace tessera::kernels::cuda {
namespace {

// A sum's block of kSumBlock elements is rows of kSumLanes. A thread has eight lanes: four threads read a row.
constexpr int kRows = kSumBlock / kSumLanes;
constexpr int kThreadsOfSum = kSumLanes / kEight;
constexpr int kSumThreads = 64;  // few, so that multiprocessors get equal shares
constexpr int kSumBlocks = 10;   // blocks of a multiprocessor: the registers left keep a thread's loads together
constexpr int kSums = kSumThreads / kThreadsOfSum;  // sums of a block of threads

struct SumPiece {
  const void* src;
  double* sums;
  Eights eights;
};

constexpr int kSumPieces = 96;  // pieces of a launch

struct SumTable {
  Shares<kSumPieces> shares;
  SumPiece pieces[kSumPieces];
};
static_assert(sizeof(SumTable) <= kMostArguments);

// Adds what a thread has of a block: an eight of every row, from the element `begin` on.
template <DType dtype>
__device__ void add_rows(const SumPiece& piece, int begin, double (&sums)[kEight]) {
  constexpr int kAhead = 8 / Eight<dtype>::kAccesses;  // rows that are loaded before the first is added
  const auto add = [&](const Eight<dtype>& row) {
#pragma unroll
    for (int k = 0; k < kEight; ++k) {
      const double x = row.value(k);
      sums[k] = std::fma(x, x, sums[k]);  // the product of two floats is exact in double, so fused or not is the same
    }
  };
  if (piece.eights.aligned && piece.eights.n - begin >= (kRows - 1) * kSumLanes + kEight) {
#pragma unroll 1
    for (int row = 0; row < kRows; row += kAhead) {
      Eight<dtype> ahead[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a)
        Whole{begin + (row + a) * int{kSumLanes}}.load(ahead[a], piece.src);
#pragma unroll
      for (int a = 0; a < kAhead; ++a)
        add(ahead[a]);
    }
  } else {
#pragma unroll 1
    for (int row = 0; row < kRows && begin + row * kSumLanes < piece.eights.n; ++row) {
      Eight<dtype> eight;
      Piece{begin + row * int{kSumLanes}, piece.eights.n}.load(eight, piece.src);
      add(eight);
    }
  }
}

// Lanes l, l + width, l + 2 * width and so on: a node of the reference's tree.
template <int width>
__device__ double tree_sum(const double* lane, int l) {
  if constexpr (width == kSumLanes) {
    return lane[l];
  } else {
    return tree_sum<2 * width>(lane, l) + tree_sum<2 * width>(lane, l + width);
  }
}

template <DType dtype>
__global__ void __launch_bounds__(kSumThreads, kSumBlocks) block_sums(const __grid_constant__ SumTable table) {
  __shared__ double lanes[kSums * kSumLanes];
  const auto [number, share] = table.shares.of(blockIdx.x);
  const SumPiece& piece = table.pieces[number];
  const int thread = static_cast<int>(threadIdx.x), first = static_cast<int>(share) * kSums;

  double sums[kEight] = {};
  const int begin = (first + thread / kThreadsOfSum) * int{kSumBlock} + thread % kThreadsOfSum * kEight;
  add_rows<dtype>(piece, begin, sums);
#pragma unroll
  for (int k = 0; k < kEight; ++k)
    lanes[thread * kEight + k] = sums[k];
  __syncthreads();
  if (thread < kSums && (first + thread) * kSumBlock < piece.eights.n)
    piece.sums[first + thread] = tree_sum<1>(lanes + thread * kSumLanes, 0);
}

}  // namespace

void sum_of_squares(const SumSegment* segments, int64_t count, void* stream) {
  SumTable table;
  const auto go = [&](DType dtype) {
    const auto kernel = dtype == DType::F32 ? block_sums<DType::F32>
                                            : (dtype == DType::BF16 ? block_sums<DType::BF16> : block_sums<DType::F16>);
    launch(kernel, table.shares.blocks, kSumThreads, stream, table);
    table.shares = {};
  };
  for (int64_t i = 0; i < count; ++i) {
    const SumSegment& segment = segments[i];
    for_pieces(segment.n, [&](int64_t at, int n) {
      const char* src = static_cast<const char*>(segment.src) + at * static_cast<int64_t>(size_of(segment.dtype));
      Eights eights = eights_of(n, {{src, segment.dtype}});
      eights.aligned &= eights.before == 0;  // lanes are counted from the first element
      const int64_t sums = sum_blocks(n);
      table.pieces[table.shares.add((sums + kSums - 1) / kSums)] = {src, segment.sums + at / kSumBlock, eights};
      if (table.shares.full()) go(segment.dtype);
    });
    if (i + 1 == count || segments[i + 1].dtype != segment.dtype) go(segment.dtype);
  }
}

}  // namespace tessera::kernels::cuda
