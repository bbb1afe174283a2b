// What names and order say of a model.
#include "tests/parallel/models.h"
#include "tests/support/errors.h"

namespace tessera::parallel {

using testing::error_of;

namespace {

Plan plan_for(const Model& model, int size) {
  PlanOptions options;
  options.size = size;
  return make_plan(model.modules, model.facts, options);
}

struct ModelCase {
  const char* name;
  Model model;
  int size;
  Expected expected;
};

const Expected kLlama{{"q_proj", "column 0: 0-8 / 8-16"},      {"k_proj", "column 0: 0-4 / 4-8"},
                      {"v_proj", "column 0: 0-4 / 4-8"},       {"o_proj", "row 1: 0-8 / 8-16"},
                      {"gate_proj", "column 0: 0-12 / 12-24"}, {"up_proj", "column 0: 0-12 / 12-24"},
                      {"down_proj", "row 1: 0-12 / 12-24"}};

Expected with(Expected base, const Expected& more, const std::vector<std::string>& without = {}) {
  for (const std::string& name : without)
    base.erase(name);
  for (const auto& [name, text] : more)
    base[name] = text;
  return base;
}

std::vector<ModelCase> cases() {
  const Expected experts{{"experts.gate_up_proj", "column 1: 0-12,24-36 / 12-24,36-48"},
                         {"experts.down_proj", "row 2: 0-12 / 12-24"}};
  const Expected neox{{"query_key_value", "column 0: 0-24 / 24-48"},
                      {"dense", "row 1: 0-8 / 8-16"},
                      {"dense_h_to_4h", "column 0: 0-12 / 12-24"},
                      {"dense_4h_to_h", "row 1: 0-12 / 12-24"}};
  const Expected separate{{"k_proj", "column 0: 0-8 / 8-16"},
                          {"v_proj", "column 0: 0-8 / 8-16"},
                          {"q_proj", "column 0: 0-8 / 8-16"},
                          {"out_proj", "row 1: 0-8 / 8-16"}};
  return {
      {"llama", llama(), 2, kLlama},
      // Three key/value heads' worth of queries: uneven heads, the same for all layers of the attention; MLPs by elements.
      {"llama 3",
       llama(4),
       3,
       {{"q_proj", "column 0: 0-8 / 8-12 / 12-16"},
        {"k_proj", "column 0: 0-8 / 8-12 / 12-16"},
        {"v_proj", "column 0: 0-8 / 8-12 / 12-16"},
        {"o_proj", "row 1: 0-8 / 8-12 / 12-16"},
        {"gate_proj", "column 0: 0-8 / 8-16 / 16-24"},
        {"up_proj", "column 0: 0-8 / 8-16 / 16-24"},
        {"down_proj", "row 1: 0-8 / 8-16 / 16-24"}}},
      {"llama 4, two key/value heads",
       llama(2),
       4,
       {{"q_proj", "column 0: 0-8 / 8-16 / 0-0 / 0-0"},
        {"k_proj", "column 0: 0-4 / 4-8 / 0-0 / 0-0"},
        {"v_proj", "column 0: 0-4 / 4-8 / 0-0 / 0-0"},
        {"o_proj", "row 1: 0-8 / 8-16 / 0-0 / 0-0"},
        {"gate_proj", "column 0: 0-6 / 6-12 / 12-18 / 18-24"},
        {"up_proj", "column 0: 0-6 / 6-12 / 12-18 / 18-24"},
        {"down_proj", "row 1: 0-6 / 6-12 / 12-18 / 18-24"}}},
      {"qwen2", llama(2, "qwen2"), 2, kLlama},
      {"qwen3", qwen3(), 2, with(kLlama, {{"q_norm", "sum"}, {"k_norm", "sum"}})},
      {"mixtral 4.x", mixtral(false), 2,
       with(kLlama, {{"w1", "column 0: 0-12 / 12-24"}, {"w2", "row 1: 0-12 / 12-24"}, {"w3", "column 0: 0-12 / 12-24"}},
            {"gate_proj", "up_proj", "down_proj"})},
      {"mixtral 5.x", mixtral(true), 2, with(kLlama, experts, {"gate_proj", "up_proj", "down_proj"})},
      {"qwen2-moe 4.x", qwen2_moe(false), 2, kLlama},
      {"qwen2-moe 5.x", qwen2_moe(true), 2,
       with(kLlama,
            with(experts, {{"shared_expert.gate_proj", kLlama.at("gate_proj")},
                           {"shared_expert.up_proj", kLlama.at("up_proj")},
                           {"shared_expert.down_proj", kLlama.at("down_proj")}}),
            {"gate_proj", "up_proj", "down_proj"})},
      {"deepseek_v2", deepseek_v2(), 2,
       with(kLlama,
            {{"q_proj", "column 0: 0-12 / 12-24"},
             {"q_b_proj", "column 0: 0-12 / 12-24"},
             {"kv_b_proj", "column 0: 0-16 / 16-32"},
             {"kv_a_proj_with_mqa", "own 8-10"}},
            {"k_proj", "v_proj"})},
      {"phi3",
       phi3(2),
       2,
       {{"qkv_proj", "column 0: 0-8,16-20,24-28 / 8-16,20-24,28-32"},
        {"o_proj", "row 1: 0-8 / 8-16"},
        {"gate_up_proj", "column 0: 0-12,24-36 / 12-24,36-48"},
        {"down_proj", "row 1: 0-12 / 12-24"}}},
      {"bloom", fused("bloom", "BloomBlock", "self_attention", 48), 2, neox},
      {"gpt_neox", fused("gpt_neox", "GPTNeoXLayer", "attention", 48), 2, neox},
      {"falcon, a key for two queries", fused("falcon", "FalconDecoderLayer", "self_attention", 32, 2), 2,
       with(neox, {{"query_key_value", "column 0: 0-16 / 16-32"}})},
      {"chatglm", fused("chatglm", "GLMBlock", "self_attention", 32, 2, 48), 2,
       with(neox, {{"query_key_value", "column 0: 0-8,16-20,24-28 / 8-16,20-24,28-32"},
                   {"dense_h_to_4h", "column 0: 0-12,24-36 / 12-24,36-48"}})},
      {"opt", opt(), 2, with(separate, {{"fc1", "column 0: 0-32 / 32-64"}, {"fc2", "row 1: 0-32 / 32-64"}})},
      {"gptj", gptj(), 2, with(separate, {{"fc_in", "column 0: 0-32 / 32-64"}, {"fc_out", "row 1: 0-32 / 32-64"}})},
      {"t5",
       t5(),
       2,
       {{"q", "column 0: 0-8 / 8-16"},
        {"k", "column 0: 0-8 / 8-16"},
        {"v", "column 0: 0-8 / 8-16"},
        {"o", "row 1: 0-8 / 8-16"},
        {"relative_attention_bias", "column 1: 0-2 / 2-4"},
        {"wi", "column 0: 0-32 / 32-64"},
        {"wo", "row 1: 0-32 / 32-64"}}},
      {"bert",
       bert(),
       2,
       {{"query", "column 0: 0-8 / 8-16"},
        {"key", "column 0: 0-8 / 8-16"},
        {"value", "column 0: 0-8 / 8-16"},
        {"attention.output.dense", "row 1: 0-8 / 8-16"},
        {"intermediate.dense", "column 0: 0-32 / 32-64"},
        {"0.output.dense", "row 1: 0-32 / 32-64"}}},
      {"qwen-vl", qwen_vl(), 2,
       with(kLlama,
            {{"attn.qkv", "column 0: 0-4,8-12,16-20 / 4-8,12-16,20-24"},
             {"attn.proj", "row 1: 0-4 / 4-8"},
             {"visual.blocks.0.mlp.gate_proj", "column 0: 0-6 / 6-12"},
             {"visual.blocks.0.mlp.up_proj", "column 0: 0-6 / 6-12"},
             {"visual.blocks.0.mlp.down_proj", "row 1: 0-6 / 6-12"},
             {"model.layers.0.mlp.gate_proj", kLlama.at("gate_proj")},
             {"model.layers.0.mlp.up_proj", kLlama.at("up_proj")},
             {"model.layers.0.mlp.down_proj", kLlama.at("down_proj")}},
            {"gate_proj", "up_proj", "down_proj"})},
  };
}

}  // namespace

TEST(Heuristics, Models) {
  for (const ModelCase& c : cases()) {
    SCOPED_TRACE(c.name);
    const Plan plan = plan_for(c.model, c.size);
    expect_plan(plan, c.expected);
    EXPECT_EQ(plan.warnings.empty(), std::string(c.name) != "llama 4, two key/value heads");
    EXPECT_EQ(plan_for(c.model, 1).decisions.size(), plan.decisions.size());
  }
}

// Four blocks of queries, values and keys, each cut by heads; the layer that takes them together has the same blocks.
TEST(Heuristics, Codegen) {
  Model model = gptj(true);
  model.facts.heads = model.facts.kv_heads = 8;
  model.facts.head_dim = 2;
  const Plan plan = plan_for(model, 2);
  EXPECT_EQ(brief(*plan.find("transformer.h.0.attn.out_proj")), "row 1: 0-2,4-6,8-10,12-14 / 2-4,6-8,10-12,14-16");
  const Decision& qkv = *plan.find("transformer.h.0.attn.qkv_proj");
  EXPECT_EQ(qkv.ranges[0].size(), 12U);
  EXPECT_EQ(qkv.ranges[0][1], (shard::Range{4, 6}));
  EXPECT_EQ(qkv.ranges[1][11], (shard::Range{46, 48}));
  EXPECT_EQ(qkv.sizes(), (Sizes{24, 24}));
  model.facts.heads = model.facts.kv_heads = 2;
  model.facts.head_dim = 8;
  EXPECT_HAS(error_of([&] { plan_for(model, 2); }), "2 heads are not 4 blocks");
  model.facts.heads = model.facts.kv_heads = 4;
  model.facts.head_dim = 4;
  EXPECT_HAS(error_of([&] { plan_for(model, 2); }),
             "4 heads are 4 blocks of 1, each of which needs a head for each of 2 ranks");
}

TEST(Heuristics, WidthsOfAttentions) {
  const auto widths = plan_for(llama(4), 3).widths;
  ASSERT_EQ(widths.size(), 1U);
  const auto& attention = widths.at("model.layers.0.self_attn");
  EXPECT_EQ(attention.at("num_heads"), (Sizes{2, 1, 1}));
  EXPECT_EQ(attention.at("num_key_value_heads"), (Sizes{2, 1, 1}));
  EXPECT_EQ(attention.at("hidden_size"), (Sizes{8, 4, 4}));
  EXPECT_EQ(plan_for(bert(), 2).widths.at("bert.encoder.layer.0.attention.self").at("all_head_size"), (Sizes{8, 8}));
  EXPECT_EQ(plan_for(t5(), 4).widths.at("encoder.block.0.layer.0.SelfAttention").at("inner_dim"), (Sizes{4, 4, 4, 4}));
  EXPECT_EQ(plan_for(deepseek_v2(), 2).widths.at("model.layers.1.self_attn").at("num_heads"), (Sizes{2, 2}));
}

TEST(Heuristics, WhatIsRefused) {
  for (const char* type : {"deberta", "flaubert", "fsmt", "gpt2", "led", "longformer", "xlm", "xlnet", "GPT2"}) {
    Model model = llama();
    model.facts.model_type = type;
    EXPECT_HAS(error_of([&] { plan_for(model, 2); }), "partition_config") << type;
  }
  EXPECT_HAS(error_of([] { plan_for(fused("bloom", "BloomBlock", "self_attention", 50), 2); }),
             "50 outputs are not 4 query heads");
  // A norm over all heads.
  Model model = llama();
  model.norms("model.layers.0.self_attn", {"q_norm"}, 16);
  EXPECT_HAS(error_of([&] { plan_for(model, 2); }), "takes all heads together");
  // Not whole heads; no partner; nothing.
  model = llama(3);
  model.facts.kv_heads = 3;
  EXPECT_HAS(error_of([&] { plan_for(model, 2); }), "16 elements are not 3 whole heads");
  model = Model{{}, facts_of("odd")};
  model.list("layers", "0", "Odd")
      .linears("layers.0.attention", {{"q", 16, 16}})
      .linears("layers.0", {{"down_proj", 16, 16}});
  EXPECT_HAS(error_of([&] { plan_for(model, 2); }), "no row layer in layers.0.attention");
  model = Model{{}, facts_of("odd")};
  model.linears("", {{"one", 8, 8}, {"two", 8, 8}});
  EXPECT_HAS(error_of([&] { plan_for(model, 2); }), "no policy for this model of type 'odd'");
}

// One key and value for all queries in one weight with them: every rank has a part, and gathers it.
TEST(Heuristics, MultiQuery) {
  for (const auto& [type, block, attention] : {std::tuple("gpt_bigcode", "GPTBigCodeBlock", "attn"),
                                               std::tuple("falcon", "FalconDecoderLayer", "self_attention")}) {
    const Plan plan = plan_for(fused(type, block, attention, 24), 3);
    const Decision& qkv = *plan.find(std::string("transformer.h.0.") + attention + ".query_key_value");
    EXPECT_EQ(brief(qkv), "column 0: 0-8,16-19 / 8-12,19-22 / 12-16,22-24");
    EXPECT_EQ(qkv.tail, (Sizes{3, 3, 2}));
    EXPECT_EQ(qkv.own_sizes(), (Sizes{8, 4, 4}));
    EXPECT_HAS(plan.text(), "the last 8 gathered");
  }
}

TEST(Heuristics, UnknownLayoutsAreHeadByHeadWithAWarning) {
  const Plan plan = plan_for(fused("new", "NewThing", "attention", 48), 2);
  EXPECT_EQ(brief(*plan.find("transformer.h.0.attention.query_key_value")), "column 0: 0-24 / 24-48");
  ASSERT_EQ(plan.warnings.size(), 1U);
  EXPECT_HAS(plan.warnings[0], "head by head");
}

// [in, out] weights; experts turned round.
TEST(Heuristics, TurnedWeights) {
  Model model{{}, facts_of("openai-gpt")};
  model.list("h", "0", "Block");
  for (const auto& [name, inputs, outputs] :
       Layers{{"attn.c_attn", 16, 48}, {"attn.c_proj", 16, 16}, {"mlp.c_fc", 16, 64}, {"mlp.c_proj", 64, 16}})
    model.add(std::string("h.0.") + name, Module::Kind::Conv1D, {inputs, outputs}, outputs);
  expect_plan(plan_for(model, 2), {{"c_attn", "column 1: 0-8,16-24,32-40 / 8-16,24-32,40-48"},
                                   {"attn.c_proj", "row 0: 0-8 / 8-16"},
                                   {"c_fc", "column 1: 0-32 / 32-64"},
                                   {"mlp.c_proj", "row 0: 0-32 / 32-64"}});
  Model turned = mixtral(true);
  for (Module& m : turned.modules)
    if (m.kind == Module::Kind::Experts) std::swap(m.weight_sizes[1], m.weight_sizes[2]);
  const Plan plan = plan_for(turned, 2);
  EXPECT_EQ(brief(*plan.find("model.layers.0.mlp.experts", "gate_up_proj")), "column 2: 0-12,24-36 / 12-24,36-48");
  EXPECT_EQ(brief(*plan.find("model.layers.0.mlp.experts", "down_proj")), "row 1: 0-12 / 12-24");
  for (Module& m : turned.modules)
    if (m.kind == Module::Kind::Experts) m.bias = 8;
  EXPECT_EQ(brief(*plan_for(turned, 2).find("model.layers.0.mlp.experts", "gate_up_proj")),
            "column 2: 0-24 / 24-48");  // pairs of gate and up
}

// Rows of whole 16 bytes for each rank, here 8 elements of two bytes.
TEST(Heuristics, GrainOfExperts) {
  const Model model = mixtral(true);
  PlanOptions options;
  options.expert_grain = 8;
  const auto plan = [&](int size) {
    options.size = size;
    return make_plan(model.modules, model.facts, options);
  };
  EXPECT_EQ(brief(*plan(2).find("model.layers.0.mlp.experts", "gate_up_proj")), "column 1: 0-16,24-40 / 16-24,40-48");
  EXPECT_EQ(brief(*plan(2).find("model.layers.0.mlp.experts", "down_proj")), "row 2: 0-16 / 16-24");
  EXPECT_HAS(error_of([&] { plan(4); }), "inner width of 24 cannot be dealt out to 4 ranks in multiples of 8");
  options.expert_grain = 16;
  EXPECT_HAS(error_of([&] { plan(2); }), "in multiples of 16: torch's grouped product");
}

}  // namespace tessera::parallel
