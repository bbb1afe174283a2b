#include "tessera/zero/flat_params.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera::testing {

using zero::FlatParams;
using zero::ParamState;

namespace {

std::vector<FlatParams::Item> two_items() {
  return {{"w", at::arange(85, at::kFloat).view({17, 5}).t().clone().t().requires_grad_(true), {}},
          {"b", at::full({3}, 7.0).requires_grad_(true), {}}};
}

}  // namespace

TEST(FlatParams, AReleasedParameterKeepsItsShapeAndNamesItselfWhenRead) {
  run_ranks(2, [](int rank, const comm::GroupPtr& group) {
    FlatParams flat("u", two_items(), at::kFloat, rank, group->size(), true);
    const at::Tensor w = flat.items()[0].tensor;
    EXPECT_EQ(flat.state(), ParamState::Sharded);
    EXPECT_EQ(w.sizes(), (at::IntArrayRef{17, 5}));
    EXPECT_EQ(w.storage().nbytes(), 85U * 4);
    EXPECT_TRUE(w.is_leaf() && w.requires_grad());
    for (const auto& read : std::vector<std::function<void()>>{[&] { (void)w.sum(); }, [&] { (void)w.data_ptr(); },
                                                               [&] { (void)at::matmul(w, at::ones({5, 2})); }}) {
      EXPECT_NE(error_of(read).find("parameter 'w' is partitioned"), std::string::npos) << error_of(read);
    }
    EXPECT_EQ(flat.bytes(), 4 * flat.layout().size() / 2);
  });
}

TEST(FlatParams, GatherBringsTheValuesToEveryAliasAndReleaseTakesThemAway) {
  run_ranks(3, [](int rank, const comm::GroupPtr& group) {
    FlatParams flat("u", two_items(), at::kFloat, rank, group->size(), true);
    const at::Tensor w = flat.items()[0].tensor;
    const at::Tensor alias = w.detach().t();  // as autograd saves it
    const auto version = w._version();
    for (int round = 0; round < 3; ++round) {
      flat.begin_gather(*group, at::empty({flat.layout().size() + 5}));
      EXPECT_EQ(flat.state(), ParamState::Gathering);
      flat.finish_gather();
      EXPECT_TRUE(alias.equal(two_items()[0].tensor.detach().t()));
      EXPECT_TRUE(flat.view(1).equal(at::full({3}, 7.0)));
      EXPECT_EQ(w._version(), version);
      std::string edited;
      flat.release(&edited).fill_(-1);  // the bucket is the next unit's
      EXPECT_EQ(edited, "");
      EXPECT_NE(error_of([&] { (void)alias.sum(); }).find("'w'"), std::string::npos);
    }
  });
}

TEST(FlatParams, WritesAreKeptItemByItemOrReported) {
  run_ranks(2, [](int rank, const comm::GroupPtr& group) {
    FlatParams flat("u", two_items(), at::kFloat, rank, group->size(), true);
    const auto gather = [&] {
      flat.begin_gather(*group, at::empty({flat.layout().size()}));
      flat.finish_gather();
    };
    const at::NoGradGuard no_grad;
    gather();
    at::Tensor w = flat.items()[0].tensor, b = flat.items()[1].tensor;
    w.zero_();
    b.zero_();
    EXPECT_TRUE(flat.was_written(0) && flat.was_written(1));
    flat.keep_write(1);
    std::string edited;
    flat.release(&edited);
    EXPECT_EQ(edited, "w");
    gather();
    EXPECT_TRUE(w.equal(two_items()[0].tensor)) << "not kept";
    EXPECT_TRUE(b.equal(at::zeros({3})));
    flat.release();
  });
}

TEST(FlatParams, AReplacedParameterIsRefusedByName) {
  run_ranks(2, [](int rank, const comm::GroupPtr& group) {
    FlatParams flat("u", two_items(), at::kFloat, rank, group->size(), true);
    at::Tensor b = flat.items()[1].tensor;
    b.set_data(at::zeros({3}));
    flat.begin_gather(*group, at::empty({flat.layout().size()}));
    EXPECT_NE(error_of([&] { flat.finish_gather(); }).find("'b' was replaced"), std::string::npos);
    EXPECT_EQ(flat.state(), ParamState::Sharded);
  });
}

TEST(FlatParams, OneRankAndReplicatedStagesAreAlwaysReady) {
  for (const bool sharded : {false, true}) {
    FlatParams flat("u", two_items(), at::kBFloat16, 0, sharded ? 1 : 4, sharded);
    EXPECT_EQ(flat.state(), ParamState::Ready);
    EXPECT_FALSE(flat.sharded());
    EXPECT_EQ(flat.whole().numel(), flat.layout().size());
    EXPECT_EQ(flat.items()[0].tensor.scalar_type(), at::kBFloat16);
    EXPECT_EQ(flat.slice_values().size(), flat.layout().shard_size());
  }
}

TEST(FlatParams, AnAbandonedParameterSaysWhy) {
  std::vector<FlatParams::Item> items = two_items();
  const at::Tensor b = items[1].tensor;
  FlatParams flat("u", std::move(items), at::kFloat, 0, 2, true);
  flat.abandon("the engine is gone");
  EXPECT_NE(error_of([&] { (void)b.sum(); }).find("'b' is partitioned: the engine is gone"), std::string::npos);
}

}  // namespace tessera::testing
