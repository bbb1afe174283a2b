#include "tessera/parallel/inside.h"

#include <torch/csrc/autograd/autograd.h>

#include <functional>

#include "tessera/base/error.h"
#include "tessera/parallel/functions.h"
#include "tessera/parallel/layers.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera::parallel {

using testing::error_of;
using testing::run_ranks;

namespace {

// A block's parts, on one of two ranks: a slice of a column layer, a whole gain beside it, and what comes in.
struct Block {
  comm::GroupPtr group;
  at::Tensor input = at::ones({2, 4}), up = at::ones({3, 4}).requires_grad_(), gain = at::ones({3}).requires_grad_(),
             before = at::ones({4}).requires_grad_();

  at::Tensor column(const at::Tensor& x) const { return column_linear(x, up, {}, {.group = group, .label = "up"}); }
  std::vector<RegionParam> params() const {
    return {{"layers.0.up", up, true, "layers.0.up"}, {"layers.0.gain", gain}, {"embed.before", before}};
  }
  std::vector<size_t> found(const at::Tensor& x) const {
    const std::vector<std::string> lists{"layers"};
    return whole_inside("layers.0.mlp.down", x, params(), lists);
  }
};

struct Row {
  const char* text;
  std::function<at::Tensor(const Block&)> input;  // of the row layer
  std::vector<size_t> found;
  std::string error = {};
};

const Row kRows[] = {
    {"what is behind the column layer is whole", [](const Block& b) { return b.column(b.input * b.before); }, {}},
    {"a gain on the slice", [](const Block& b) { return b.column(b.input * b.before) * b.gain; }, {1}},
    {"a border is a begin", [](const Block& b) { return border(b.input * b.before).narrow(1, 0, 3) * b.gain; }, {1}},
    {"a parameter of another block",
     [](const Block& b) { return b.column(b.input) * b.before.sum(); },
     {},
     "layers.0.mlp.down: what comes into this row layer depends on activations that every rank has whole beside those "
     "of column layers (through embed.before), and"},
    {"a leaf that is no parameter",
     [](const Block& b) { return b.column(b.input) * at::ones({3}).requires_grad_(); },
     {},
     "beside those of column layers, and their"},
    {"what a row layer gave",
     [](const Block& b) {
       const at::Tensor slice = at::ones({3, 3}).requires_grad_();
       return b.column(b.input) + row_linear(b.column(b.input), slice, {}, {.group = b.group, .label = "down"});
     },
     {},
     "beside those of column layers, and their"},
};

TEST(Inside, WhatARowLayerDependsOn) {
  for (const Row& row : kRows)
    run_ranks(2, [&](int, const comm::GroupPtr& group) {
      const Block block{.group = group};
      const at::Tensor x = row.input(block);
      if (row.error.empty()) {
        EXPECT_EQ(block.found(x), row.found) << row.text;
      } else {
        EXPECT_HAS(error_of<c10::ValueError>([&] { block.found(x); }), row.error) << row.text;
      }
    });
}

TEST(Inside, AWeightNeedsItsLayer) {
  const Block block;
  const at::Tensor x = at::ones({2, 3}) * block.up.sum();
  EXPECT_HAS(error_of<UsageError>([&] { block.found(x); }), "layers.0.up: its weight is used without a call");
}

TEST(Inside, SettledParametersAreLeftAlone) {
  const Block block;
  std::vector<RegionParam> params = block.params();
  for (RegionParam& param : params)
    param.settled = true;
  EXPECT_TRUE(whole_inside("layers.0.down", block.gain * block.before.sum(), params, {}).empty());
}

}  // namespace
}  // namespace tessera::parallel
