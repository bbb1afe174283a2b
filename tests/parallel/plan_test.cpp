// Rules, and what every plan needs besides.
#include "tessera/parallel/plan.h"

#include <c10/util/Exception.h>

#include "tests/parallel/models.h"
#include "tests/support/errors.h"

namespace tessera::parallel {

using testing::error_of;

namespace {

Rule rule(const std::string& pattern, Partition partition,
          const std::string& source = "partition_config.layer_specs[0]") {
  Rule result;
  result.matches = standard_matcher()(pattern);
  result.pattern = pattern;
  result.source = source;
  result.partition = partition;
  return result;
}
Rule with_shape(Rule rule, std::vector<Sizes> entries, int nested, int dim) {
  rule.shape = PackedShape{std::move(entries), nested, dim};
  return rule;
}

PlanOptions options_with(std::vector<Rule> rules, int size = 2) {
  PlanOptions options;
  options.size = size;
  options.rules = std::move(rules);
  return options;
}
Plan plan_for(const Model& model, const PlanOptions& options) {
  return make_plan(model.modules, model.facts, options);
}

constexpr Partition kColumn = Partition::Column, kRow = Partition::Row, kSkip = Partition::Skip;

}  // namespace

TEST(Plan, TheFirstRuleHolds) {
  const Plan plan = plan_for(
      llama(), options_with({rule(R"(.*\.k_proj)", kSkip), rule(R"(.*\.[qk]_proj\.weight$)", kColumn, "preset x"),
                             rule(R"(.*o_proj)", kRow, "preset x"), rule("o_proj", kColumn, "preset x")}));
  expect_plan(plan, {{"q_proj", "column 0: 0-8 / 8-16"}, {"o_proj", "row 1: 0-8 / 8-16"}});
  EXPECT_EQ(plan.find("model.layers.0.self_attn.q_proj")->rule, R"(preset x: .*\.[qk]_proj\.weight$)");
  ASSERT_EQ(plan.warnings.size(), 1U);  // k_proj
  EXPECT_HAS(plan.warnings[0], "model.layers.0.self_attn.k_proj.weight is matched by partition_config.layer_specs[0]");
  EXPECT_EQ(std::ranges::count(plan.whole, "model.layers.0.self_attn.k_proj"), 1);
}

// Ranks that hold the same whole model, unless a rule says so.
TEST(Plan, NothingThatIsCutIsAnError) {
  Model model;
  for (const char* path : {"embed", "head"})
    model.add(path, Module::Kind::Linear, {8, 4}).weight_identity = 1;
  EXPECT_HAS(
      error_of([&] { plan_for(model, options_with({rule("head", kColumn)})); }),
      "tensor_parallel.autotp_size is 2, and nothing of this model is cut, so that all of them would train the same; "
      "tied weights stay whole, because not all of their modules would be cut alike: embed, head; give rules in");
  EXPECT_TRUE(plan_for(model, options_with({rule("head", kColumn), rule("embed", kSkip)})).decisions.empty());
  EXPECT_TRUE(plan_for(model, options_with({rule("head", kColumn)}, 1)).decisions.empty());
}

TEST(Plan, ShapesOfRules) {
  const std::string qkv = R"(.*qkv_proj)", up = R"(.*gate_up_proj)", down = R"(.*down_proj)";
  expect_plan(plan_for(phi3(2), options_with({with_shape(rule(qkv, kColumn), {{16, 8, 8}, {-1}}, 0, 0),
                                              with_shape(rule(up, kColumn), {{2}, {-1}}, -1, 0),
                                              with_shape(rule(down, kRow), {{-1}, {2}}, -1, 1)})),
              {{"qkv_proj", "column 0: 0-8,16-20,24-28 / 8-16,20-24,28-32"},
               {"gate_up_proj", "column 0: 0-12,24-36 / 12-24,36-48"},
               {"down_proj", "row 1: 0-6,12-18 / 6-12,18-24"}});
  const auto error = [&](const Rule& wrong) { return error_of([&] { plan_for(phi3(2), options_with({wrong})); }); };
  EXPECT_HAS(error(with_shape(rule(qkv, kColumn), {{16, 8}, {-1}}, 0, 0)), "24 outputs, the weight has 32");
  EXPECT_HAS(error(with_shape(rule(qkv, kColumn), {{16, 8}, {-1}}, 0, 0)), "partition_config.layer_specs[0]");
  EXPECT_HAS(error(with_shape(rule(qkv, kColumn), {{-1}, {2}}, -1, 1)), "column layer cannot be cut along dim 1");
  Rule gathered = with_shape(rule(qkv, kColumn), {{2}, {-1}}, -1, 0);
  gathered.gather_output = true;
  EXPECT_THROW(plan_for(phi3(2), options_with({gathered})), c10::NotImplementedError);
  Rule row = rule(down, kRow);
  row.gather_output = true;
  EXPECT_HAS(error(row), "gather_output is for column layers");
  Model biased = phi3(2);
  for (Module& m : biased.modules)
    if (m.path.ends_with("down_proj")) m.bias = 5;
  EXPECT_HAS(error_of([&] { plan_for(biased, options_with({rule(down, kRow)})); }),
             "a bias of 5 elements does not fit 16 outputs");
}

TEST(Plan, ModelTypes) {
  Rule mine = rule(R"(.*q_proj)", kColumn), other = rule(R"(.*q_proj)", kSkip);
  mine.model_types = {"bloom", "LLaMA"};
  other.model_types = {"bloom"};
  EXPECT_EQ(plan_for(llama(), options_with({other, mine})).decisions.size(), 1U);
  Model unnamed = llama();
  unnamed.facts.model_type = "";  // LlamaDecoderLayer
  EXPECT_EQ(plan_for(unnamed, options_with({mine})).decisions.size(), 1U);
  for (Module& m : unnamed.modules)
    m.class_name = "";
  EXPECT_HAS(error_of([&] { plan_for(unnamed, options_with({mine})); }), "no rule for tensor parallelism matches");
}

TEST(Plan, StrictMode) {
  PlanOptions options = options_with({rule(R"(model\..*_proj)", kColumn)});
  options.strict = true;
  EXPECT_HAS(error_of([&] { plan_for(llama(), options); }), "No matching spec for 'lm_head.weight'");
  options.rules.push_back(rule("lm_head", kSkip));
  plan_for(llama(), options);
}

TEST(Plan, EmbeddingsAndHeads) {
  Rule head = rule("lm_head", kColumn);
  head.gather_output = true;
  const Rule embed = rule(".*embed_tokens", kColumn);
  expect_plan(plan_for(llama(), options_with({head, embed})),
              {{"lm_head", "vocabulary 0: 0-16 / 16-32 gathered"}, {"embed_tokens", "column 1: 0-8 / 8-16 gathered"}});
  expect_plan(plan_for(t5(), options_with({rule(".*relative_attention_bias", kColumn)})),
              {{"relative_attention_bias", "column 1: 0-2 / 2-4"}});
  PlanOptions options = options_with({rule(R"(.*q_proj)", kColumn)});
  options.vocab_parallel = true;
  options.grain = 12;
  const Expected whole{{"q_proj", "column 0: 0-8 / 8-16"},
                       {"lm_head", "vocabulary 0: 0-12 / 12-32 gathered"},
                       {"embed_tokens", "vocabulary 0: 0-12 / 12-32"}};
  expect_plan(plan_for(llama(), options), whole);
  // Tied: cut alike they may be cut.
  Model tied = llama();
  for (Module& m : tied.modules)
    if (m.path == "lm_head" || m.path == "model.embed_tokens") m.weight_identity = 7;
  expect_plan(plan_for(tied, options), whole);
  const Plan plan = plan_for(tied, options_with({head, rule(R"(.*q_proj)", kColumn)}));
  expect_plan(plan, {{"q_proj", "column 0: 0-8 / 8-16"}});
  EXPECT_HAS(plan.warnings.at(0), "model.embed_tokens, lm_head");
}

TEST(Plan, SummedGradients) {
  Rule norms = rule(R"(.*layernorm)", kSkip);
  norms.sum_gradient = true;
  expect_plan(plan_for(llama(), options_with({norms})),
              {{"input_layernorm", "sum"}, {"post_attention_layernorm", "sum"}});
  // A rule that would cut takes no norms.
  EXPECT_EQ(plan_for(llama(), options_with({rule(".*", kColumn)})).find("model.norm"), nullptr);
}

TEST(Plan, Errors) {
  EXPECT_HAS(error_of([] { plan_for(llama(), options_with({rule("nothing", kColumn)})); }), "'nothing'");
  EXPECT_HAS(error_of([] { plan_for(llama(), options_with({}, 0)); }), "0 ranks");
  PlanOptions options = options_with({rule(".*embed_tokens", kColumn)});
  options.embedding_dim = 2;
  EXPECT_HAS(error_of([&] { plan_for(llama(), options); }), "embedding_partition_dim 2");
  EXPECT_HAS(error_of([] { plan_for(mixtral(true), options_with({rule(".*experts.down_proj", kColumn)})); }),
             "this is column");
}

TEST(Plan, Text) {
  Model model = llama();
  for (const Module& m : llama().modules)  // a second block
    if (m.path.starts_with("model.layers.0")) {
      model.modules.push_back(m);
      model.modules.back().path.replace(13, 1, "1");
    }
  PlanOptions options;
  options.size = 3;
  options.vocab_parallel = true;
  const std::string text = plan_for(model, options).text();
  EXPECT_HAS(text, "tensor parallel plan for 3 ranks: 16 weights");
  EXPECT_HAS(text, "model.layers.*.self_attn.q_proj  x 2  column 16 = 8 + 8 + 0  [heuristics: column layer]");
  EXPECT_HAS(text, "model.layers.*.mlp.down_proj  x 2     row 24 = 3 x 8  [heuristics: row layer]");
  EXPECT_HAS(text,
             "lm_head                               vocabulary 32 = 11 + 11 + 10, gathered  [tessera.vocab_parallel]");
  EXPECT_HAS(text, "whole on every rank:\n  model.layers.*.input_layernorm  x 2\n");
  EXPECT_HAS(text, "warning: there are more ranks than heads");
}

TEST(Plan, FactsOfParts) {
  ModelFacts facts;
  facts.parts["visual"].heads = 1;
  facts.parts["visual.blocks"].heads = 2;
  EXPECT_EQ(facts.of("visual.merger").heads, 1);
  EXPECT_EQ(facts.of("visual.blocks.0.attn").heads, 2);
  EXPECT_EQ(facts.of("visualize").heads, 0);
}

}  // namespace tessera::parallel
