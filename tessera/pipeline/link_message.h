// What ranks of a link say of their tensors, and the boxes that follow from it: for link*.cpp.
//
// A header is the first tensor of every message; its first number is its kind. A header of tensors goes on with the message's
// number, the sample's length and characters, and what the direction has: outputs have samples and forms; gradients, which exist.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/pipeline/link_end.h"

namespace tessera::pipeline {

// What a header is of; kEndOfStep: kind, step, messages in it.
enum LinkKind : int64_t { kOfTensors, kEndOfStep };

std::vector<int64_t> numbers_of(const at::Tensor& header);

std::vector<int64_t> header_of(int64_t number, const Sample& sample);
Sample sample_of(const std::vector<int64_t>& header);
// The place in a header where what the direction has begins.
size_t body_of(const std::vector<int64_t>& header);

// What a rank of the source says of its outputs.
struct Outputs {
  std::optional<Sizes> samples;
  std::vector<at::ScalarType> dtypes;
  std::vector<bool> trained;
  std::vector<Sizes> shapes;
};
void add_outputs(std::vector<int64_t>& header, const Tensors& outputs, const std::optional<Sizes>& samples);
Outputs outputs_of(const std::vector<int64_t>& header);

// The boxes of every tensor, on both sides. Value error, beginning with `where`, where the parts do not fit together.
struct LinkTable {
  std::vector<std::vector<Box>> held, wanted;
};
LinkTable table_of(const std::vector<Outputs>& parts, const LinkRanks& ranks, const std::string& where);

Sizes sizes_of(const Box& box);
// `box` of a tensor that holds `outer`.
at::Tensor inside(at::Tensor tensor, const Box& box, const Box& outer);
// Puts a piece into `whole`, which holds `outer`; without a copy where the piece is all of it.
void join(at::Tensor& whole, const at::Tensor& piece, const Box& box, const Box& outer);

// Copies of parts of tensors for send(), one for all who get the same.
class Pieces {
 public:
  explicit Pieces(comm::PointToPointPtr p2p) : p2p_(std::move(p2p)) {}
  at::Tensor of(const at::Tensor& tensor, const Box& box, const Box& outer);

 private:
  const comm::PointToPointPtr p2p_;  // null: no copies
  std::vector<std::pair<std::pair<const void*, Box>, at::Tensor>> made_;
};

}  // namespace tessera::pipeline
