#include "tessera/zero/unit.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <deque>

#include "tessera/comm/backends.h"
#include "tessera/shard/storage.h"

namespace tessera::zero {

namespace {

std::vector<Param> two_params(const std::vector<at::Tensor>& tensors) {
  std::vector<Param> params(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    params[i].name = i == 0 ? "p0" : "p1";
    params[i].tensor = tensors[i];
    params[i].id = static_cast<int>(i);
  }
  return params;
}

Unit make_unit(const std::vector<at::Tensor>& tensors, int stage, bool bf16, int rank, int size) {
  Options options;
  options.stage = stage;
  options.precision = bf16 ? amp::PrecisionPolicy::bf16() : amp::PrecisionPolicy::fp32();
  static std::deque<Ranks> kept;  // a unit refers to its ranks
  const Ranks& ranks = kept.emplace_back(comm::thread_groups(size)[rank]);
  return Unit("u", two_params(tensors), options, shard::placements_of_stage(stage), /*resident=*/false, ranks);
}

}  // namespace

TEST(Unit, BuffersFollowTheStageTable) {
  for (int stage = 0; stage <= 2; ++stage) {
    std::vector<at::Tensor> tensors{at::randn({40}), at::randn({3})};
    const Unit unit = make_unit(tensors, stage, /*bf16=*/true, 1, 2);
    EXPECT_EQ(unit.flat().whole().numel(), 128);
    EXPECT_EQ(unit.grads().size(), stage == 0 ? 128 : 64);
    EXPECT_FALSE(unit.grads().has_memory());
    EXPECT_EQ(unit.accumulates_in_grads(), stage < 2);
    EXPECT_EQ(unit.residual().size(), stage == 0 ? 128 : 64);
    EXPECT_FALSE(unit.master().defined());
    EXPECT_EQ(unit.grads_are_visible(), stage == 0);
  }
}

TEST(Unit, Fp32KeepsNoSecondCopyOfTheWeights) {
  std::vector<at::Tensor> tensors{at::randn({40}), at::randn({3})};
  Unit unit = make_unit(tensors, 1, /*bf16=*/false, 1, 2);
  EXPECT_TRUE(unit.master_is_weight());
  EXPECT_EQ(unit.read_master({0, 64}).data_ptr(), unit.flat().whole().narrow(0, 64, 64).data_ptr());
}

TEST(Unit, MastersStartFromTheWeightsAsTorchCastsThem) {
  const at::Tensor original = at::randn({7, 5});
  std::vector<at::Tensor> tensors{original.clone(), at::randn({3})};
  Unit unit = make_unit(tensors, 0, /*bf16=*/true, 0, 1);
  EXPECT_TRUE(unit.params()[0].tensor.equal(original.to(at::kBFloat16)));
  EXPECT_TRUE(unit.read_master({0, 35}).equal(unit.params()[0].tensor.to(at::kFloat).flatten()));
  EXPECT_TRUE(
      shard::is_bound(unit.params()[0].tensor, unit.flat().whole(), unit.params()[0].range, unit.params()[0].form));
}

TEST(Unit, AdagradStartsAtItsInitialValueAndPaddingAtZero) {
  std::vector<at::Tensor> tensors{at::randn({5}), at::randn({3})};
  Unit unit = make_unit(tensors, 0, false, 0, 1);
  optim::GroupOptions group;
  group.initial_accumulator_value = 0.5;
  unit.allocate_states(1, {group}, optim::Rule::Adagrad);
  EXPECT_EQ(unit.states()[0].tensor().sum().item<float>(), 8 * 0.5F);
}

}  // namespace tessera::zero
