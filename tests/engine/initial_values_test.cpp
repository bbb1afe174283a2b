#include "tessera/engine/initial_values.h"

#include <gtest/gtest.h>

#include <vector>

#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace tessera::testing {

TEST(InitialValues, ParametersThatTheModelDoesNotHoldAreSharedAndCast) {
  run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
    const std::vector<engine::ParamSpec> specs{{"frozen", at::full({3}, rank + 1.5)},
                                               {"count", at::full({2}, rank, at::kLong)},
                                               {"held", at::full({2}, rank + 1.0), 0}};
    zero::Options options;
    options.precision.param = at::kBFloat16;
    engine::broadcast_unmanaged(comm::Mesh(group), options, specs);
    EXPECT_TRUE(specs[0].tensor.equal(at::full({3}, 1.5, at::kBFloat16)));
    EXPECT_TRUE(specs[1].tensor.equal(at::zeros({2}, at::kLong)));
    EXPECT_TRUE(specs[2].tensor.equal(at::full({2}, rank + 1.0)));
  });
}

TEST(InitialValues, ASliceIsSharedByTheRanksThatHoldIt) {
  run_axes({{comm::Axis::DpShard, 2}, {comm::Axis::Tp, 2}}, [](int rank, const comm::Mesh& mesh) {
    std::vector<engine::ParamSpec> specs{{"slice", at::full({3}, rank)}, {"whole", at::full({3}, rank)}};
    specs[0].varies = comm::Axis::Tp;
    engine::broadcast_unmanaged(mesh, {}, specs);
    EXPECT_TRUE(specs[0].tensor.eq(rank % 2).all().item<bool>()) << rank;
    EXPECT_TRUE(specs[1].tensor.eq(0).all().item<bool>()) << rank;
  });
}

}  // namespace tessera::testing
