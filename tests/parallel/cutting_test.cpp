// Places in a model; decisions are tested where they are made: plan_test.cpp, heuristics_test.cpp.
#include "tessera/parallel/cutting.h"

#include "tests/parallel/models.h"

namespace tessera::parallel {

TEST(Cutting, Paths) {
  EXPECT_EQ(last_of("a.b.c"), "c");
  EXPECT_EQ(last_of("a"), "a");
  EXPECT_EQ(parent_of("a.b.c"), "a.b");
  EXPECT_EQ(parent_of("a"), "");
  EXPECT_TRUE(is_inside("a.b", "a") && is_inside("a", "a") && is_inside("a", ""));
  EXPECT_FALSE(is_inside("ab", "a") || is_inside("a", "a.b"));
  EXPECT_EQ(attention_around("x.0.attention.self.query"), "x.0.attention");
  EXPECT_EQ(attention_around("x.0.mlp.up"), "");
}

TEST(Cutting, BlocksAreTheOutermostElementsOfLists) {
  const Model model = t5();
  const PlanOptions options;
  const PlanBuilder builder(model.modules, model.facts, options);
  EXPECT_EQ(builder.block_of("encoder.block.0.layer.1.DenseReluDense.wi"), "encoder.block.0");
  EXPECT_EQ(builder.block_of("encoder.block.0"), "encoder.block.0");
  EXPECT_EQ(builder.block_of("shared"), "");
  EXPECT_EQ(builder.find("encoder.block.0.layer.1.DenseReluDense.wi")->weight_sizes, (Sizes{64, 16}));
  EXPECT_EQ(builder.find("encoder", "weight"), nullptr);
}

}  // namespace tessera::parallel
