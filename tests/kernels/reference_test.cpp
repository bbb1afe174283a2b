// The reference against LibTorch: conversions over all inputs that matter, and each rule against
// the operators that torch.optim's single-tensor implementation runs.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/kernels/table.h"
#include "tests/kernels/kernel_data.h"
#include "tests/support/vector_kernels.h"

namespace tessera::kernels {
namespace {

using testing::Buffer;

constexpr int64_t kCount = 10007;

// torch fuses a product with a sum in its wide versions only, and its square root may be one unit
// off; a few roundings of the largest operand cover both.
void expect_close(const at::Tensor& actual, const at::Tensor& expected, const at::Tensor& operands, const char* what) {
  const auto allowed = 4 * 0x1p-24 * at::maximum(expected.abs(), operands.abs());
  const auto off = (actual - expected).abs() - allowed;
  EXPECT_LE(off.max().item<float>(), 0.0f) << what;
}

TEST(Reference, WidensEveryHalf) {
  std::vector<int16_t> bits(65536);
  for (int i = 0; i < 65536; ++i)
    bits[i] = static_cast<int16_t>(i);
  const auto all = at::from_blob(bits.data(), {65536}, at::kShort);
  for (const auto& [dtype, scalar] : {std::pair{DType::BF16, at::kBFloat16}, {DType::F16, at::kHalf}}) {
    const auto halves = all.view(scalar);
    auto actual = at::empty({65536});
    for (const Table* table : available_tables()) {
      table->scaled_copy(actual.data_ptr(), DType::F32, halves.data_ptr(), dtype, 1.0f, 65536);
      EXPECT_TRUE(at::allclose(actual, halves.to(at::kFloat), 0, 0, true)) << table->name;
    }
  }
}

TEST(Reference, NarrowsLikeTorch) {
  // Around every 16-bit value: exact, half-way and one unit beside both, with both signs, over the
  // whole range.
  std::vector<int32_t> bits;
  for (uint32_t base = 0; base <= 0x80000000u - 0x800u; base += 0x800u) {
    for (uint32_t delta : {0u, 1u, 0x7ffu, 0x3ffu}) {
      bits.push_back(static_cast<int32_t>(base + delta));
      bits.push_back(static_cast<int32_t>((base + delta) | 0x80000000u));
    }
  }
  const auto n = static_cast<int64_t>(bits.size());
  const auto all = at::from_blob(bits.data(), {n}, at::kInt).view(at::kFloat);
  for (const auto& [dtype, scalar] : {std::pair{DType::BF16, at::kBFloat16}, {DType::F16, at::kHalf}}) {
    const auto expected = all.to(scalar);
    for (const Table* table : available_tables()) {
      auto actual = at::empty({n}, scalar);
      table->scaled_copy(actual.data_ptr(), dtype, all.data_ptr(), DType::F32, 1.0f, n);
      const auto same = actual.view(at::kShort) == expected.view(at::kShort);
      EXPECT_TRUE(same.logical_or(all.isnan()).all().item<bool>()) << table->name;
      EXPECT_TRUE(actual.isnan().eq(all.isnan()).all().item<bool>()) << table->name;
    }
  }
}

struct Tensors {
  at::Tensor w = at::randn({kCount}), g = at::randn({kCount}) * 0.01, m = at::randn({kCount}) * 0.01,
             v = at::randn({kCount}).square() * 1e-4;
  Tensors() { tessera::testing::choose_vector_kernels(); }
  Tensors(const Tensors& o) : w(o.w.clone()), g(o.g.clone()), m(o.m.clone()), v(o.v.clone()) {}

  UpdateRange range() {
    UpdateRange r;
    r.n = kCount;
    r.master = w.data_ptr<float>();
    r.grad = g.data_ptr();
    r.state0 = m.data_ptr<float>();
    r.state1 = v.data_ptr<float>();
    return r;
  }
  void expect_close_to(const Tensors& expected, const Tensors& before) const {
    expect_close(w, expected.w, before.w, "weights");
    expect_close(m, expected.m, at::maximum(before.m.abs(), 0.02 * before.w.abs() + before.g.abs()), "state 0");
    expect_close(v, expected.v, before.v, "state 1");
  }
};

TEST(Reference, AdamIsTorchs) {
  at::manual_seed(1);
  for (bool decoupled : {true, false}) {
    for (double beta1 : {0.9, 0.3}) {
      for (double weight_decay : {0.0, 0.02}) {
        AdamRule rule{1e-3, beta1, 0.999, 1e-8, weight_decay, decoupled};
        rule.bias1 = 1 - std::pow(beta1, 3);
        rule.sqrt_bias2 = std::sqrt(1 - std::pow(0.999, 3));
        const Tensors before;
        Tensors actual(before), expected(before);
        reference_table().adam(rule, actual.range(), 1.0f);
        auto g = expected.g;
        if (weight_decay != 0 && decoupled) expected.w.mul_(1 - rule.lr * weight_decay);
        if (weight_decay != 0 && !decoupled) g = g.add(expected.w, weight_decay);
        expected.m.lerp_(g, 1 - beta1);
        expected.v.mul_(rule.beta2).addcmul_(g, g, 1 - rule.beta2);
        const auto denominator = (expected.v.sqrt() / rule.sqrt_bias2).add_(rule.eps);
        expected.w.addcdiv_(expected.m, denominator, -(rule.lr / rule.bias1));
        actual.expect_close_to(expected, before);
      }
    }
  }
}

TEST(Reference, SgdIsTorchs) {
  at::manual_seed(2);
  for (bool first : {true, false}) {
    for (bool nesterov : {true, false}) {
      for (double momentum : {0.0, 0.9}) {
        const SgdRule rule{0.1, momentum, nesterov ? 0 : 0.1, 0.02, nesterov, first};
        const Tensors before;
        Tensors actual(before), expected(before);
        reference_table().sgd(rule, actual.range(), 1.0f);
        auto g = expected.g.add(expected.w, rule.weight_decay);
        if (momentum != 0) {
          if (first) {
            expected.m.copy_(g);
          } else {
            expected.m.mul_(momentum).add_(g, 1 - rule.dampening);
          }
          g = nesterov ? g.add(expected.m, momentum) : expected.m;
        }
        expected.w.add_(g, -rule.lr);
        actual.expect_close_to(expected, before);
      }
    }
  }
}

TEST(Reference, LionIsThePapers) {
  at::manual_seed(3);
  const LionRule rule{1e-3, 0.9, 0.99, 0.1};
  const Tensors before;
  Tensors actual(before), expected(before);
  reference_table().lion(rule, actual.range(), 1.0f);
  const auto blend = expected.m.mul(rule.beta1).add_(expected.g, 1 - rule.beta1);
  expected.w.mul_(1 - rule.lr * rule.weight_decay).add_(blend.sign(), -rule.lr);
  expected.m.mul_(rule.beta2).add_(expected.g, 1 - rule.beta2);
  actual.expect_close_to(expected, before);
}

TEST(Reference, LionStaysWhereTheSignIsZero) {
  Tensors t;
  t.g.zero_();
  t.m.zero_();
  const auto before = t.w.clone();
  reference_table().lion({1e-3, 0.9, 0.99, 0}, t.range(), 1.0f);
  EXPECT_TRUE(at::equal(t.w, before));
}

TEST(Reference, AdagradIsTorchs) {
  at::manual_seed(4);
  const AdagradRule rule{1e-2, 1e-10, 0.02};
  const Tensors before;
  Tensors actual(before), expected(before);
  actual.m.abs_();
  expected.m.abs_();
  reference_table().adagrad(rule, actual.range(), 1.0f);
  const auto g = expected.g.add(expected.w, rule.weight_decay);
  expected.m.addcmul_(g, g, 1);
  expected.w.addcdiv_(g, expected.m.sqrt().add_(rule.eps), -rule.clr);
  actual.expect_close_to(expected, before);
}

TEST(Reference, ScaleActsOnTheGradientFirst) {
  Tensors scaled, plain(scaled);
  plain.g.mul_(-0.25);
  const AdamRule rule{1e-3, 0.9, 0.999, 1e-8, 0.1};
  reference_table().adam(rule, scaled.range(), -0.25f);
  reference_table().adam(rule, plain.range(), 1.0f);
  EXPECT_TRUE(at::equal(scaled.w, plain.w));
  EXPECT_TRUE(at::equal(scaled.v, plain.v));
}

TEST(Reference, WeightsAreTheRoundedMaster) {
  for (const auto& [dtype, scalar] : {std::pair{DType::BF16, at::kBFloat16}, {DType::F16, at::kHalf}}) {
    Tensors t;
    auto weight = at::zeros({kCount}, scalar);
    auto range = t.range();
    range.weight = weight.data_ptr();
    range.weight_dtype = dtype;
    reference_table().sgd({0.1, 0, 0, 0}, range, 1.0f);
    EXPECT_TRUE(at::equal(weight, t.w.to(scalar)));
  }
}

TEST(Reference, WeightsThatWereWrittenToAreTheMaster) {
  for (const Table* table : available_tables()) {
    for (const DType dtype : {DType::BF16, DType::F16}) {
      Buffer master(DType::F32, kCount), weight(dtype, kCount), grad(DType::F32, kCount);
      master.fill_random(1).sprinkle(2);
      grad.fill({0});
      const Buffer before = master;
      std::vector<float> expected(kCount);
      for (int64_t i = 0; i < kCount; ++i) {
        testing::put(weight.data(), dtype, i, i % 5 == 0 ? 0.25f : master.at(i));
        Buffer rounded(dtype, 1);
        testing::put(rounded.data(), dtype, 0, before.at(i));
        expected[i] = rounded.at(0) == weight.at(i) ? before.at(i) : weight.at(i);
      }
      UpdateRange range;
      range.n = kCount;
      range.master = master.floats();
      range.weight = weight.data();
      range.weight_dtype = dtype;
      range.adopts = true;
      range.grad = grad.data();
      table->sgd({0.0, 0, 0, 0}, range, 1.0f);
      for (int64_t i = 0; i < kCount; ++i)
        EXPECT_TRUE(master.at(i) == expected[i] || (std::isnan(master.at(i)) && std::isnan(expected[i])))
            << table->name << " " << i << ": " << master.at(i) << " is not " << expected[i];
    }
  }
}

TEST(Reference, ElementwiseIsTorchs) {
  at::manual_seed(5);
  const auto x = at::randn({kCount}), y = at::randn({kCount});
  auto out = at::empty({kCount}, at::kBFloat16);
  reference_table().scaled_copy(out.data_ptr(), DType::BF16, x.data_ptr(), DType::F32, 0.3f, kCount);
  EXPECT_TRUE(at::equal(out, (x * 0.3f).to(at::kBFloat16)));
  auto sum = y.clone();
  reference_table().scaled_add(sum.data_ptr(), DType::F32, x.data_ptr(), DType::F32, 0.3f, kCount);
  expect_close(sum, y.add(x, 0.3f), at::maximum(x.abs(), y.abs()), "scaled_add");
  const double squares = reference_table().sum_of_squares(x.data_ptr(), DType::F32, kCount);
  EXPECT_NEAR(squares, x.to(at::kDouble).square().sum().item<double>(), 1e-12 * squares);
}

TEST(Reference, CopyOfOneTypeKeepsNanPayloads) {
  std::vector<uint32_t> src{0x7f800001u, 0xffc12345u, 0x7fffffffu}, dst(3);
  for (const Table* table : available_tables()) {
    table->scaled_copy(dst.data(), DType::F32, src.data(), DType::F32, 1.0f, 3);
    EXPECT_EQ(dst, src) << table->name;
  }
}

}  // namespace
}  // namespace tessera::kernels
