#include "tessera/parallel/sizes.h"

#include <numeric>

#include "tests/support/errors.h"

namespace tessera::parallel {

using testing::error_of;

TEST(Sizes, Parts) {
  struct Case {
    int64_t total;
    int parts;
    SizeRule rule;
    Sizes expected;
  };
  const std::vector<Case> cases{
      {8, 2, {}, {4, 4}},
      {10, 4, {}, {3, 3, 2, 2}},
      {2, 4, {}, {1, 1, 0, 0}},
      {96, 4, {.grain = 16}, {32, 32, 16, 16}},
      {100, 3, {.grain = 16}, {32, 32, 36}},  // 6 grains, 4 elements left over
      {10, 2, {.grain = 64}, {0, 10}},
      {512, 3, {.heads = 8}, {192, 192, 128}},
      {24, 4, {.heads = 2}, {12, 12, 0, 0}},
      {24, 2, {.heads = 3, .grain = 5}, {16, 8}},  // heads go first
      {7, 1, {.grain = 3}, {7}},
  };
  for (const Case& c : cases) {
    const Sizes sizes = part_sizes(c.total, c.parts, c.rule);
    EXPECT_EQ(sizes, c.expected) << c.total;
    EXPECT_EQ(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}), c.total);
  }
  EXPECT_HAS(error_of([] { part_sizes(10, 2, {.heads = 4}); }), "4 heads do not divide 10");
  for (const auto& [total, parts, rule] : std::vector<std::tuple<int64_t, int, SizeRule>>{
           {0, 2, {}}, {8, 0, {}}, {8, 2, {.heads = -1}}, {8, 2, {.grain = 0}}})
    EXPECT_HAS(error_of([&t = total, &p = parts, &r = rule] { part_sizes(t, p, r); }), "must be positive");
}

TEST(Sizes, RuleFollowsTheName) {
  EXPECT_EQ(rule_for("model.layers.0.self_attn.q_proj", 64, 4).heads, 4);
  EXPECT_EQ(rule_for("", 64, 4).heads, 4);
  EXPECT_EQ(rule_for("model.lm_head", 64, 4).heads, 4);  // the exact name only
  EXPECT_EQ(rule_for("q_proj", 66, 4, 8).heads, 0);
  EXPECT_EQ(rule_for("q_proj", 66, 4, 8).grain, 8);
  EXPECT_EQ(rule_for("q_proj", 64, 0).heads, 0);
  for (const char* name : {"layers.0.mlp.dense", "x.gate_proj", "up_proj", "down_proj", "experts.3.w1", "w2", "w3",
                           "lm_head", "embed_out"})
    EXPECT_EQ(rule_for(name, 64, 4).heads, 0) << name;
}

TEST(Sizes, ShapesResolve) {
  struct Case {
    PackedShape shape;
    Sizes weight;
    int64_t dim;
    Sizes sizes;
    int64_t unit;
    Sizes view;
  };
  const std::vector<Case> cases{
      {{{{3}, {-1}}}, {96, 32}, 0, {32, 32, 32}, 1, {96, 32}},
      {{{{3}, {32}}}, {96, 32}, 0, {32, 32, 32}, 1, {96, 32}},
      {{{{64, 16, 16}, {-1}}, 0}, {96, 32}, 0, {64, 16, 16}, 1, {96, 32}},
      {{{{-1}, {32}}}, {96, 32}, 0, {96}, 1, {96, 32}},
      {{{{2}, {-1}, {32}}, -1, 1}, {96, 32}, 0, {48, 48}, 1, {2, 48, 32}},     // experts in one weight
      {{{{4, 2}, {16}, {32}}, 0, 0}, {96, 32}, 0, {64, 32}, 16, {6, 16, 32}},  // sizes in heads of 16
      {{{{2}, {3, 1}, {-1}}, 1, 1}, {8, 5}, 0, {3, 1, 3, 1}, 1, {2, 4, 5}},
      {{{{2}, {-1}, {4}, {5}}, -1, 1}, {24, 5}, 0, {12, 12}, 4, {2, 3, 4, 5}},
      {{{{-1}, {2}}, -1, 1}, {96, 32}, 1, {16, 16}, 1, {96, 32}},  // inputs of a row layer
      {{{{96}, {24, 8}}, 1, 1}, {96, 32}, 1, {24, 8}, 1, {96, 32}},
  };
  for (const Case& c : cases) {
    const SubParams subs = resolve(c.shape, c.weight, "here");
    EXPECT_EQ(subs.dim, c.dim);
    EXPECT_EQ(subs.sizes, c.sizes);
    EXPECT_EQ(subs.unit, c.unit);
    EXPECT_EQ(subs.view, c.view);
  }
}

TEST(Sizes, WrongShapes) {
  const std::vector<std::tuple<PackedShape, Sizes, std::string>> cases{
      {{{{3}}}, {96, 32}, "two entries at least"},
      {{{{3}, {-1}}, -1, 2}, {96, 32}, "partition_dim 2 is out of range for shape (3, -1)"},
      {{{{3}, {-1}}, -1, -1}, {96, 32}, "out of range"},
      {{{{3}, {16, 16}}, 1, 0}, {96, 32}, "nested tuple only allowed at partition_dim (0)"},
      {{{{}, {-1}}, 0}, {96, 32}, "empty"},
      {{{{64, 32}, {-1}}}, {96, 32}, "a list"},
      {{{{64, 0, 32}, {-1}}, 0}, {96, 32}, "sizes of sub-parameters are positive"},
      {{{{64, -1}, {-1}}, 0}, {96, 32}, "sizes of sub-parameters are positive"},
      {{{{-2}, {-1}}}, {96, 32}, "positive or -1"},
      {{{{0}, {-1}}}, {96, 32}, "positive or -1"},
      {{{{-1}, {-1}}}, {96, 32}, "2 entries of -1"},
      {{{{3}, {-1}, {32}}}, {96, 32}, "entries 0 and 1"},
      {{{{3}, {31}}}, {96, 32}, "is 31, the weight has 32 inputs"},
      {{{{64, 16}, {-1}}, 0}, {96, 32}, "is of 80 outputs, the weight has 96"},
      {{{{5}, {7}, {32}}}, {96, 32}, "7 times so many outputs, the weight has 96"},
      {{{{5}, {-1}}}, {96, 32}, "5 equal sub-parameters do not divide 96"},
      {{{{3}, {-1}}}, {96}, "weight of two dims"},
  };
  for (const auto& [shape, weight, message] : cases) {
    const std::string error = error_of([&s = shape, &w = weight] { resolve(s, w, "layer_specs[1]"); });
    EXPECT_HAS(error, message);
    EXPECT_HAS(error, "layer_specs[1]");
  }
}

TEST(Sizes, PackedRanges) {
  const auto packed = packed_ranges({64, 16, 16}, 2, {{}});
  EXPECT_EQ(packed[0], (Ranges{{0, 32}, {64, 72}, {80, 88}}));
  EXPECT_EQ(packed[1], (Ranges{{32, 64}, {72, 80}, {88, 96}}));
  // Query heads follow key/value heads: 3 for 2 ranks.
  const auto heads = packed_ranges({48, 12, 12}, 2, {{.heads = 3}});
  EXPECT_EQ(heads[0], (Ranges{{0, 32}, {48, 56}, {60, 68}}));
  EXPECT_EQ(heads[1], (Ranges{{32, 48}, {56, 60}, {68, 72}}));
  // A rank beyond the heads, neighbours joined, a rule for each.
  EXPECT_EQ(packed_ranges({4, 4}, 3, {{.heads = 2}})[2], (Ranges{{0, 0}}));
  EXPECT_EQ(packed_ranges({4, 4}, 1, {{}})[0], (Ranges{{0, 8}}));
  EXPECT_EQ(packed_ranges({4, 6}, 2, {{.heads = 2}, {.grain = 4}})[1], (Ranges{{2, 4}, {8, 10}}));
  EXPECT_HAS(error_of([] { packed_ranges({4, 4, 4}, 2, {{}, {}}); }), "2 rules for 3 sub-parameters");
  EXPECT_HAS(error_of([] { packed_ranges({4}, 0, {{}}); }), "0 ranks");
}

TEST(Sizes, RangesLieOneAfterTheOther) {
  EXPECT_EQ(ranges_of({3, 0, 2}), (Ranges{{0, 3}, {3, 3}, {3, 5}}));
}

}  // namespace tessera::parallel
