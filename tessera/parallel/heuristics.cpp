// Decisions from names and order, for models that nobody has written rules for.
//
// Note [Blocks]
//   Looked at are the elements of lists of blocks (layers of a transformer). Linear layers that lead back to the width of the
//   model are row layers: those with a name that says so and, in modules without one, those directly before a norm, where the
//   first norm of a block comes after the last layer of the one before. All others are column layers. What a row layer takes
//   must have been cut by column layers of the same attention or MLP; a block without a row layer stays whole.
#include <algorithm>
#include <array>

#include "tessera/base/error.h"
#include "tessera/parallel/cutting.h"

namespace tessera::parallel {
namespace {

struct Refusal {
  const char* model_type;
  const char* reason;
};
constexpr std::array<Refusal, 10> kRefused{{
    {"deberta", "its relative positions pass through the query and key layers of all heads together"},
    {"deberta-v2", "its relative positions pass through the query and key layers of all heads together"},
    {"flaubert", "its blocks lie in parallel lists of attentions, norms and MLPs"},
    {"fsmt", "its attention keeps the full width in its reshapes"},
    {"gpt2", "its layers are Conv1D with query, key and value in one and a split of fixed size"},
    {"led", "its attention runs over windows with layers of their own for global tokens"},
    {"longformer", "its attention runs over windows with layers of their own for global tokens"},
    {"xlm", "its blocks lie in parallel lists of attentions, norms and MLPs"},
    {"xlnet", "its attention weights are no linear layers"},
    {"reformer", "its attention hashes all heads together"},
}};

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

// Whether `path` ends with these components.
bool ends_with(const std::string& path, const std::string& ending) {
  return path == ending || path.ends_with("." + ending);
}

bool never_cut(const PlanBuilder& builder, const Module& m) {
  const std::string name = last_of(m.path);
  if (name == "q_a_proj" || name == "kv_a_proj_with_mqa" || name == "shared_expert_gate" || name == "router")
    return true;
  if (ends_with(m.path, "mlp.gate") || ends_with(m.path, "block_sparse_moe.gate")) return true;
  return name == "gate" && builder.find(parent_of(m.path) + ".experts") != nullptr;
}

bool named_row(const std::string& path) {
  const std::string name = last_of(path);
  if (contains(name, "o_proj") || contains(name, "out_proj") || contains(name, "down_proj")) return true;
  for (const char* ending : {"attention.dense", "self_attention.dense", "self_attn.dense", "dense_4h_to_h", "w2",
                             "attn.c_proj", "mlp.c_proj", "attn.proj", "fc_out", "wo", "Wo"})
    if (ends_with(path, ending)) return true;
  return false;
}

bool fused_qkv(const std::string& path) {
  const std::string name = last_of(path);
  return contains(name, "qkv_proj") || contains(name, "query_key_value") || ends_with(path, "self_attn.W_pack") ||
         name == "c_attn" || name == "Wqkv" || name == "qkv";
}

// ---- fused query, key and value

enum class FusedOrder : uint8_t {
  Heads,   // each head's query (or queries of a group), key and value, head by head
  Blocks,  // all queries, all keys, all values
  Codegen  // four of [queries, values, keys]
};
struct Fused {
  const char* class_name;
  FusedOrder layout;
};
// Orders by the class of the block or the attention; the longest name that is part of it counts.
constexpr std::array<Fused, 17> kFused{{{"CodeGenBlock", FusedOrder::Codegen},
                                        {"BloomBlock", FusedOrder::Heads},
                                        {"GLMBlock", FusedOrder::Blocks},
                                        {"MPTBlock", FusedOrder::Blocks},
                                        {"MptBlock", FusedOrder::Blocks},
                                        {"BaichuanLayer", FusedOrder::Blocks},
                                        {"QWenBlock", FusedOrder::Blocks},
                                        {"FalconDecoderLayer", FusedOrder::Heads},
                                        {"GPTBigCodeBlock", FusedOrder::Heads},
                                        {"DecoderLayer", FusedOrder::Blocks},
                                        {"Phi3DecoderLayer", FusedOrder::Blocks},
                                        {"GPTNeoXLayer", FusedOrder::Heads},
                                        {"PersimmonDecoderLayer", FusedOrder::Heads},
                                        {"FuyuDecoderLayer", FusedOrder::Heads},
                                        {"DbrxBlock", FusedOrder::Blocks},
                                        {"VisionBlock", FusedOrder::Blocks},
                                        {"GPTNeoXJapaneseLayer", FusedOrder::Heads}}};
constexpr int64_t kCodegenBlocks = 4;

FusedOrder layout_of(PlanBuilder& builder, const Module& m, const std::string& block) {
  const Fused* found = nullptr;
  for (std::string at = parent_of(m.path); is_inside(at, block); at = parent_of(at)) {
    const Module* around = builder.find(at);
    for (const Fused& fused : kFused)
      if (around != nullptr && contains(around->class_name, fused.class_name) &&
          (found == nullptr || std::string_view(found->class_name).size() < std::string_view(fused.class_name).size()))
        found = &fused;
    if (at == block) break;
  }
  if (found != nullptr) return found->layout;
  if (m.kind == Module::Kind::Conv1D) return FusedOrder::Blocks;
  builder.warn(c10::str("unknown layout of query, key and value in one layer, taken as head by head: ", m.path,
                        "; if it is another one give it a rule with 'shape' in partition_config.layer_specs"));
  return FusedOrder::Heads;
}

struct Subs {
  Sizes sizes;
  std::vector<SizeRule> rules;
  Sizes tail = {};  // Decision::tail
};

// Query, key and value of `outputs` elements together; notes how many heads the attention deals out.
Subs subs_of_qkv(PlanBuilder& builder, const Module& m, FusedOrder layout, int64_t outputs) {
  const ModelFacts& facts = builder.facts().of(m.path);
  const int64_t heads = facts.heads;
  const int64_t head_dim = facts.head_dim > 0 || heads == 0 ? facts.head_dim : facts.hidden / heads;
  const std::string attention = parent_of(m.path);
  if (heads == 0 || head_dim == 0) {
    TESSERA_CHECK_VALUE(layout == FusedOrder::Blocks && outputs % 3 == 0, "parallel", m.path, ": ", outputs,
                        " outputs of query, key and value cannot be told apart without the model's numbers of heads");
    return {Sizes(3, outputs / 3), std::vector<SizeRule>(3, builder.size_rule(m, outputs / 3))};
  }
  const int64_t rest = outputs - heads * head_dim;
  TESSERA_CHECK_VALUE(rest > 0 && rest % (2 * head_dim) == 0, "parallel", m.path, ": ", outputs, " outputs are not ",
                      heads, " query heads of ", head_dim, " elements with their keys and values");
  const int64_t kv_heads = rest / (2 * head_dim);
  if (kv_heads == 1 && heads > 1) {  // the one head comes after the queries in every layout
    builder.set_heads(attention, heads);
    return {{heads * head_dim, rest}, {{.heads = heads}, {}}, part_sizes(rest, builder.options().size)};
  }
  builder.set_heads(attention, kv_heads);
  if (layout == FusedOrder::Codegen) {
    TESSERA_CHECK_VALUE(heads % kCodegenBlocks == 0 && kv_heads == heads, "parallel", m.path, ": ", heads,
                        " heads are not ", kCodegenBlocks, " blocks of query, value and key");
    const int64_t many = heads / kCodegenBlocks;
    // The model's code reshapes into the four blocks, which fails without heads.
    TESSERA_CHECK_VALUE(many >= builder.options().size, "parallel", m.path, ": ", heads, " heads are ", kCodegenBlocks,
                        " blocks of ", many, ", each of which needs a head for each of ", builder.options().size,
                        " ranks; use at most ", many, " (tensor_parallel.autotp_size)");
    return {Sizes(3 * kCodegenBlocks, many * head_dim), std::vector<SizeRule>(3 * kCodegenBlocks, {.heads = many})};
  }
  if (layout == FusedOrder::Heads) return {{outputs}, {{.heads = kv_heads}}};
  return {{heads * head_dim, kv_heads * head_dim, kv_heads * head_dim}, std::vector<SizeRule>(3, {.heads = kv_heads})};
}

// ---- a block

struct Item {
  const Module* module;
  bool row = false;
};

// Linear layers of a block, without those that are never cut.
std::vector<Item> items_of(const PlanBuilder& builder, const std::vector<const Module*>& block) {
  std::vector<Item> items;
  std::vector<const Module*> order;  // with norms between
  for (const Module* m : block)
    if (m->kind == Module::Kind::Linear || m->kind == Module::Kind::Conv1D || m->kind == Module::Kind::Norm)
      order.push_back(m);
  for (size_t i = 0; i < order.size(); ++i) {
    const Module* m = order[i];
    if (m->kind == Module::Kind::Norm || never_cut(builder, *m)) continue;
    const bool before_norm = order.size() > 1 && order[(i + 1) % order.size()]->kind == Module::Kind::Norm &&
                             std::ranges::none_of(order, [&](const Module* other) {
                               return named_row(other->path) && parent_of(other->path) == parent_of(m->path);
                             });
    items.push_back({m, before_norm || named_row(m->path)});
  }
  return items;
}

// Where to look for the partner of a layer: in its attention, or the nearest module around it with a row layer.
std::string partnership(const std::vector<Item>& items, const Module& m, const std::string& block) {
  const std::string attention = attention_around(parent_of(m.path));
  if (!attention.empty() && is_inside(attention, block)) return attention;
  for (std::string at = parent_of(m.path); is_inside(at, block) && at != block; at = parent_of(at))
    if (std::ranges::any_of(items, [&](const Item& item) { return item.row && is_inside(item.module->path, at); }))
      return at;
  return block;
}

void cut_block(PlanBuilder& builder, const std::string& block, const std::vector<const Module*>& modules) {
  const std::vector<Item> items = items_of(builder, modules);
  const auto rows_in = [&](const std::string& path) {
    std::vector<const Module*> rows;
    for (const Item& item : items)
      if (item.row && is_inside(item.module->path, path)) rows.push_back(item.module);
    return rows;
  };
  if (rows_in(block).empty()) return;
  // Fused layers come first: they tell how the heads of their attention lie.
  std::vector<std::string> codegen;
  for (const Item& item : items) {
    const Module& m = *item.module;
    if (item.row || !fused_qkv(m.path)) continue;
    const int64_t dim = m.kind == Module::Kind::Conv1D ? 1 : 0;
    const FusedOrder layout = layout_of(builder, m, block);
    const Subs subs = subs_of_qkv(builder, m, layout, m.weight_sizes[dim]);
    builder.cut(m, Partition::Column, dim, "heuristics: query, key and value in one", subs.sizes, subs.rules).tail =
        subs.tail;
    if (layout == FusedOrder::Codegen) codegen.push_back(parent_of(m.path));
  }
  for (const Item& item : items) {
    const Module& m = *item.module;
    const bool turned = m.kind == Module::Kind::Conv1D;
    const int64_t outputs = turned ? 1 : 0, inputs = 1 - outputs;
    if (item.row) {
      const bool blocks = std::ranges::find(codegen, parent_of(m.path)) != codegen.end();
      const int64_t many = builder.heads_of(m.path) / kCodegenBlocks;
      if (blocks)
        builder.cut(m, Partition::Row, inputs, "heuristics: row layer",
                    Sizes(kCodegenBlocks, m.weight_sizes[inputs] / kCodegenBlocks),
                    std::vector<SizeRule>(kCodegenBlocks, {.heads = many}));
      else
        builder.cut(m, Partition::Row, inputs, "heuristics: row layer");
      continue;
    }
    if (fused_qkv(m.path)) continue;
    const std::string where = partnership(items, m, block);
    const std::vector<const Module*> rows = rows_in(where);
    TESSERA_CHECK_VALUE(!rows.empty(), "parallel", m.path, ": there is no row layer in ", where,
                        " that takes its outputs together; give both a rule in partition_config.layer_specs");
    const int64_t half = m.weight_sizes[outputs] / 2;
    const auto takes_half = [&](const Module* row) {
      return parent_of(row->path) == parent_of(m.path) &&
             row->weight_sizes[row->kind == Module::Kind::Conv1D ? 0 : 1] == half;
    };
    const bool attention = where == attention_around(parent_of(m.path)) && !where.empty();
    if (contains(last_of(m.path), "gate_up_proj") || (!attention && std::ranges::any_of(rows, takes_half)))
      builder.cut(m, Partition::Column, outputs, "heuristics: gate and up in one", {half, half});
    else
      builder.cut(m, Partition::Column, outputs, "heuristics: column layer");
  }
  for (const Module* m : modules) {
    // T5's bias has a number for each head.
    if (m->kind == Module::Kind::Embedding && last_of(m->path) == "relative_attention_bias")
      builder.cut(*m, Partition::Column, 1, "heuristics: bias of each head");
    if (m->kind == Module::Kind::Experts)
      builder.cut_experts(*m, m->param == "down_proj" ? Partition::Row : Partition::Column,
                          "heuristics: experts in one");
  }
}

}  // namespace

void follow_heuristics(PlanBuilder& builder) {
  const std::string type = lower(builder.facts().model_type);
  for (const Refusal& refused : kRefused)
    TESSERA_CHECK_VALUE(type != refused.model_type, "parallel", "models of type '", type,
                        "' are not cut by heuristics: ", refused.reason,
                        "; write rules for it in tensor_parallel.partition_config");
  std::vector<std::string> order;
  std::unordered_map<std::string, std::vector<const Module*>> blocks;
  for (const Module& m : builder.modules()) {
    const std::string block = builder.block_of(m.path);
    if (block.empty()) continue;
    if (m.path == block) order.push_back(block);
    blocks[block].push_back(&m);
  }
  bool any = false;
  for (const std::string& block : order) {
    cut_block(builder, block, blocks.at(block));
    any = any || std::ranges::any_of(blocks.at(block), [&](const Module* m) { return builder.decided(*m) != nullptr; });
  }
  TESSERA_CHECK_VALUE(
      any, "parallel", "no policy for this model", type.empty() ? "" : " of type '" + type + "'", ": none of its ",
      order.size(),
      " blocks (elements of module lists) has a row layer that names or norms show; write rules for it in "
      "tensor_parallel.partition_config");
}

}  // namespace tessera::parallel
