#include "tessera/optim/norm.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_copy.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/parallel.h"
#include "tessera/kernels/elementwise.h"
#include "tessera/shard/device.h"
#include "tessera/shard/dtype.h"
#include "tessera/shard/side_stream.h"

namespace tessera::optim {

namespace {

constexpr int64_t kBlock = 65536;  // elements; fixes the order of summation on the CPU

void check(const at::Tensor& tensor) {
  TESSERA_CHECK_VALUE(tensor.defined() && tensor.is_contiguous(), "optim.sum_of_squares",
                      "expected a contiguous tensor");
}

// The pieces of a row that have elements of [begin, end).
std::span<const Piece> pieces_of(const std::vector<Piece>& pieces, int64_t begin, int64_t end) {
  const auto ends_before = [](const Piece& piece, int64_t at) { return piece.begin + piece.values.numel() <= at; };
  const auto first = std::lower_bound(pieces.begin(), pieces.end(), begin, ends_before);
  auto last = first;
  while (last != pieces.end() && last->begin < end)
    ++last;
  return {first, last};
}

// Elements [begin, end) of a row, whose other elements are zero.
class Block {
 public:
  Block(const std::vector<Piece>& pieces, int64_t begin, int64_t end)
      : parts_(pieces_of(pieces, begin, end)), begin_(begin), end_(end) {}
  bool empty() const { return parts_.empty(); }
  // How many elements are not zero, where one piece has them all and begins with the block; else 0.
  int64_t in_one() const {
    const bool one = parts_.size() == 1 && parts_[0].begin <= begin_;
    return one ? std::min(end_, parts_[0].begin + parts_[0].values.numel()) - begin_ : 0;
  }
  const char* there() const {
    const at::Tensor& values = parts_[0].values;
    return static_cast<const char*>(values.const_data_ptr()) + (begin_ - parts_[0].begin) * values.element_size();
  }
  // Calls f(offset in the block, elements of a piece).
  template <class F>
  void each(const F& f) const {
    for (const Piece& piece : parts_) {
      const int64_t from = std::max(begin_, piece.begin), to = std::min(end_, piece.begin + piece.values.numel());
      if (from < to) f(from - begin_, piece.values.narrow(0, from - piece.begin, to - from));
    }
  }

 private:
  std::span<const Piece> parts_;
  int64_t begin_, end_;
};

// `scratch`: memory where elements of several pieces are put together.
double block_sum(const Block& block, kernels::DType dtype, std::vector<char>& scratch) {
  if (block.empty()) return 0;
  if (const int64_t n = block.in_one(); n > 0) return kernels::sum_of_squares(block.there(), dtype, n);
  const auto bytes = static_cast<int64_t>(kernels::size_of(dtype));
  scratch.assign(kBlock * bytes, 0);
  block.each([&](int64_t offset, const at::Tensor& part) {
    std::memcpy(scratch.data() + offset * bytes, part.const_data_ptr(), part.nbytes());
  });
  return kernels::sum_of_squares(scratch.data(), dtype, kBlock);
}

double sum_on_cpu(int64_t n, const std::vector<Piece>& pieces, kernels::DType dtype) {
  std::vector<double> partial((n + kBlock - 1) / kBlock);
  parallel_ranges(n, kBlock, kBlock, [&](int64_t begin, int64_t end) {
    std::vector<char> scratch;
    for (; begin < end; begin += kBlock)
      partial[begin / kBlock] = block_sum({pieces, begin, std::min(begin + kBlock, n)}, dtype, scratch);
  });
  double sum = 0;
  for (double part : partial)
    sum += part;
  return sum;
}

// Sums of the blocks of elements [from, from + n), from sums[first] on.
kernels::SumSegment blocks_of(const at::Tensor& values, int64_t from, int64_t n, const at::Tensor& sums,
                              int64_t first) {
  const auto* data = static_cast<const char*>(values.const_data_ptr()) + from * values.element_size();
  return {data, shard::kernel_dtype(values.scalar_type()), n, sums.mutable_data_ptr<double>() + first};
}

void add_blocks(const std::vector<kernels::SumSegment>& segments, c10::Device device) {
  if (segments.empty()) return;
  shard::on_device(device, [&](const kernels::DeviceTable& table, void* stream) {
    table.sum_of_squares(segments.data(), static_cast<int64_t>(segments.size()), stream);
  });
}

// Puts blocks that lie in several pieces together, all of them at once, and adds their squares to `sums`.
void add_blocks_of_several(const std::vector<int64_t>& numbers, int64_t size, const std::vector<Piece>& pieces,
                           const at::Tensor& sums) {
  if (numbers.empty()) return;
  constexpr int64_t kSize = kernels::kSumBlock;
  const at::Tensor zeros = at::zeros({kSize}, pieces[0].values.options());
  std::vector<at::Tensor> parts;
  for (const int64_t number : numbers) {
    int64_t at = 0;
    Block(pieces, number * kSize, std::min((number + 1) * kSize, size))
        .each([&](int64_t offset, const at::Tensor& part) {
          if (offset > at) parts.push_back(zeros.narrow(0, 0, offset - at));
          parts.push_back(part);
          at = offset + part.numel();
        });
    if (at < kSize) parts.push_back(zeros.narrow(0, 0, kSize - at));
  }
  const auto count = static_cast<int64_t>(numbers.size());
  const at::Tensor found = at::empty({count}, sums.options());
  const at::Tensor together = at::cat(parts);
  add_blocks({blocks_of(together, 0, count * kSize, found, 0)}, sums.device());
  sums.index_copy_(0, shard::sent_to(sums.device(), at::tensor(numbers, at::kLong)), found);
}

// A number on the tensors' device, ready once its stream is there.
at::Tensor sum_on_device(int64_t size, const std::vector<Piece>& pieces, const at::TensorOptions& options) {
  constexpr int64_t kSize = kernels::kSumBlock;
  const bool all = pieces.size() == 1 && pieces[0].values.numel() == size;
  const int64_t blocks = kernels::sum_blocks(size);
  const auto of_sums = options.dtype(at::kDouble);
  const at::Tensor sums = all ? at::empty({blocks}, of_sums) : at::zeros({blocks}, of_sums);
  std::vector<int64_t> several;
  std::vector<kernels::SumSegment> segments;
  const auto whole = [&](int64_t number) {
    return Block(pieces, number * kSize, std::min((number + 1) * kSize, size)).in_one() > 0;
  };
  for (const Piece& piece : pieces) {
    const int64_t end = piece.begin + piece.values.numel();
    if (piece.values.numel() == 0) continue;
    const int64_t first = (piece.begin + kSize - 1) / kSize, last = (end - 1) / kSize;
    const auto put_together = [&](int64_t number) {
      if (several.empty() || several.back() != number) several.push_back(number);
    };
    if (piece.begin % kSize != 0) put_together(piece.begin / kSize);
    if (last < first) continue;
    const bool alone = whole(last);
    const int64_t to = alone ? end : last * kSize;
    if (to > first * kSize)
      segments.push_back(blocks_of(piece.values, first * kSize - piece.begin, to - first * kSize, sums, first));
    if (!alone) put_together(last);
  }
  add_blocks(segments, sums.device());
  add_blocks_of_several(several, size, pieces, sums);
  return sums.sum();
}

}  // namespace

double sum_of_squares(const at::Tensor& tensor) {
  return sums_of_squares({tensor})[0];
}

at::Tensor squares_there(const at::Tensor& tensor) {
  check(tensor);
  return squares_there(tensor.numel(), {{0, tensor.flatten()}}, tensor.options());
}

at::Tensor squares_there(int64_t size, const std::vector<Piece>& pieces, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) return sum_on_device(size, pieces, options);
  return at::scalar_tensor(sum_on_cpu(size, pieces, shard::kernel_dtype(options.dtype().toScalarType())), at::kDouble);
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
