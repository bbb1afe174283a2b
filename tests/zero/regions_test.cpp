#include "tessera/zero/regions.h"

#include <gtest/gtest.h>

#include "tests/support/errors.h"
#include "tests/support/partitioned.h"

namespace tessera::testing {

using engine::Engine;
using engine::Quantity;

TEST(Regions, RegionsGiveWholeValuesAndTakeOneRanksWrites) {
  for (const bool bf16 : {false, true}) {
    on_ranks(
        3,
        [](Engine& engine, const Toy& toy, int rank) {
          const Toy original;
          const auto dtype = toy.tensors[3].scalar_type();
          const at::Tensor master = engine.states().get_full(3, Quantity::Master);
          engine.regions().open({3, 4});
          EXPECT_TRUE(toy.tensors[3].equal(original.tensors[3].to(dtype)));
          EXPECT_NE(error_of([&] { engine.regions().open({4}); }).find("overlap"), std::string::npos);
          {
            const at::NoGradGuard no_grad;
            at::Tensor(toy.tensors[4]).fill_(rank);
          }
          engine.regions().close({3, 4}, zero::Writes::FromRank, 2);
          EXPECT_TRUE(engine.states().get_full(4, Quantity::Master).equal(at::full({5, 3}, 2.0)));
          EXPECT_TRUE(engine.states().get_full(3, Quantity::Master).equal(master))
              << "untouched masters keep their bits";
          engine.regions().open({4});
          EXPECT_TRUE(toy.tensors[4].equal(at::full({5, 3}, 2.0, at::kFloat).to(dtype)));
          engine.regions().close({4});
          EXPECT_EQ(gathered(engine), "");
        },
        bf16);
  }
}

TEST(Regions, WritingWithoutAWriterIsAnErrorAndIsUndone) {
  on_ranks(2, [](Engine& engine, const Toy& toy, int) {
    const at::Tensor before = engine.states().get_full(4, Quantity::Master);
    engine.regions().open({4});
    {
      const at::NoGradGuard no_grad;
      at::Tensor(toy.tensors[4]).fill_(1);
    }
    const std::string what = error_of([&] { engine.regions().close({4}); });
    EXPECT_NE(what.find("in-place modification"), std::string::npos) << what;
    EXPECT_NE(what.find("'w2'"), std::string::npos) << what;
    EXPECT_TRUE(engine.states().get_full(4, Quantity::Master).equal(before));
  });
}

TEST(Regions, StepInsideARegionIsRefused) {
  on_ranks(2, [](Engine& engine, const Toy& toy, int rank) {
    toy_forward(engine, toy, toy_batch(rank, 0)).backward();
    engine.regions().open({4});
    EXPECT_NE(error_of([&] { engine.step(); }).find("in use"), std::string::npos);
    engine.regions().close({4});
    EXPECT_TRUE(engine.step());
  });
}

}  // namespace tessera::testing
