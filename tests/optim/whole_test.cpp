#include "tessera/optim/whole.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/errors.h"

namespace tessera::optim {
namespace {

WholeUpdate update_of(const GroupOptions& group, const at::Tensor& values, const at::Tensor& grad) {
  return {&group, 0, values, grad, 1, {at::zeros_like(values), at::zeros_like(values)}};
}

// The halves of the values lie on two ranks, which run one after the other: what the other one has is known.
class Halves final : public Shards {
 public:
  Halves(at::Tensor others, bool first) : others_(std::move(others)), first_(first) {}
  at::Tensor whole(int, const at::Tensor& part) override {
    return first_ ? at::cat({part, others_}) : at::cat({others_, part});
  }
  at::Tensor mine(int, const at::Tensor& full) override { return full.chunk(2)[first_ ? 0 : 1]; }
  std::vector<double> norms(const std::vector<std::pair<int, at::Tensor>>&) override { return {}; }

 private:
  const at::Tensor others_;
  const bool first_;
};

TEST(Whole, LambByHand) {
  const at::Tensor w = at::tensor({3.0F, 4.0F}), g = at::tensor({1.0F, -1.0F});
  GroupOptions group{.lr = 0.1};
  update_whole(Rule::Lamb, {update_of(group, w, g)}, *whole_parameters());
  const at::Tensor direction = (0.1 * g) / ((0.001 * g * g).sqrt() + 1e-8);
  const double rate = 0.1 * std::sqrt(1 - 0.999) / (1 - 0.9) * 5 / direction.norm().item<double>();
  EXPECT_TRUE(at::allclose(w, at::tensor({3.0F, 4.0F}) - rate * direction));

  // Beyond max_coeff, and of a zero norm.
  group.bias_correction = false;
  const at::Tensor big = at::full({4}, 1e6F), zero = at::zeros({2}), one = at::ones({4});
  update_whole(Rule::Lamb, {update_of(group, big, one), update_of(group, zero, one.narrow(0, 0, 2))},
               *whole_parameters());
  const double moved = 0.1 * 0.1 / (std::sqrt(0.001) + 1e-8);
  EXPECT_NEAR((1e6 - big).max().item<double>(), 10 * moved, 0.1);
  EXPECT_TRUE(at::allclose(zero, at::full({2}, -moved)));
}

TEST(Whole, MuonMovesAlongAnOrthogonalMatrix) {
  for (const auto& [rows, columns] : {std::pair(4, 9), std::pair(9, 4), std::pair(6, 6)}) {
    const at::Tensor g =
        at::eye(rows, columns) + at::arange(rows * columns, at::kFloat).view({rows, columns}).sin() / 10;
    const at::Tensor near = orthogonal(g, 5).to(at::kFloat);
    const at::Tensor values = std::get<1>(at::linalg_svd(near, false));
    EXPECT_LT((values - 1).abs().max().item<double>(), 0.35) << rows;

    GroupOptions group = options_of_type("Muon").defaults;
    group.lr = 0.5;
    const at::Tensor w = at::ones({rows, columns});
    update_whole(Rule::Muon, {update_of(group, w, g)}, *whole_parameters());
    const double rate = 0.5 * std::sqrt(std::max(1.0, static_cast<double>(rows) / columns));
    EXPECT_LT((1 - w - rate * near).abs().max().item<double>(), 0.06) << rows;

    // Halves of it are updated as the whole, where the rows can be halved.
    for (const bool first : {true, false}) {
      if (rows % 2 != 0) continue;
      const at::Tensor part = at::ones({rows / 2, columns}), grad = g.chunk(2)[first ? 0 : 1].clone();
      const at::Tensor others = g.chunk(2)[first ? 1 : 0];
      const at::Tensor buffer = at::zeros_like(others).lerp_(others, 1 - group.momentum);
      Halves shards(others.lerp(buffer, group.momentum), first);
      update_whole(Rule::Muon, {update_of(group, part, grad)}, shards);
      EXPECT_TRUE(at::equal(part, w.chunk(2)[first ? 0 : 1])) << rows;
    }
  }
}

TEST(Whole, OthersThanMatricesAreUpdatedAsByAdam) {
  for (const bool decoupled : {false, true}) {
    GroupOptions group{.lr = 0.1, .weight_decay = 0.3, .decoupled = decoupled, .use_muon = false};
    const at::Tensor w = at::ones({5}), same = at::ones({5}), g = at::linspace(-1, 1, 5);
    const at::Tensor state0 = at::zeros({5}), state1 = at::zeros({5});
    WholeUpdate mine = update_of(group, w, g);
    for (int64_t step = 1; step <= 3; ++step) {
      mine.step = step;
      update_whole(Rule::Muon, {mine}, *whole_parameters());
      UpdateSlice slice;
      slice.master = same, slice.grad = g, slice.state = {state0, state1};
      update(Rule::Adam, group, step, slice, 1);
    }
    EXPECT_TRUE(at::allclose(w, same, 1e-6, 1e-7)) << decoupled;
  }
}

TEST(Whole, NamesOfMatrices) {
  EXPECT_TRUE(is_muon_matrix("blocks.0.up.weight", 2) && is_muon_matrix("conv", 4));
  EXPECT_FALSE(is_muon_matrix("blocks.0.up.bias", 1) || is_muon_matrix("embeddings.word", 2));
  EXPECT_FALSE(is_muon_matrix("lm_head.weight", 2));
  EXPECT_HAS(testing::error_of<c10::ValueError>([] { update_whole(Rule::Adam, {}, *whole_parameters()); }),
             "one of Lamb, Muon and Adafactor");
}

}  // namespace
}  // namespace tessera::optim
