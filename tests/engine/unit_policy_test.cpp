#include "tessera/engine/unit_policy.h"

#include <gtest/gtest.h>

#include <limits>

namespace tessera::engine {
namespace {

// "a.b:Class" is a module, "[]" after it a list or Sequential, "{}" one without a forward, both a ModuleList; "a.b=3" a
// parameter of 3 elements. Tied ones have the same letter behind: "a.b=3x".
Outline outline(const std::vector<std::string>& lines) {
  Outline result;
  for (const std::string& line : lines) {
    const size_t at = line.find_first_of(":=");
    const std::string path = line.substr(0, at), rest = line.substr(at + 1);
    if (line[at] == '=') {
      const int64_t tied = std::isalpha(rest.back()) ? rest.back() : 1000 + static_cast<int64_t>(result.params.size());
      result.params.push_back({path, std::stoll(rest), tied});
      continue;
    }
    const auto has = [&](const char* mark) { return rest.find(mark) != std::string::npos; };
    const std::string name = rest.substr(0, rest.find_first_of("[{"));
    result.modules.push_back({path, {"my." + name, name}, has("[]"), !has("{}")});
  }
  return result;
}

TEST(UnitPolicy, BlocksThatAContainerRepeatsAreUnits) {
  const struct {
    const char* what;
    std::vector<std::string> model;
    UnitNames units;
  } rows[] = {
      {"blocks of a list, whatever is inside",
       {":Net", "embed:Linear", "blocks:ModuleList[]{}", "blocks.0:Block", "blocks.0.mlp:Sequential[]",
        "blocks.0.mlp.0:Linear", "blocks.0.mlp.1:Linear", "blocks.1:Block", "embed.w=2", "blocks.0.mlp.0.w=2",
        "blocks.0.mlp.1.w=2", "blocks.1.w=2"},
       {{"blocks.0.mlp.0.w", "blocks.0"}, {"blocks.0.mlp.1.w", "blocks.0"}, {"blocks.1.w", "blocks.1"}}},
      {"a model that is a Sequential itself",
       {":Sequential[]", "0:Linear", "1:ReLU", "2:Linear", "0.w=2", "2.w=2"},
       {{"0.w", "0"}, {"2.w", "2"}}},
      {"no class twice: nothing is repeated, but what is inside may be",
       {":Sequential[]", "0:Linear", "1:ModuleList[]{}", "1.0:Block", "1.1:Block", "0.w=2", "1.0.w=2", "1.1.w=2"},
       {{"1.0.w", "1.0"}, {"1.1.w", "1.1"}}},
      {"children without parameters do not count", {":Sequential[]", "0:Tanh", "1:Linear", "2:Tanh", "1.w=2"}, {}},
      {"others are units too once one is repeated",
       {":Sequential[]", "0:Linear", "1:Norm", "2:Linear", "0.w=2", "1.w=2", "2.w=2"},
       {{"0.w", "0"}, {"1.w", "1"}, {"2.w", "2"}}},
      {"twins outside of a list", {":Net", "a:Linear", "b:Linear", "a.w=2", "b.w=2"}, {}},
      {"a parameter of the list itself",
       {":ModuleList[]{}", "0:L", "1:L", "w=1", "0.w=1", "1.w=1"},
       {{"0.w", "0"}, {"1.w", "1"}}},
      {"tied ones under every name", {":Net[]", "0:L", "1:L", "0.w=1x", "1.w=1x"}, {{"0.w", "0"}, {"1.w", "1"}}},
      {"an empty model", {":Net"}, {}},
  };
  for (const auto& row : rows)
    EXPECT_EQ(default_units(outline(row.model)), row.units) << row.what;
}

TEST(UnitPolicy, PartitionedParametersAreOneWithTheirModuleOrLeaf) {
  const Outline model =
      outline({":Net", "embed:Linear", "blocks:ModuleList[]{}", "blocks.0:Block", "blocks.0.moe:Experts",
               "blocks.0.moe.0:Linear", "blocks.1:Block", "head:Head", "head.norm:Norm", "gain=1", "embed.w=2",
               "blocks.0.w=1", "blocks.0.moe.0.w=2", "blocks.1.w=2", "head.norm.w=2"});
  const UnitNames units = default_units(model);
  UnitNames want{{"embed.w", "embed"},
                 {"blocks.0.w", "blocks.0"},
                 {"blocks.0.moe.0.w", "blocks.0"},
                 {"blocks.1.w", "blocks.1"},
                 {"head.norm.w", "head.norm"}};
  EXPECT_EQ(partition_units(model, units, {}), want) << "the model's own parameter stays in the root";
  want["blocks.0.moe.0.w"] = "blocks.0.moe";
  want["head.norm.w"] = "head";
  EXPECT_EQ(partition_units(model, units, {"blocks.0.moe", "head"}), want);
  EXPECT_EQ(partition_units(model, {{"embed.w", "mine"}}, {}).at("embed.w"), "mine");
}

const std::vector<std::string> kMixture{":Net",
                                        "embed:Linear",
                                        "layers:ModuleList[]{}",
                                        "layers.0:Experts",
                                        "layers.0.moe:Sequential[]",
                                        "layers.0.moe.0:Linear",
                                        "layers.0.moe.1:Linear",
                                        "layers.1:Experts",
                                        "layers.1.moe:Sequential[]",
                                        "layers.1.moe.0:Linear",
                                        "embed.w=5",
                                        "layers.0.moe.0.w=8",
                                        "layers.0.moe.1.w=8x",
                                        "layers.1.moe.0.w=8x"};

TEST(UnitPolicy, LeavesOfTheConfiguration) {
  using Paths = std::vector<std::string>;
  struct Row {
    config::LeafModule section;
    int64_t threshold;
    Paths leaves, warnings;  // what the warnings end with
  };
  const Outline model = outline(kMixture);
  const auto defaults = config::LeafModule().classes;
  const Row rows[] = {
      {{}, 0, {}, {}},
      {{{"Experts"}, {}, {}}, 0, {"layers.0", "layers.1"}, {}},
      {{{"my.Experts", "Expert"}, {}, {}}, 0, {"layers.0", "layers.1"}, {"no module of class Expert in the model"}},
      {{defaults, {"layers.1", "layer"}, {"0.moe"}},
       0,
       {"layers.0.moe", "layers.1"},
       {"names: no module layer in the model"}},
      {{{}, {}, {"moe.9"}}, 0, {}, {"name_suffixes: no module moe.9 in the model"}},
      // 16 elements in layers.0 and 8 in layers.1; 4 and 3 modules; in each moe 16 and 8 of 3 and 2.
      {{}, 2, {}, {"no module is finer than 2"}},
      {{}, 3, {"layers.1"}, {}},
      {{}, 4, {"layers.0", "layers.1"}, {}},
      {{}, std::numeric_limits<int64_t>::max(), {"layers.0", "layers.1"}, {}},
      {{{"Net"}, {}, {}}, 4, {""}, {}},
  };
  for (const Row& row : rows) {
    config::ZeroOptimization zero;
    zero.leaf_module = row.section;
    zero.stage3_module_granularity_threshold = row.threshold;
    const Leaves found = configured_leaves(model, zero);
    EXPECT_EQ(outermost(model, found.modules), row.leaves) << &row - rows;
    ASSERT_EQ(found.warnings.size(), row.warnings.size()) << &row - rows;
    for (size_t i = 0; i < row.warnings.size(); ++i)
      EXPECT_TRUE(found.warnings[i].starts_with("[zero] ") && found.warnings[i].ends_with(row.warnings[i]))
          << found.warnings[i];
  }
}

TEST(UnitPolicy, ModulesMatchByClassNameAndSuffix) {
  const Outline model = outline(kMixture);
  EXPECT_EQ(modules_matching(model, LeafBy::Class, "Linear"), (std::vector{1, 5, 6, 9}));
  EXPECT_EQ(modules_matching(model, LeafBy::Class, "my.Net"), std::vector{0});
  EXPECT_EQ(modules_matching(model, LeafBy::Name, "layers.0.moe"), std::vector{4});
  EXPECT_EQ(modules_matching(model, LeafBy::Suffix, "moe.0"), (std::vector{5, 9}));
}

}  // namespace
}  // namespace tessera::engine
