// Module lists of small models, one block each, as a front end would make them: width 16, 4 heads of 4, inner width 24, 32 tokens.
#pragma once

#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tessera/parallel/plan.h"

namespace tessera::parallel {

// Name, outputs, inputs.
using Layers = std::vector<std::tuple<const char*, int64_t, int64_t>>;

struct Model {
  std::vector<Module> modules;
  ModelFacts facts;

  Module& add(const std::string& path, Module::Kind kind, Sizes sizes = {}, int64_t bias = 0) {
    Module m;
    m.path = path;
    m.kind = kind;
    m.weight_sizes = std::move(sizes);
    m.bias = bias;
    modules.push_back(m);
    return modules.back();
  }
  Model& list(const std::string& path, const std::string& element = "", const std::string& class_name = "") {
    add(path, Module::Kind::List);
    if (!element.empty()) other(path + "." + element, class_name);
    return *this;
  }
  Model& other(const std::string& path, const std::string& class_name = "",
               std::map<std::string, int64_t> attributes = {}) {
    Module& m = add(path, Module::Kind::Other);
    m.class_name = class_name;
    m.attributes = std::move(attributes);
    return *this;
  }
  Model& linears(const std::string& parent, const Layers& layers) {
    for (const auto& [name, outputs, inputs] : layers)
      add(parent.empty() ? name : parent + "." + name, Module::Kind::Linear, {outputs, inputs});
    return *this;
  }
  Model& norms(const std::string& parent, const std::vector<const char*>& names, int64_t size = 16) {
    for (const char* name : names)
      add(parent.empty() ? name : parent + "." + name, Module::Kind::Norm, {size});
    return *this;
  }
  Model& embedding(const std::string& path, int64_t rows = 32, int64_t width = 16) {
    add(path, Module::Kind::Embedding, {rows, width});
    return *this;
  }
  Model& experts(const std::string& path, int64_t many, int64_t inner) {
    add(path, Module::Kind::Experts, {many, 2 * inner, 16}).param = "gate_up_proj";
    add(path, Module::Kind::Experts, {many, 16, inner}).param = "down_proj";
    return *this;
  }
};

inline ModelFacts facts_of(const std::string& type, int64_t kv_heads = 4) {
  ModelFacts facts;
  facts.model_type = type;
  facts.heads = 4;
  facts.kv_heads = kv_heads;
  facts.head_dim = 4;
  facts.hidden = 16;
  facts.vocabulary = 32;
  return facts;
}

inline const Layers& gated_mlp() {
  static const Layers layers{{"gate_proj", 24, 16}, {"up_proj", 24, 16}, {"down_proj", 16, 24}};
  return layers;
}

// Llama and what is built like it, up to the MLP.
inline Model llama_like(const std::string& type, const std::string& name, int64_t kv_heads) {
  Model m{{}, facts_of(type, kv_heads)};
  const std::string attention = "model.layers.0.self_attn";
  m.embedding("model.embed_tokens").list("model.layers", "0", name + "DecoderLayer");
  m.other(attention, name + "Attention", {{"num_heads", 4}, {"num_key_value_heads", kv_heads}, {"hidden_size", 16}});
  m.linears(attention,
            {{"q_proj", 16, 16}, {"k_proj", 4 * kv_heads, 16}, {"v_proj", 4 * kv_heads, 16}, {"o_proj", 16, 16}});
  return m;
}
inline Model& with_norms_and_head(Model& m) {
  m.norms("model.layers.0", {"input_layernorm", "post_attention_layernorm"}).norms("model", {"norm"});
  return m.linears("", {{"lm_head", 32, 16}});
}
inline Model llama(int64_t kv_heads = 2, const std::string& type = "llama") {
  Model m = llama_like(type, "Llama", kv_heads);
  return with_norms_and_head(m.linears("model.layers.0.mlp", gated_mlp()));
}
inline Model qwen3() {
  Model m = llama_like("qwen3", "Qwen3", 2);
  m.norms("model.layers.0.self_attn", {"q_norm", "k_norm"}, 4);
  return with_norms_and_head(m.linears("model.layers.0.mlp", gated_mlp()));
}
// In the spelling of Transformers 4.x, or 5.x.
inline Model mixtral(bool in_one) {
  Model m = llama_like("mixtral", "Mixtral", 2);
  const std::string moe = in_one ? "model.layers.0.mlp" : "model.layers.0.block_sparse_moe";
  m.other(moe, "MixtralSparseMoeBlock");
  if (in_one) {
    m.add(moe + ".gate", Module::Kind::Other, {2, 16});
    m.experts(moe + ".experts", 2, 24);
  } else {
    m.linears(moe, {{"gate", 2, 16}}).list(moe + ".experts");
    for (const std::string& expert : {moe + ".experts.0", moe + ".experts.1"})
      m.other(expert).linears(expert, {{"w1", 24, 16}, {"w2", 16, 24}, {"w3", 24, 16}});
  }
  return with_norms_and_head(m);
}
inline Model qwen2_moe(bool in_one) {
  Model m = llama_like("qwen2_moe", "Qwen2Moe", 2);
  const std::string mlp = "model.layers.0.mlp";
  m.other(mlp, "Qwen2MoeSparseMoeBlock");
  if (in_one) {
    m.add(mlp + ".gate", Module::Kind::Other, {2, 16});
    m.experts(mlp + ".experts", 2, 24);
  } else {
    m.linears(mlp, {{"gate", 2, 16}})
        .list(mlp + ".experts")
        .other(mlp + ".experts.0")
        .linears(mlp + ".experts.0", gated_mlp());
  }
  m.other(mlp + ".shared_expert")
      .linears(mlp + ".shared_expert", gated_mlp())
      .linears(mlp, {{"shared_expert_gate", 1, 16}});
  return with_norms_and_head(m);
}
// Two blocks: one with a dense MLP and queries without a latent, one with experts.
inline Model deepseek_v2() {
  Model m{{}, facts_of("deepseek_v2")};
  m.facts.head_dim = 6;  // queries and keys; values have 4
  m.embedding("model.embed_tokens").list("model.layers");
  for (const bool dense : {true, false}) {
    const std::string block = dense ? "model.layers.0" : "model.layers.1", attention = block + ".self_attn",
                      mlp = block + ".mlp";
    m.other(block, "DeepseekV2DecoderLayer").other(attention, "DeepseekV2Attention", {{"num_heads", 4}});
    if (dense)
      m.linears(attention, {{"q_proj", 24, 16}});
    else
      m.linears(attention, {{"q_a_proj", 10, 16}})
          .norms(attention, {"q_a_layernorm"}, 10)
          .linears(attention, {{"q_b_proj", 24, 10}});
    m.linears(attention, {{"kv_a_proj_with_mqa", 8 + 2, 16}}).norms(attention, {"kv_a_layernorm"}, 8);
    m.linears(attention, {{"kv_b_proj", 4 * (4 + 4), 8}, {"o_proj", 16, 16}}).other(mlp);
    if (dense) {
      m.linears(mlp, gated_mlp());
    } else {
      m.list(mlp + ".experts")
          .other(mlp + ".experts.0")
          .linears(mlp + ".experts.0", gated_mlp())
          .linears(mlp, {{"gate", 2, 16}});
      m.other(mlp + ".shared_experts").linears(mlp + ".shared_experts", gated_mlp());
    }
    m.norms(block, {"input_layernorm", "post_attention_layernorm"});
  }
  m.norms("model", {"norm"}).linears("", {{"lm_head", 32, 16}});
  return m;
}
inline Model phi3(int64_t kv_heads = 2) {
  Model m{{}, facts_of("phi3", kv_heads)};
  const std::string block = "model.layers.0";
  m.embedding("model.embed_tokens")
      .list("model.layers", "0", "Phi3DecoderLayer")
      .other(block + ".self_attn", "Phi3Attention");
  m.linears(block + ".self_attn", {{"o_proj", 16, 16}, {"qkv_proj", 16 + 8 * kv_heads, 16}}).other(block + ".mlp");
  return with_norms_and_head(m.linears(block + ".mlp", {{"gate_up_proj", 48, 16}, {"down_proj", 16, 24}}));
}
// Blocks with query_key_value and dense (Bloom, ChatGLM, Falcon, GPT-NeoX): outputs of these, and of the MLP's first layer.
inline Model fused(const std::string& type, const std::string& block, const std::string& attention, int64_t qkv,
                   int64_t kv_heads = 4, int64_t up = 24) {
  Model m{{}, facts_of(type, kv_heads)};
  m.embedding("transformer.word_embeddings")
      .list("transformer.h", "0", block)
      .norms("transformer.h.0", {"input_layernorm"});
  const std::string at = "transformer.h.0." + attention;
  m.other(at, "", {{"num_heads", 4}, {"hidden_size", 16}})
      .linears(at, {{"query_key_value", qkv, 16}, {"dense", 16, 16}});
  m.norms("transformer.h.0", {"post_attention_layernorm"}).other("transformer.h.0.mlp");
  m.linears("transformer.h.0.mlp", {{"dense_h_to_4h", up, 16}, {"dense_4h_to_h", 16, 24}});
  m.norms("transformer", {"ln_f"}).linears("", {{"lm_head", 32, 16}});
  return m;
}
inline Model opt() {
  Model m{{}, facts_of("opt")};
  const std::string block = "model.decoder.layers.0";
  m.embedding("model.decoder.embed_tokens").embedding("model.decoder.embed_positions", 10);
  m.list("model.decoder.layers", "0", "OPTDecoderLayer")
      .other(block + ".self_attn", "OPTAttention", {{"num_heads", 4}, {"embed_dim", 16}});
  m.linears(block + ".self_attn", {{"k_proj", 16, 16}, {"v_proj", 16, 16}, {"q_proj", 16, 16}, {"out_proj", 16, 16}});
  m.norms(block, {"self_attn_layer_norm"})
      .linears(block, {{"fc1", 64, 16}, {"fc2", 16, 64}})
      .norms(block, {"final_layer_norm"});
  return m;
}
inline Model gptj(bool codegen = false) {
  Model m{{}, facts_of(codegen ? "codegen" : "gptj")};
  const std::string block = "transformer.h.0", attention = block + ".attn";
  m.embedding("transformer.wte")
      .list("transformer.h", "0", codegen ? "CodeGenBlock" : "GPTJBlock")
      .norms(block, {"ln_1"});
  m.other(attention, "", {{"num_attention_heads", 4}});
  if (codegen)
    m.linears(attention, {{"qkv_proj", 48, 16}});
  else
    m.linears(attention, {{"k_proj", 16, 16}, {"v_proj", 16, 16}, {"q_proj", 16, 16}});
  m.linears(attention, {{"out_proj", 16, 16}})
      .other(block + ".mlp")
      .linears(block + ".mlp", {{"fc_in", 64, 16}, {"fc_out", 16, 64}});
  return m.linears("", {{"lm_head", 32, 16}});
}
inline Model t5() {
  Model m{{}, facts_of("t5")};
  const std::string layers = "encoder.block.0.layer", attention = layers + ".0.SelfAttention",
                    mlp = layers + ".1.DenseReluDense";
  m.embedding("shared").list("encoder.block", "0", "T5Block").list(layers).other(layers + ".0", "T5LayerSelfAttention");
  m.other(attention, "T5Attention", {{"n_heads", 4}, {"inner_dim", 16}});
  m.linears(attention, {{"q", 16, 16}, {"k", 16, 16}, {"v", 16, 16}, {"o", 16, 16}});
  m.embedding(attention + ".relative_attention_bias", 8, 4)
      .norms(layers + ".0", {"layer_norm"})
      .other(layers + ".1")
      .other(mlp);
  m.linears(mlp, {{"wi", 64, 16}, {"wo", 16, 64}})
      .norms(layers + ".1", {"layer_norm"})
      .norms("encoder", {"final_layer_norm"});
  return m;
}
inline Model bert() {
  Model m{{}, facts_of("bert")};
  const std::string block = "bert.encoder.layer.0", self = block + ".attention.self";
  m.embedding("bert.embeddings.word_embeddings").list("bert.encoder.layer", "0", "BertLayer");
  m.other(self, "BertSelfAttention", {{"num_attention_heads", 4}, {"all_head_size", 16}});
  m.linears(self, {{"query", 16, 16}, {"key", 16, 16}, {"value", 16, 16}});
  m.linears(block + ".attention.output", {{"dense", 16, 16}}).norms(block + ".attention.output", {"LayerNorm"});
  m.linears(block + ".intermediate", {{"dense", 64, 16}}).linears(block + ".output", {{"dense", 16, 64}});
  return m.norms(block + ".output", {"LayerNorm"});
}
// A tower with a configuration of its own beside a Llama.
inline Model qwen_vl() {
  Model m = llama(2, "qwen2_5_vl");
  ModelFacts vision = facts_of("qwen2_5_vl", 2);
  vision.heads = 2;
  m.facts.parts["visual"] = vision;
  m.list("visual.blocks", "0", "Qwen2_5_VLVisionBlock").norms("visual.blocks.0", {"norm1", "norm2"}, 8);
  m.other("visual.blocks.0.attn", "", {{"num_heads", 2}})
      .linears("visual.blocks.0.attn", {{"qkv", 24, 8}, {"proj", 8, 8}});
  return m.linears("visual.blocks.0.mlp", {{"gate_proj", 12, 8}, {"up_proj", 12, 8}, {"down_proj", 8, 12}});
}

// A decision in few letters: how, the dim, the ranges of each rank.
inline std::string brief(const Decision& d) {
  if (d.sum_gradient) return "sum";
  if (!d.own_use.empty()) return c10::str("own ", d.own_use.begin, "-", d.own_use.end);
  std::string text = c10::str(d.vocabulary ? "vocabulary" : partition_name(d.partition), " ", d.dim, ":");
  for (size_t rank = 0; rank < d.ranges.size(); ++rank) {
    text += rank == 0 ? " " : " / ";
    for (size_t i = 0; i < d.ranges[rank].size(); ++i)
      text += c10::str(i == 0 ? "" : ",", d.ranges[rank][i].begin, "-", d.ranges[rank][i].end);
  }
  return text + (d.gather_output ? " gathered" : "");
}

// All decisions, each under the end of its path.
using Expected = std::map<std::string, std::string>;
inline void expect_plan(const Plan& plan, const Expected& expected) {
  Expected missing = expected;
  for (const Decision& d : plan.decisions) {
    const std::string name = d.param == "weight" ? d.path : d.path + "." + d.param;
    const auto found = std::ranges::find_if(
        expected, [&](const auto& item) { return name == item.first || name.ends_with("." + item.first); });
    if (found == expected.end()) {
      ADD_FAILURE() << name << " is " << brief(d) << ", not named here";
      continue;
    }
    EXPECT_EQ(brief(d), found->second) << name;
    missing.erase(found->first);
  }
  for (const auto& [name, text] : missing)
    ADD_FAILURE() << name << " is whole, not " << text;
}

}  // namespace tessera::parallel
