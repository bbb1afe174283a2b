#include "tessera/optim/norm.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace tessera::optim {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(Norm, SumOfSquaresIsThatOfDoubles) {
  at::manual_seed(1);
  for (int64_t n : {0, 1, 17, 65535, 65536, 65537, 1000003}) {
    const auto x = at::randn({n});
    for (auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      const auto y = x.to(dtype);
      const double expected = y.to(at::kDouble).square().sum().item<double>();
      EXPECT_NEAR(sum_of_squares(y), expected, 1e-12 * expected) << n;
    }
  }
}

TEST(Norm, SameBitsForEveryThreadCount) {
  at::manual_seed(2);
  const auto x = at::randn({1000003}).mul_(1e-3);
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const double expected = sum_of_squares(x);
  for (int threads : {2, 3, 7}) {
    at::set_num_threads(threads);
    EXPECT_EQ(sum_of_squares(x), expected) << threads;
  }
  at::set_num_threads(before);
}

TEST(Norm, NotFiniteWhenAnElementIsNot) {
  for (int64_t at : {0, 70000, 199999}) {
    for (double bad : {kInf, -kInf, std::nan("")}) {
      auto x = at::ones({200000});
      x[at] = bad;
      EXPECT_FALSE(std::isfinite(sum_of_squares(x)));
    }
  }
  // The squares of large finite values do not overflow.
  EXPECT_TRUE(std::isfinite(sum_of_squares(at::full({100000}, 3e38f))));
}

TEST(Norm, PiecesHaveTheBitsOfOneRow) {
  at::manual_seed(3);
  constexpr int64_t kSize = 300000;
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    at::Tensor row = at::zeros({kSize}, dtype);
    std::vector<Piece> pieces;
    for (const auto& [begin, size] : std::vector<std::pair<int64_t, int64_t>>{
             {32, 65504}, {65536, 1}, {65568, 5000}, {131072, 65536}, {196608, 0}, {200000, 99999}}) {
      const at::Tensor values = at::randn({size}).to(dtype);
      row.narrow(0, begin, size).copy_(values);
      pieces.push_back({begin, values});
    }
    EXPECT_EQ(squares_there(kSize, pieces, row.options()).item<double>(), sum_of_squares(row));
    EXPECT_EQ(squares_there(kSize, {}, row.options()).item<double>(), 0);
  }
}

TEST(Norm, RefusesWhatItCannotRead) {
  EXPECT_THROW(sum_of_squares(at::ones({4, 4}).t().slice(0, 0, 2)), c10::ValueError);
  EXPECT_THROW(sum_of_squares(at::ones({4}, at::kDouble)), c10::NotImplementedError);
  EXPECT_THROW(sum_of_squares(at::Tensor()), c10::ValueError);
}

TEST(Norm, ClipCoefficientIsTorchs) {
  EXPECT_EQ(clip_coefficient(5, 0), 1);
  EXPECT_EQ(clip_coefficient(0.5, 1), 1);
  EXPECT_EQ(clip_coefficient(4, 1), 1 / (4 + 1e-6));
  EXPECT_LT(clip_coefficient(1, 1), 1);
  EXPECT_EQ(clip_coefficient(kInf, 1), 0);
  EXPECT_TRUE(std::isnan(clip_coefficient(std::nan(""), 1)));
  EXPECT_THROW(clip_coefficient(1, -1), c10::ValueError);
}

}  // namespace
}  // namespace tessera::optim
