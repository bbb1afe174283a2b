// Text for the example: bytes, a held-out part, and the batch order of examples/python/text.py.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace example {

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw std::runtime_error("cannot read " + path);
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

// SplitMix64: a counter in, 64 well mixed bits out.
inline uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

struct Batch {
  at::Tensor x, y;  // (rows, context) or this rank's part of it, int64

  Batch to(c10::Device device) const { return {x.to(device), y.to(device)}; }
};

// The first nine tenths train, the last tenth is held out.
class Text {
 public:
  // `part` of `parts`: the stretch of every row that this rank of a sequence-parallel group sees.
  Text(std::string data, int64_t context, int64_t part = 0, int64_t parts = 1)
      : data_(std::move(data)), context_(context), part_(part), parts_(parts) {
    size_ = static_cast<int64_t>(data_.size());
    cut_ = size_ - size_ / 10;
    if (size_ - cut_ <= context + 1) {
      throw std::runtime_error("the text is too short for this context");
    }
    if (context % parts != 0) {
      throw std::runtime_error("the context does not divide among the ranks of --sp");
    }
  }

  // One rank's batch. The ranks' batches together do not depend on their number.
  Batch batch(int64_t step, int64_t rank, int64_t ranks, int64_t rows) const {
    const auto first = static_cast<uint64_t>((step * ranks + rank) * rows);
    const auto places = static_cast<uint64_t>(cut_ - context_);
    std::vector<int64_t> starts;
    for (int64_t row = 0; row < rows; ++row) {
      starts.push_back(static_cast<int64_t>(mix(first + row) % places));
    }
    return cut(starts);
  }

  // Batch `index` of `count` fixed ones, evenly spread over the held-out part.
  Batch held_out(int64_t rows, int64_t count, int64_t index) const {
    const int64_t places = size_ - cut_ - context_;
    std::vector<int64_t> starts;
    for (int64_t i = index * rows; i < (index + 1) * rows; ++i) {
      starts.push_back(cut_ + i * places / (rows * count));
    }
    return cut(starts);
  }

 private:
  Batch cut(const std::vector<int64_t>& starts) const {
    const auto rows = static_cast<int64_t>(starts.size());
    const int64_t length = context_ / parts_;
    auto x = torch::empty({rows, length}, torch::kInt64);
    auto y = torch::empty({rows, length}, torch::kInt64);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t start = starts[row] + part_ * length;
      for (int64_t i = 0; i < length; ++i) {
        x.data_ptr<int64_t>()[row * length + i] = static_cast<uint8_t>(data_[start + i]);
        y.data_ptr<int64_t>()[row * length + i] = static_cast<uint8_t>(data_[start + i + 1]);
      }
    }
    return {x, y};
  }

  std::string data_;
  int64_t context_, part_, parts_, size_ = 0, cut_ = 0;
};

}  // namespace example
