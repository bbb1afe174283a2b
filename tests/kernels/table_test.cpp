// Every table gives the bits of the reference: all types, tails, odd addresses, in place, inf, NaN
// and denormals.
#include "tessera/kernels/table.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "tessera/kernels/elementwise.h"
#include "tessera/kernels/split.h"
#include "tests/kernels/forms.h"
#include "tests/kernels/kernel_data.h"

namespace tessera::kernels {
namespace {

using testing::Buffer;
using testing::Form;
using testing::forms;
using testing::kDTypes;
using testing::sizes;

struct Case {
  const char* name;
  std::function<void(const Table&, const UpdateRange&, float)> run;
};

std::vector<Case> cases() {
  const AdamRule adamw{1e-3, 0.9, 0.999, 1e-8, 0.1, true, 1 - 0.9, std::sqrt(1 - 0.999)};
  const AdamRule l2{1e-3, 0.9, 0.95, 1e-6, 0.1, false, 1, 1};
  const AdamRule far{1e-3, 0.3, 0.95, 1e-6, 0, false, 1, 1};  // beta1 < 0.5: lerp from the other end
  const AdamRule far_l2{1e-3, 0.3, 0.95, 1e-6, 0.1, false, 1, 1};
  const AdamRule plain{1e-3, 0.9, 0.999, 0, 0, false, 0.5, 0.25};
  const auto adam = [](const AdamRule& rule) {
    return [rule](const Table& t, const UpdateRange& r, float s) { t.adam(rule, r, s); };
  };
  const auto sgd = [](const SgdRule& rule) {
    return [rule](const Table& t, const UpdateRange& r, float s) { t.sgd(rule, r, s); };
  };
  const LionRule lion{1e-4, 0.9, 0.99, 0.1};
  const auto adagrad = [](const AdagradRule& rule) {
    return [rule](const Table& t, const UpdateRange& r, float s) { t.adagrad(rule, r, s); };
  };
  return {{"adamw", adam(adamw)},
          {"adam with l2", adam(l2)},
          {"adam from afar", adam(far)},
          {"adam from afar with l2", adam(far_l2)},
          {"adam", adam(plain)},
          {"sgd", sgd({0.1, 0, 0, 0})},
          {"sgd with decay", sgd({0.1, 0, 0, 0.01})},
          {"momentum", sgd({0.1, 0.9, 0.1, 0})},
          {"momentum with decay", sgd({0.1, 0.9, 0.1, 0.01})},
          {"momentum, first step", sgd({0.1, 0.9, 0.1, 0, false, true})},
          {"nesterov", sgd({0.1, 0.9, 0, 0, true, false})},
          {"nesterov with decay, first step", sgd({0.1, 0.9, 0, 0.01, true, true})},
          {"lion", [=](const Table& t, const UpdateRange& r, float s) { t.lion(lion, r, s); }},
          {"adagrad", adagrad({1e-2, 1e-10, 0})},
          {"adagrad with decay", adagrad({1e-2, 1e-10, 0.01})}};
}

struct UpdateBuffers {
  Form form;
  Buffer master, residual, weight, state0, state1, grad;
  DType grad_dtype;

  UpdateBuffers(const Form& form, DType grad_dtype, int64_t n, int offset, bool hard)
      : form(form),
        master(DType::F32, n, offset),
        residual(DType::BF16, n, 3 * offset),
        weight(form.master.weight_dtype, n, offset),
        state0(form.state_dtype, n, 3 * offset),
        state1(form.state_dtype, n, 5 * offset),
        grad(grad_dtype, n, 7 * offset),
        grad_dtype(grad_dtype) {
    master.fill_random(1);
    state0.fill_random(2, true);
    state1.fill_random(3, true);
    grad.fill_random(4);
    weight.fill_random(5);
    if (hard) {
      master.sprinkle(6);
      state0.sprinkle(7);
      state1.sprinkle(8);
      grad.sprinkle(9);
      weight.sprinkle(10);
    }
    if (form.master.residual) reference_table().split(weight.data(), residual.data(), master.floats(), n);
    // Every third weight, and hard ones, were written to.
    for (int64_t i = 0; form.master.adopts && i < n; ++i)
      if (i % 3 != 0) testing::put(weight.data(), form.master.weight_dtype, i, master.at(i));
  }
  UpdateRange range(int64_t n) {
    UpdateRange r;
    r.n = n;
    if (form.master.master) r.master = master.floats();
    if (form.master.residual) r.residual = residual.data();
    if (form.master.weight) r.weight = weight.data();
    r.weight_dtype = form.master.weight_dtype;
    r.adopts = form.master.adopts;
    r.grad = grad.data();
    r.grad_dtype = grad_dtype;
    r.state0 = state0.data();
    r.state1 = state1.data();
    r.state_dtype = form.state_dtype;
    r.rounding = form.rounding;
    // All places in a random word, and elements on both sides of index 2^34, where the index of a word has more than 32 bits.
    r.random = {11, 3,
                n % 3 == 0 ? (uint64_t{1} << 34) - static_cast<uint64_t>(n / 2) : 76 + static_cast<uint64_t>(n % 4)};
    return r;
  }
  void expect_same(const UpdateBuffers& expected) const {
    master.expect_same(expected.master);
    residual.expect_same(expected.residual, true);
    weight.expect_same(expected.weight);
    state0.expect_same(expected.state0);
    state1.expect_same(expected.state1);
    grad.expect_same(expected.grad, true);
  }
};

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
  for (const Case& rule : cases()) {
    for (const Form& form : forms()) {
      for (int64_t n : sizes()) {
        const DType grad = kDTypes[n / 2 % 3];
        const int offset = n % 3 == 0 ? 0 : static_cast<int>(n % 4);
        const float scale = n % 2 == 0 ? 1.0f : -0.37f;
        const UpdateBuffers before(form, grad, n, offset, n % 2 == 0);
        UpdateBuffers expected = before;
        rule.run(reference_table(), expected.range(n), scale);
        for (const Table* table : available_tables()) {
          if (table == &reference_table()) continue;
          SCOPED_TRACE(std::string(table->name) + ", " + rule.name + ", " + form.name() + ", n " + std::to_string(n));
          UpdateBuffers actual = before;
          rule.run(*table, actual.range(n), scale);
          actual.expect_same(expected);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// The vector versions divide by a constant without dividing, where it is an ordinary one.
TEST(Table, AdamGivesTheBitsOfTheReferenceForEveryBiasCorrection) {
  constexpr int64_t n = 4096;
  const Form form{testing::kMasterForms[0], DType::F32, Rounding::Nearest};
  const UpdateBuffers before(form, DType::F32, n, 0, true);
  std::vector<double> corrections = {0, 1e-30, 1e-7, 0x1p-20, 1 - 0x1p-24, 1, 0x1p20, 3e6, 1e30};
  for (const double beta2 : {0.9, 0.95, 0.999, 0.99999}) {
    for (int step = 1; step <= 60; ++step)
      corrections.push_back(std::sqrt(1 - std::pow(beta2, step)));
  }
  for (const double correction : corrections) {
    SCOPED_TRACE(correction);
    const AdamRule rule{1e-3, 0.9, 0.999, 1e-8, 0.1, true, 0.5, correction};
    UpdateBuffers expected = before;
    reference_table().adam(rule, expected.range(n), 1.0f);
    for (const Table* table : available_tables()) {
      UpdateBuffers actual = before;
      table->adam(rule, actual.range(n), 1.0f);
      actual.expect_same(expected);
      if (HasFailure()) return;
    }
  }
}

TEST(Table, BitsDoNotDependOnHowARangeIsCut) {
  constexpr int64_t n = 301;
  for (const Table* table : available_tables()) {
    for (const Case& rule : cases()) {
      for (const Form& form : forms()) {
        SCOPED_TRACE(std::string(table->name) + ", " + rule.name + ", " + form.name());
        UpdateBuffers whole(form, DType::BF16, n, 2, true), cut = whole;
        UpdateRange range = whole.range(n);
        range.random.first = (uint64_t{1} << 34) - 150;
        rule.run(*table, range, 0.5f);
        range = cut.range(n);
        range.random.first = (uint64_t{1} << 34) - 150;
        for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 97}, {97, 98}, {98, 230}, {230, n}})
          rule.run(*table, part(range, begin, end), 0.5f);
        cut.expect_same(whole);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(Table, StochasticElementwiseGivesTheBitsOfTheReference) {
  for (const Table* table : available_tables()) {
    for (DType to : kDTypes) {
      for (DType from : kDTypes) {
        for (int64_t n : sizes()) {
          SCOPED_TRACE(std::string(table->name) + ", n " + std::to_string(n));
          const RandomKey random{5, 8, n % 2 == 0 ? 3 : (uint64_t{1} << 34) - static_cast<uint64_t>(n / 2)};
          const int offset = static_cast<int>(n % 4);
          Buffer src(from, n, offset), expected(to, n, 3 * offset);
          src.fill_random(1).sprinkle(2);
          expected.fill_random(3).sprinkle(4);
          Buffer actual = expected;
          for (float scale : {1.0f, 0.3f}) {
            reference_table().scaled_add_stochastic(expected.data(), to, src.data(), from, scale, n, random);
            table->scaled_add_stochastic(actual.data(), to, src.data(), from, scale, n, random);
            actual.expect_same(expected);
            reference_table().scaled_copy_stochastic(expected.data(), to, src.data(), from, scale, n, random);
            table->scaled_copy_stochastic(actual.data(), to, src.data(), from, scale, n, random);
            actual.expect_same(expected);
          }
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(Table, SplitAndJoinGiveTheBitsOfTheReference) {
  for (const Table* table : available_tables()) {
    for (int64_t n : sizes()) {
      SCOPED_TRACE(std::string(table->name) + ", n " + std::to_string(n));
      const int offset = static_cast<int>(n % 4);
      Buffer whole(DType::F32, n, offset), weight(DType::BF16, n, 3 * offset), residual(DType::BF16, n, offset);
      whole.fill_random(1).sprinkle(2);
      Buffer weight2 = weight, residual2 = residual, joined = whole, joined2 = whole;
      reference_table().split(weight.data(), residual.data(), whole.floats(), n);
      table->split(weight2.data(), residual2.data(), whole.floats(), n);
      weight2.expect_same(weight, true);
      residual2.expect_same(residual, true);
      reference_table().join(joined.floats(), weight.data(), residual.data(), n);
      table->join(joined2.floats(), weight.data(), residual.data(), n);
      joined2.expect_same(joined, true);
      joined2.expect_same(whole);
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
  const RandomKey random{1, 2, 3};
  Buffer halves(DType::BF16, n), expected_halves(DType::BF16, n);
  best_table().scaled_copy_stochastic(expected_halves.data(), DType::BF16, actual.data(), DType::F32, 0.1f, n, random);
  scaled_copy_stochastic(halves.data(), DType::BF16, actual.data(), DType::F32, 0.1f, n, random);
  halves.expect_same(expected_halves);
  best_table().scaled_add_stochastic(expected_halves.data(), DType::BF16, actual.data(), DType::F32, 0.1f, n, random);
  scaled_add_stochastic(halves.data(), DType::BF16, actual.data(), DType::F32, 0.1f, n, random);
  halves.expect_same(expected_halves);
  Buffer residual(DType::BF16, n);
  split(halves.data(), residual.data(), actual.floats(), n);
  join(expected.floats(), halves.data(), residual.data(), n);
  expected.expect_same(actual);
  EXPECT_EQ(sum_of_squares(src.data(), DType::BF16, n), best_table().sum_of_squares(src.data(), DType::BF16, n));

  const auto check = [&](auto rule, auto entry) {
    const Form form{testing::kMasterForms[3], DType::BF16, Rounding::Stochastic};
    const UpdateBuffers before(form, DType::BF16, n, 0, false);
    UpdateBuffers a = before, b = before;
    update(rule, a.range(n), 0.5f);
    (best_table().*entry)(rule, b.range(n), 0.5f);
    a.expect_same(b);
    EXPECT_NE(a.residual.at(0), before.residual.at(0));
  };
  check(AdamRule{1e-3, 0.9, 0.999, 1e-8, 0.1}, &Table::adam);
  check(SgdRule{0.1, 0.9, 0, 0}, &Table::sgd);
  check(LionRule{1e-2, 0.9, 0.99, 0.1}, &Table::lion);
  check(AdagradRule{1e-2, 1e-10, 0}, &Table::adagrad);
}

}  // namespace
}  // namespace tessera::kernels
