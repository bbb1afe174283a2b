// Tiles: values and gradients of the whole, a tile's memory. tests/python/sequence/test_tiled.py has more, engines among them.
#include "tessera/parallel/tiles.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>

#include <set>

#include "tests/support/errors.h"

namespace tessera::parallel {
namespace {

using testing::error_of;

constexpr int64_t kWidth = 8, kWords = 11, kLength = 13;

// A layer for tokens, and logits with their loss; of any dtype.
struct TiledNet : torch::nn::Module {
  TiledNet() {
    up = register_module("up", torch::nn::Linear(kWidth, 24));
    down = register_module("down", torch::nn::Linear(24, kWidth));
    head = register_module("head", torch::nn::Linear(kWidth, kWords));
  }
  at::Tensor layer(const at::Tensor& x) {
    const at::Tensor inside = at::tanh(up(x));
    most = std::max(most, inside.numel());
    return down(drop > 0 ? at::dropout(inside, drop, true) : inside);
  }
  at::Tensor loss(const at::Tensor& x, const at::Tensor& y, const at::Tensor& mask) {
    const at::Tensor logits = head(x).to(at::kFloat).flatten(0, 1);
    if (!mask.defined()) return at::cross_entropy_loss(logits, y.flatten(), {}, reduction);
    const at::Tensor each = at::cross_entropy_loss(logits, y.flatten(), {}, at::Reduction::None);
    return (each * mask.flatten()).sum() / ((y != -100) * mask).sum();
  }
  at::Tensor run(const at::Tensor& x, const at::Tensor& y, const at::Tensor& mask, int64_t tiles) {
    if (tiles == 0) return loss(x + layer(x), y, mask);
    const at::Tensor seen = x + tiled_mlp([this](const at::Tensor& t) { return layer(t); }, x, tiles);
    return tiled_loss([this](const auto& a, const auto& b, const auto& c) { return loss(a, b, c); }, seen, y, tiles,
                      reduction == at::Reduction::Sum ? TileReduction::Sum : TileReduction::Mean, mask);
  }
  torch::nn::Linear up{nullptr}, down{nullptr}, head{nullptr};
  int64_t reduction = at::Reduction::Mean, most = 0;
  double drop = 0;
};

struct TileData {
  at::Tensor x, y, mask;
};
TileData tile_data(bool masked) {
  const at::Tensor y = at::randint(kWords, {2, kLength}, at::kLong);
  y.narrow(1, 0, 5).masked_fill_(at::rand({2, 5}) < 0.6, -100);
  y.narrow(1, kLength - 4, 4).fill_(-100);
  const at::Tensor mask = (at::arange(kLength) % 3).ne(1).to(at::kFloat).expand({2, kLength});
  return {at::randn({2, kLength, kWidth}).requires_grad_(), y, masked ? mask : at::Tensor()};
}

TEST(Tiles, ValuesAndGradientsAreThoseOfTheWhole) {
  for (const int64_t tiles : {1, 3, 4, 20})
    for (const auto reduction : {at::Reduction::Mean, at::Reduction::Sum})
      for (const bool masked : {false, true}) {
        if (masked && reduction == at::Reduction::Sum) continue;
        torch::manual_seed(tiles);
        TiledNet net;
        net.reduction = reduction;
        TileData data = tile_data(masked);
        const auto grads = [&](int64_t count) {
          net.zero_grad();
          data.x.mutable_grad().reset();
          net.most = 0;
          const at::Tensor loss = net.run(data.x, data.y, data.mask, count);
          (loss * 7).backward();
          std::vector<at::Tensor> all{loss.detach(), data.x.grad().clone()};
          for (const at::Tensor& param : net.parameters())
            all.push_back(param.grad().clone());
          return all;
        };
        const auto expected = grads(0), found = grads(tiles);
        for (size_t i = 0; i < expected.size(); ++i)
          EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-4, 1e-6)) << i << " of " << tiles << " tiles";
        EXPECT_LE(net.most, 2 * 24 * ((kLength + tiles - 1) / tiles)) << "a tile at a time";
        const at::NoGradGuard no_grad;
        EXPECT_TRUE(at::allclose(net.run(data.x, data.y, data.mask, tiles), expected[0], 1e-5, 1e-6));
      }
}

// The backward draws what the forward drew, and the draws after it go on where they were.
TEST(Tiles, RandomNumbersAreDrawnAgain) {
  TiledNet net;
  net.drop = 0.5;
  const at::Tensor x = at::ones({1, kLength, kWidth}).requires_grad_();
  at::Tensor seen;  // of the forward
  const auto f = [&](const at::Tensor& t) {
    const at::Tensor kept = at::dropout(t, 0.5, true);
    seen = seen.defined() ? at::cat({seen, kept.detach()}, 1) : kept.detach();
    return kept;
  };
  const at::Tensor y = tiled_mlp(f, x, 4);
  const at::Tensor forward = std::exchange(seen, {}).clone();
  const at::Tensor state = at::rand({3});
  y.sum().backward();
  EXPECT_TRUE(seen.equal(forward));
  EXPECT_TRUE(x.grad().equal(forward));
  EXPECT_FALSE(at::rand({3}).equal(state));
}

TEST(Tiles, AutocastIsThatOfTheForward) {
  TiledNet net;
  const at::Tensor x = at::randn({1, kLength, kWidth}).requires_grad_();
  std::set<at::ScalarType> dtypes;
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  const at::Tensor y = tiled_mlp(
      [&](const at::Tensor& t) {
        const at::Tensor made = net.layer(t);
        dtypes.insert(made.scalar_type());
        return made;
      },
      x, 4);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  y.to(at::kFloat).sum().backward();
  EXPECT_EQ(dtypes, std::set<at::ScalarType>{at::kBFloat16});
  EXPECT_EQ(net.up->weight.grad().scalar_type(), at::kFloat);
}

TEST(Tiles, ASecondDerivativeIsRefused) {
  TiledNet net;
  const at::Tensor y = at::zeros({2, kLength}, at::kLong);
  const auto layer = [&](const at::Tensor& t) { return net.layer(t); };
  const auto loss = [&](const auto& a, const auto& b, const auto& c) { return net.loss(a, b, c); };
  for (const bool of_loss : {false, true}) {
    const at::Tensor x = at::randn({2, kLength, kWidth}).requires_grad_(true);
    const at::Tensor value = of_loss ? tiled_loss(loss, x, y, 2) : tiled_mlp(layer, x, 2).square().mean();
    const at::Tensor first = torch::autograd::grad({value * value}, {x}, {}, true, /*create_graph=*/true)[0];
    EXPECT_HAS(error_of<std::exception>([&] { first.square().sum().backward(); }), "no second derivative");
  }
}

TEST(Tiles, WhatCannotBeCutIsRefused) {
  TiledNet net;
  const at::Tensor x = at::randn({2, kLength, kWidth}), y = at::zeros({2, kLength}, at::kLong);
  const auto layer = [&](const at::Tensor& t) { return net.layer(t); };
  EXPECT_HAS(error_of<c10::ValueError>([&] { tiled_mlp(layer, at::ones({3}), 2); }), "[tiled_mlp] x must be");
  EXPECT_HAS(error_of<c10::ValueError>([&] { tiled_mlp(layer, x, 0); }), "1 tile at least, got 0");
  const at::Tensor outside = net.up->weight * 2;
  EXPECT_HAS(
      error_of<c10::ValueError>([&] { tiled_mlp([&](const at::Tensor& t) { return at::linear(t, outside); }, x, 2); }),
      "computed outside of it and requires gradients (by MulBackward");
  const auto loss = [&](const auto& a, const auto& b, const auto& c) { return net.loss(a, b, c); };
  EXPECT_HAS(error_of<c10::ValueError>([&] { tiled_loss(loss, x, y.narrow(1, 0, 3), 2); }),
             "[tiled_loss] labels has the sizes [2, 3], x [2, 13, 8]: all begin with [batch, sequence]");
  const auto all = [](const at::Tensor& a, const at::Tensor& b, std::vector<std::string> names = {}) {
    const Tiled tiles{.f = [](const auto& pieces) { return pieces[0].sum(); },
                      .tensors = {a, b},
                      .cut = {true, true},
                      .count = 2,
                      .names = std::move(names)};
    return error_of<c10::ValueError>([&] { tiled(tiles, 1); });
  };
  const at::Tensor four = at::ones({1, 4, 2});
  EXPECT_HAS(all(four, at::ones({1, 5}), {"x", "y"}),
             "[tiled] y has the sizes [1, 5], x [1, 4, 2]: dim 1 of all that is cut must be the sequence");
  EXPECT_HAS(all(four, at::ones(4)), "tensor 1 has the sizes [4], tensor 0 [1, 4, 2]: dim 1 of all");
  EXPECT_HAS(all(four, four), "[tiled] the function returns a scalar: say how");
  EXPECT_HAS(error_of<c10::ValueError>([&] { tiled({.f = {}, .tensors = {four}, .cut = {false}}, 1); }),
             "[tiled] there is no tensor to cut");
  EXPECT_HAS(
      error_of<c10::ValueError>([&] { tiled_loss([](const auto& a, auto&, auto&) { return a.sum(2); }, x, y, 2); }),
      "the function must return a scalar");
}

}  // namespace
}  // namespace tessera::parallel
