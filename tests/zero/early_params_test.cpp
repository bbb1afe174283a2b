#include "tessera/zero/early_params.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera::testing {

using zero::EarlyParams;
using zero::Writes;

namespace {

at::Tensor matrix(int rank) {
  return at::arange(85, at::kFloat).view({17, 5}).add(rank).t().clone().t().requires_grad_(true);
}

}  // namespace

TEST(EarlyParams, HoldRankZeroValuesInSlicesAndNameThemselvesWhenRead) {
  run_ranks(3, [](int rank, const comm::GroupPtr& group) {
    EarlyParams early{zero::Ranks(group)};
    const at::Tensor w = matrix(rank);
    const int number = early.add("Linear.weight", w, at::kBFloat16);
    EXPECT_EQ(w.scalar_type(), at::kBFloat16);
    EXPECT_EQ(w.sizes(), (at::IntArrayRef{17, 5}));
    EXPECT_LE(early.bytes(), (85 / 3 + 64) * 2);
    EXPECT_FALSE(early.is_gathered(number));
    EXPECT_HAS(error_of([&] { (void)w.sum(); }), "parameter 'Linear.weight' is partitioned");
    early.gather({number});
    EXPECT_TRUE(w.equal(matrix(0).to(at::kBFloat16)));
    early.release({number}, Writes::None, 0);
    EXPECT_HAS(error_of([&] { (void)w.sum(); }), "Linear.weight");
  });
}

TEST(EarlyParams, TakeOneRanksWritesOrRefuseThem) {
  run_ranks(2, [](int rank, const comm::GroupPtr& group) {
    EarlyParams early{zero::Ranks(group)};
    const at::Tensor w = matrix(0), b = at::zeros({3}).requires_grad_(true);
    const std::vector<int> both{early.add("w", w, at::kFloat), early.add("b", b, at::kFloat)};
    early.gather(both);
    EXPECT_HAS(error_of([&] { early.gather({both[1]}); }), "must not overlap");
    w.detach().fill_(rank + 1);
    early.release(both, Writes::FromRank, 1);
    early.gather(both);
    EXPECT_TRUE(w.equal(at::full({17, 5}, 2.0)));
    b.detach().fill_(4);
    EXPECT_HAS(error_of([&] { early.release(both, Writes::None, 0); }), "in-place modification of parameter 'b'");
    EXPECT_FALSE(early.is_gathered(both[0]));
    early.gather(both);
    EXPECT_TRUE(b.equal(at::zeros({3})));
    early.release(both, Writes::Own, 0);
    EXPECT_HAS(error_of([&] { early.release(both, Writes::FromRank, 2); }), "modifier_rank 2");
  });
}

TEST(EarlyParams, TakeDataThatReplacedTheirs) {
  run_ranks(2, [](int rank, const comm::GroupPtr& group) {
    EarlyParams early{zero::Ranks(group)};
    at::Tensor w = matrix(0);
    const int number = early.add("w", w, at::kBFloat16);
    w.set_data(at::full({17, 5}, 3.0 + rank));
    early.gather({number});
    EXPECT_TRUE(w.equal(at::full({17, 5}, 3.0, at::kBFloat16)));
    early.release({number}, Writes::None, 0);
    EXPECT_HAS(error_of([&] { (void)w.sum(); }), "'w' is partitioned");
    w.set_data(at::full({17, 5}, 5.0 + rank));
    early.restore(number);
    EXPECT_TRUE(w.equal(at::full({17, 5}, 5.0, at::kBFloat16)));
  });
}

TEST(EarlyParams, RestoredTensorsOutliveThem) {
  run_ranks(2, [](int rank, const comm::GroupPtr& group) {
    auto early = std::make_unique<EarlyParams>(zero::Ranks(group));
    const at::Tensor w = matrix(rank), open = matrix(rank);
    const int first = early->add("w", w, at::kFloat), second = early->add("open", open, at::kFloat);
    early->gather({second});
    early->restore(first);
    early->restore(second);
    early->restore(first);
    EXPECT_EQ(early->bytes(), 0);
    early.reset();
    EXPECT_TRUE(w.equal(matrix(0)));
    EXPECT_TRUE(open.equal(matrix(0)));
    EXPECT_TRUE(w.is_leaf() && w.requires_grad());
  });
}

TEST(EarlyParams, ForgetWhatNobodyElseHolds) {
  run_ranks(2, [](int, const comm::GroupPtr& group) {
    EarlyParams early{zero::Ranks(group)};
    at::Tensor w = matrix(0), gone = matrix(0);
    early.add("w", w, at::kFloat);
    early.add("gone", gone, at::kFloat);
    const auto before = early.bytes();
    gone.reset();
    early.prune();
    EXPECT_EQ(early.bytes(), before / 2);
    early.restore(0);
    early.restore(1);
    EXPECT_TRUE(w.equal(matrix(0)));
  });
}

TEST(EarlyParams, OneRankKeepsWholeTensorsInTheDtypeAsked) {
  run_ranks(1, [](int, const comm::GroupPtr& group) {
    EarlyParams early{zero::Ranks(group)};
    const at::Tensor w = matrix(0);
    const int number = early.add("w", w, at::kBFloat16);
    EXPECT_TRUE(w.equal(matrix(0).to(at::kBFloat16)));
    EXPECT_TRUE(early.is_gathered(number));
    early.gather({number});
    w.detach().fill_(3);
    early.release({number}, Writes::FromRank, 0);
    early.restore(number);
    EXPECT_TRUE(w.equal(at::full({17, 5}, 3.0).to(at::kBFloat16)));
  });
}

TEST(EarlyParams, RefuseWhatHasNoValues) {
  run_ranks(1, [](int, const comm::GroupPtr& group) {
    EarlyParams early{zero::Ranks(group)};
    EXPECT_HAS(error_of([&] { early.add("m", at::empty({2}, at::kMeta), at::kFloat); }), "meta device");
    EXPECT_HAS(error_of([&] { early.add("i", at::ones({2}, at::kLong), at::kFloat); }), "floating-point");
  });
}

}  // namespace tessera::testing
