#include "tests/parallel/models.h"
#include "tests/support/errors.h"

namespace tessera::parallel {

using testing::error_of;

namespace {

Plan preset_plan(const std::string& name, const Model& model, int size = 2) {
  PlanOptions options;
  options.size = size;
  options.rules = preset_rules(name, model.facts, standard_matcher());
  return make_plan(model.modules, model.facts, options);
}
Plan heuristic_plan(const Model& model, int size = 2) {
  PlanOptions options;
  options.size = size;
  return make_plan(model.modules, model.facts, options);
}
Expected briefly(const Plan& plan) {
  Expected result;
  for (const Decision& d : plan.decisions)
    result[d.param == "weight" ? d.path : d.path + "." + d.param] = brief(d);
  return result;
}

}  // namespace

// A preset and the heuristics, whose decisions heuristics_test.cpp has one by one, agree on the models that both know.
TEST(Presets, AgreeWithHeuristics) {
  const std::vector<std::pair<const char*, Model>> cases{
      {"llama", llama()},
      {"LLaMA", qwen3()},
      {"qwen2", llama(2, "qwen2")},
      {"qwen2", qwen2_moe(false)},
      {"qwen2", qwen2_moe(true)},
      {"mixtral", mixtral(false)},
      {"mixtral", mixtral(true)},
      {"deepseek_v2", deepseek_v2()},
      {"phi3", phi3(2)},
      {"phi3", phi3(4)},
      {"bloom", fused("bloom", "BloomBlock", "self_attention", 48)},
      {"chatglm", fused("chatglm", "GLMBlock", "self_attention", 32, 2, 48)},
  };
  for (const auto& [name, model] : cases) {
    for (const int size : {2, 3}) {
      SCOPED_TRACE(c10::str(name, " for ", model.facts.model_type, " on ", size));
      EXPECT_EQ(briefly(preset_plan(name, model, size)), briefly(heuristic_plan(model, size)));
      EXPECT_FALSE(preset_plan(name, model, size).decisions.empty());
    }
  }
}

// Without facts of the model sizes are thirds, as there is nothing better.
TEST(Presets, WithoutFacts) {
  Model model = phi3(4);
  model.facts = {};
  EXPECT_EQ(brief(*preset_plan("phi3", model).find("model.layers.0.self_attn.qkv_proj")),
            "column 0: 0-8,16-24,32-40 / 8-16,24-32,40-48");
  model = phi3(2);
  model.facts = {};
  EXPECT_HAS(error_of([&] { preset_plan("phi3", model); }), "3 equal sub-parameters do not divide 32");
}

TEST(Presets, Names) {
  EXPECT_EQ(preset_names(),
            (std::vector<std::string>{"bloom", "chatglm", "deepseek_v2", "llama", "mixtral", "phi3", "qwen2"}));
  const std::string error = error_of([] { preset_rules("gpt5", {}, standard_matcher()); });
  EXPECT_HAS(error, "preset_model 'gpt5' is none of [bloom, chatglm, deepseek_v2, llama, mixtral, phi3, qwen2]");
}

TEST(Presets, LlamaWithFusedHeads) {
  Model model = phi3(2);
  PlanOptions options;
  options.size = 2;
  options.rules = llama_gqa_rules(4, 2, 4, standard_matcher());
  EXPECT_EQ(brief(*make_plan(model.modules, model.facts, options).find("model.layers.0.self_attn.qkv_proj")),
            "column 0: 0-8,16-20,24-28 / 8-16,20-24,28-32");
}

TEST(Presets, PatternsMatchFromTheStart) {
  const Predicate matches = standard_matcher()(R"(a\.[xy])");
  EXPECT_TRUE(matches("a.xz"));
  EXPECT_FALSE(matches("b.a.x"));
  EXPECT_HAS(error_of([] { standard_matcher()("("); }), "'(' is no regular expression");
}

}  // namespace tessera::parallel
