// Every table gives the bits of the reference: all types, tails, odd addresses, in place, inf, NaN
// and denormals.
#include "tessera/kernels/table.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "tessera/kernels/elementwise.h"
#include "tests/kernels/kernel_data.h"

namespace tessera::kernels {
namespace {

using testing::Buffer;
using testing::kDTypes;
using testing::sizes;

struct Case {
  const char* name;
  std::function<void(const Table&, const UpdateRange&, float)> run;
};

std::vector<Case> cases() {
  const AdamRule adamw{1e-3, 0.9, 0.999, 1e-8, 0.1, true, 1 - 0.9, std::sqrt(1 - 0.999)};
  const AdamRule l2{1e-3, 0.3, 0.95, 1e-6, 0.1, false, 1, 1};  // beta1 < 0.5: lerp from the other end
  const AdamRule plain{1e-3, 0.9, 0.999, 0, 0, false, 0.5, 0.25};
  const auto adam = [](const AdamRule& rule) {
    return [rule](const Table& t, const UpdateRange& r, float s) { t.adam(rule, r, s); };
  };
  const auto sgd = [](const SgdRule& rule) {
    return [rule](const Table& t, const UpdateRange& r, float s) { t.sgd(rule, r, s); };
  };
  const LionRule lion{1e-4, 0.9, 0.99, 0.1};
  const AdagradRule adagrad{1e-2, 1e-10, 0.01};
  return {{"adamw", adam(adamw)},
          {"adam with l2", adam(l2)},
          {"adam", adam(plain)},
          {"sgd", sgd({0.1, 0, 0, 0})},
          {"sgd with decay", sgd({0.1, 0, 0, 0.01})},
          {"momentum", sgd({0.1, 0.9, 0.1, 0.01})},
          {"momentum, first step", sgd({0.1, 0.9, 0.1, 0, false, true})},
          {"nesterov", sgd({0.1, 0.9, 0, 0, true, false})},
          {"lion", [=](const Table& t, const UpdateRange& r, float s) { t.lion(lion, r, s); }},
          {"adagrad", [=](const Table& t, const UpdateRange& r, float s) { t.adagrad(adagrad, r, s); }}};
}

struct UpdateBuffers {
  Buffer master, state0, state1, grad, weight;
  DType grad_dtype;

  UpdateBuffers(DType grad_dtype, DType weight_dtype, int64_t n, int offset, bool hard)
      : master(DType::F32, n, offset),
        state0(DType::F32, n, 3 * offset),
        state1(DType::F32, n, 5 * offset),
        grad(grad_dtype, n, 7 * offset),
        weight(weight_dtype, n, offset),
        grad_dtype(grad_dtype) {
    master.fill_random(1);
    state0.fill_random(2, true);
    state1.fill_random(3, true);
    grad.fill_random(4);
    weight.fill_random(5);
    if (!hard) return;
    master.sprinkle(6);
    state0.sprinkle(7);
    state1.sprinkle(8);
    grad.sprinkle(9);
  }
  UpdateRange range(int64_t n, bool with_weight, DType weight_dtype) {
    UpdateRange r;
    r.n = n;
    r.master = master.floats();
    r.weight = with_weight ? weight.data() : nullptr;
    r.weight_dtype = weight_dtype;
    r.grad = grad.data();
    r.grad_dtype = grad_dtype;
    r.state0 = state0.data();
    r.state1 = state1.data();
    return r;
  }
};

// No weights, or weights of a type.
struct Weights {
  bool present;
  DType dtype;
};
constexpr Weights kWeights[] = {{false, DType::BF16}, {true, DType::BF16}, {true, DType::F16}};

TEST(Table, ReferenceFirstBestLast) {
  EXPECT_EQ(available_tables().front(), &reference_table());
  EXPECT_EQ(available_tables().back(), &best_table());
  EXPECT_STREQ(reference_table().name, "reference");
  for (const char* name : {"avx2", "avx512"}) {
    bool found = false;
    for (const Table* table : available_tables())
      found |= std::string(table->name) == name;
    if (!found) std::printf("not run here: %s\n", name);
  }
}

TEST(Table, UpdatesGiveTheBitsOfTheReference) {
  for (const Table* table : available_tables()) {
    for (const Case& rule : cases()) {
      for (DType grad : kDTypes) {
        for (const Weights& weights : kWeights) {
          for (int64_t n : sizes()) {
            const int offset = n % 3 == 0 ? 0 : static_cast<int>(n % 4);
            const float scale = n % 2 == 0 ? 1.0f : -0.37f;
            UpdateBuffers expected(grad, weights.dtype, n, offset, n % 2 == 0);
            UpdateBuffers actual = expected;
            rule.run(reference_table(), expected.range(n, weights.present, weights.dtype), scale);
            rule.run(*table, actual.range(n, weights.present, weights.dtype), scale);
            SCOPED_TRACE(std::string(table->name) + ", " + rule.name + ", n " + std::to_string(n));
            actual.master.expect_same(expected.master);
            actual.state0.expect_same(expected.state0);
            actual.state1.expect_same(expected.state1);
            actual.weight.expect_same(expected.weight);
            actual.grad.expect_same(expected.grad, true);
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

TEST(Table, ElementwiseGivesTheBitsOfTheReference) {
  for (const Table* table : available_tables()) {
    for (DType to : kDTypes) {
      for (DType from : kDTypes) {
        for (int64_t n : sizes()) {
          for (float scale : {1.0f, 0.3f, std::numeric_limits<float>::infinity()}) {
            SCOPED_TRACE(std::string(table->name) + ", n " + std::to_string(n));
            const int offset = static_cast<int>(n % 4);
            Buffer src(from, n, offset), expected(to, n, 3 * offset);
            src.fill_random(1).sprinkle(2);
            expected.fill_random(3).sprinkle(4);
            Buffer actual = expected;
            reference_table().scaled_add(expected.data(), to, src.data(), from, scale, n);
            table->scaled_add(actual.data(), to, src.data(), from, scale, n);
            actual.expect_same(expected);
            reference_table().scaled_copy(expected.data(), to, src.data(), from, scale, n);
            table->scaled_copy(actual.data(), to, src.data(), from, scale, n);
            actual.expect_same(expected, to == from && scale == 1.0f);
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

TEST(Table, InPlace) {
  for (const Table* table : available_tables()) {
    for (DType dtype : kDTypes) {
      for (int64_t n : sizes()) {
        SCOPED_TRACE(std::string(table->name) + ", n " + std::to_string(n));
        Buffer expected(dtype, n, 2), source(dtype, n, 2);
        source.fill_random(1).sprinkle(2);
        Buffer actual = source;
        for (float scale : {1.0f, 0.7f}) {
          reference_table().scaled_copy(expected.data(), dtype, source.data(), dtype, scale, n);
          table->scaled_copy(actual.data(), dtype, actual.data(), dtype, scale, n);
          actual.expect_same(expected);
          source = expected;
        }
        reference_table().scaled_add(expected.data(), dtype, source.data(), dtype, 0.5f, n);
        table->scaled_add(actual.data(), dtype, actual.data(), dtype, 0.5f, n);
        actual.expect_same(expected);
      }
    }
  }
}

TEST(Table, SumOfSquaresGivesTheBitsOfTheReference) {
  for (const Table* table : available_tables()) {
    for (DType dtype : kDTypes) {
      for (int64_t n : sizes()) {
        for (int offset = 0; offset < 4; ++offset) {
          Buffer src(dtype, n, offset);
          src.fill_random(static_cast<unsigned>(n));
          const double expected = reference_table().sum_of_squares(src.data(), dtype, n);
          EXPECT_EQ(table->sum_of_squares(src.data(), dtype, n), expected) << table->name << n;
          if (n == 0) continue;
          for (float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
            Buffer broken = src;
            testing::put(broken.data(), dtype, n - 1, bad);
            EXPECT_FALSE(std::isfinite(table->sum_of_squares(broken.data(), dtype, n)));
          }
        }
      }
    }
  }
}

TEST(Table, FreeFunctionsRunTheBestTable) {
  constexpr int64_t n = 37;
  Buffer src(DType::BF16, n), expected(DType::F32, n), actual(DType::F32, n);
  src.fill_random(1);
  best_table().scaled_copy(expected.data(), DType::F32, src.data(), DType::BF16, 0.1f, n);
  scaled_copy(actual.data(), DType::F32, src.data(), DType::BF16, 0.1f, n);
  actual.expect_same(expected);
  best_table().scaled_add(expected.data(), DType::F32, src.data(), DType::BF16, 0.1f, n);
  scaled_add(actual.data(), DType::F32, src.data(), DType::BF16, 0.1f, n);
  actual.expect_same(expected);
  EXPECT_EQ(sum_of_squares(src.data(), DType::BF16, n), best_table().sum_of_squares(src.data(), DType::BF16, n));

  const auto check = [&](auto rule, auto entry) {
    UpdateBuffers a(DType::BF16, DType::BF16, n, 0, false), b = a;
    update(rule, a.range(n, true, DType::BF16), 0.5f);
    (best_table().*entry)(rule, b.range(n, true, DType::BF16), 0.5f);
    a.master.expect_same(b.master);
    a.weight.expect_same(b.weight);
    a.state0.expect_same(b.state0);
    UpdateBuffers untouched(DType::BF16, DType::BF16, n, 0, false);
    EXPECT_NE(a.master.at(0), untouched.master.at(0));
  };
  check(AdamRule{1e-3, 0.9, 0.999, 1e-8, 0.1}, &Table::adam);
  check(SgdRule{0.1, 0.9, 0, 0}, &Table::sgd);
  check(LionRule{1e-2, 0.9, 0.99, 0.1}, &Table::lion);
  check(AdagradRule{1e-2, 1e-10, 0}, &Table::adagrad);
}

}  // namespace
}  // namespace tessera::kernels
