#include "tessera/zero/units.h"

#include <gtest/gtest.h>

#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace tessera::testing {

using engine::Engine;
using engine::Quantity;

TEST(Units, BadParametersAreValueErrors) {
  const Toy toy;
  const auto build = [&](std::vector<engine::ParamSpec> specs) {
    Engine engine(toy_options({}), comm::Mesh(comm::single_group()), std::move(specs), {toy_adamw()});
  };
  auto twice = toy.specs();
  twice.push_back(twice[0]);
  EXPECT_THROW(build(twice), c10::ValueError);
  auto integers = toy.specs();
  integers[0].tensor = at::zeros({2}, at::kLong);
  EXPECT_THROW(build(integers), c10::ValueError);
  auto group = toy.specs();
  group[1].group = 3;
  EXPECT_THROW(build(group), c10::ValueError);
  auto not_leaf = toy.specs();
  not_leaf[0].tensor = toy.tensors[0] * 2;
  EXPECT_THROW(build(not_leaf), c10::ValueError);
}

TEST(Units, UnmanagedParametersGetRankZerosValueAndTheComputeDtype) {
  run_ranks(2, [](int rank, const comm::GroupPtr& group) {
    const Toy toy;
    ToyRun run;
    run.bf16 = true;
    auto specs = toy.specs();
    specs[0].group = -1;
    specs[0].tensor = at::full({1}, 5.0 + rank);
    Engine engine(toy_options(run), comm::Mesh(group), specs, {toy_adamw()});
    EXPECT_EQ(specs[0].tensor.scalar_type(), at::kBFloat16);
    EXPECT_EQ(specs[0].tensor.item<float>(), 5.0F);
    EXPECT_THROW(engine.states().get_full(0, Quantity::Master), c10::ValueError);
  });
}

}  // namespace tessera::testing
