#include "tessera/nn/cut_model.h"
#include "tessera/nn/sizes.h"

#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <sstream>

#include "tessera/io/file.h"
#include "tessera/nn/cut_layers.h"
#include "tessera/nn/engine.h"
#include "tessera/nn/parallel.h"
#include "tessera/nn/recompute.h"
#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

// Of its own: other files have a kWidth, too.
namespace tessera::nn::cut_model_tests {
namespace {

using comm::Axis;
using testing::error_of;
namespace F = torch::nn::functional;

constexpr int64_t kWidth = 16, kHeads = 4, kHead = 4, kWords = 12, kInner = 20, kRows = 4, kLength = 6;

struct Form {
  bool bias = true, packed = false, tied = false, sequential = false, recompute = false;
  int64_t key_heads = kHeads;
};

torch::nn::Linear line(int64_t in, int64_t out, bool bias) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(bias));
}

// A model as anybody writes it, but that heads are counted by sizes.
struct AttentionImpl : torch::nn::Module, HasFacts {
  explicit AttentionImpl(const Form& form) : form(form) {
    const int64_t keys = form.key_heads * kHead;
    if (form.packed) {
      qkv_proj = register_module("qkv_proj", line(kWidth, kWidth + 2 * keys, form.bias));
    } else {
      q_proj = register_module("q_proj", line(kWidth, kWidth, form.bias));
      k_proj = register_module("k_proj", line(kWidth, keys, form.bias));
      v_proj = register_module("v_proj", line(kWidth, keys, form.bias));
    }
    o_proj = register_module("o_proj", line(kWidth, kWidth, form.bias));
  }
  parallel::ModelFacts facts() const override {
    return {.heads = kHeads, .kv_heads = form.key_heads, .head_dim = kHead};
  }
  at::Tensor forward(const at::Tensor& x) {
    std::vector<at::Tensor> parts;
    if (form.packed) {
      const at::Tensor all = qkv_proj(x);
      const int64_t keys = form.key_heads == 1 ? kHead : all.size(-1) * form.key_heads / (kHeads + 2 * form.key_heads);
      parts = all.split_with_sizes({all.size(-1) - 2 * keys, keys, keys}, -1);
    } else {
      parts = {q_proj(x), k_proj(x), v_proj(x)};
    }
    for (at::Tensor& part : parts)
      part = part.unflatten(-1, {-1, kHead}).transpose(1, 2);
    for (size_t i : {1, 2})
      parts[i] = parts[i].repeat_interleave(parts[0].size(1) / parts[i].size(1), 1);
    return o_proj(at::scaled_dot_product_attention(parts[0], parts[1], parts[2]).transpose(1, 2).flatten(2));
  }
  Form form;
  torch::nn::Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr}, qkv_proj{nullptr};
};
TORCH_MODULE(Attention);

struct MlpImpl : torch::nn::Cloneable<MlpImpl> {
  explicit MlpImpl(const Form& form) : form(form) { reset(); }
  void reset() override {
    if (form.packed) {
      gate_up_proj = register_module("gate_up_proj", line(kWidth, 2 * kInner, form.bias));
    } else {
      gate_proj = register_module("gate_proj", line(kWidth, kInner, form.bias));
      up_proj = register_module("up_proj", line(kWidth, kInner, form.bias));
    }
    down_proj = register_module("down_proj", line(kInner, kWidth, form.bias));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto parts = form.packed ? gate_up_proj(x).chunk(2, -1) : std::vector{gate_proj(x), up_proj(x)};
    const at::Tensor y = down_proj((at::silu(parts[0]) * parts[1]).flatten(0, -2));  // two dims: addmm
    return y.view(x.sizes());
  }
  Form form;
  torch::nn::Linear gate_proj{nullptr}, up_proj{nullptr}, gate_up_proj{nullptr}, down_proj{nullptr};
};
TORCH_MODULE(Mlp);

torch::nn::LayerNorm norm_of() {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth}));
}

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const Form& form) : recomputes(form.recompute) {
    input_layernorm = register_module("input_layernorm", norm_of());
    self_attn = register_module("self_attn", Attention(form));
    post_layernorm = register_module("post_layernorm", norm_of());
    mlp = register_module("mlp", Mlp(form));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto body = [this](const std::vector<at::Tensor>& in) -> std::vector<at::Tensor> {
      const at::Tensor y = in[0] + self_attn(input_layernorm(in[0]));
      return {y + mlp(post_layernorm(y))};
    };
    return recomputes ? recompute(body, {x})[0] : body({x})[0];
  }
  bool recomputes;
  torch::nn::LayerNorm input_layernorm{nullptr}, post_layernorm{nullptr};
  Attention self_attn{nullptr};
  Mlp mlp{nullptr};
};
TORCH_MODULE(Block);

struct Gpt : torch::nn::Module, HasFacts {
  parallel::ModelFacts facts() const override { return {.vocabulary = kWords}; }
  explicit Gpt(const Form& form) : form(form) {
    embed_tokens = register_module(
        "embed_tokens", torch::nn::Embedding(torch::nn::EmbeddingOptions(kWords, kWidth).padding_idx(kWords - 1)));
    if (form.sequential)
      blocks = register_module("layers", torch::nn::Sequential(Block(form), Block(form)));
    else
      layers = register_module("layers", torch::nn::ModuleList(Block(form), Block(form)));
    norm = register_module("norm", norm_of());
    if (!form.tied) lm_head = register_module("lm_head", line(kWidth, kWords, form.bias));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = embed_tokens(tokens);
    if (form.sequential) {
      x = blocks->forward(x);
    } else {
      for (const auto& layer : *layers)
        x = layer->as<Block>()->forward(x);
    }
    x = norm(x);
    const at::Tensor logits = form.tied ? F::linear(x, embed_tokens->weight) : lm_head(x);
    return F::cross_entropy(logits.flatten(0, 1), tokens.roll({1}, {1}).flatten());
  }
  Form form;
  torch::nn::Embedding embed_tokens{nullptr};
  torch::nn::ModuleList layers{nullptr};
  torch::nn::Sequential blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear lm_head{nullptr};
};

// One generator for all threads.
std::shared_ptr<Gpt> built(const Form& form) {
  static std::mutex mutex;
  const std::scoped_lock lock(mutex);
  torch::manual_seed(5);
  return std::make_shared<Gpt>(form);
}

Config config_of(const std::string& section, int stage = 0, int size = 2, const std::string& more = "") {
  return Config::from_json(
      c10::str(R"({"gradient_clipping": 0.7, "train_micro_batch_size_per_gpu": 2, )", more,
               R"("optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "zero_optimization": {"stage": )", stage,
               R"(}, "tensor_parallel": {"autotp_size": )", size, section, "}}"));
}

at::Tensor own_part(const at::Tensor& whole, const shard::CutPtr& cut) {
  if (!cut) return whole;
  std::vector<at::Tensor> parts;
  for (const shard::Range& range : cut->ranges)
    parts.push_back(whole.narrow(cut->dim, range.begin, range.size()));
  return at::cat(parts, cut->dim);
}

const std::string kPackedRules = R"(, "partition_config": {"use_default_specs": false, "layer_specs": [
    {"patterns": [".*\\.o_proj\\.weight$", ".*\\.down_proj\\.weight$"], "partition_type": "row"},
    {"patterns": [".*qkv_proj"], "shape": [[16, 8, 8], -1]}, {"patterns": [".*gate_up_proj"], "shape": [2, -1]}]})";

struct Case {
  const char* name;
  Form form;
  std::string section;
  size_t cuts;  // decisions
};

std::vector<Case> cases() {
  const std::string llama = R"(, "preset_model": "llama")";
  const std::string vocabulary = R"(, "vocab_parallel_lm_head": true)";
  const std::string gathered = R"(, "partition_config": {"layer_specs": [
      {"patterns": [".*_proj"], "gather_output": true}, {"patterns": ["embed"]}]})";
  return {
      {"heuristics", {}, "", 14},
      {"heuristics, without biases, recomputed", {.bias = false, .recompute = true}, "", 14},
      {"Sequential", {.sequential = true}, "", 14},
      {"preset", {.key_heads = 2}, llama, 14},
      {"preset, vocabulary", {}, llama + vocabulary, 16},
      {"preset, tied vocabulary", {.tied = true}, llama + vocabulary, 15},
      {"packed", {.packed = true, .key_heads = 2}, kPackedRules, 8},
      {"packed heuristics, one key", {.packed = true, .key_heads = 1}, "", 8},
      {"gathered", {.bias = true}, gathered, 15},
      {"gathered, tied", {.tied = true}, gathered, 15},
  };
}

}  // namespace

// Losses and weights are those of the whole model in plain PyTorch, in every stage.
TEST(CutModel, TrainsAsTheWholeModel) {
  const at::Tensor tokens = at::randint(kWords, {kRows, kLength});
  for (const Case& one : cases()) {
    const auto whole = built(one.form);
    torch::optim::SGD optimizer(whole->parameters(), torch::optim::SGDOptions(0.5));
    std::vector<double> losses;
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const at::Tensor loss = whole->forward(tokens);
      losses.push_back(loss.item<double>());
      loss.backward();
      torch::nn::utils::clip_grad_norm_(whole->parameters(), 0.7);
      optimizer.step();
    }
    for (int stage = 0; stage <= 3; ++stage) {
      testing::run_axes({{Axis::DpShard, 2}, {Axis::Tp, 2}}, [&](int, const comm::Mesh& mesh) {
        SCOPED_TRACE(c10::str(one.name, ", stage ", stage));
        const auto net = built(one.form);
        auto engine = initialize(net, config_of(one.section, stage), mesh);
        EXPECT_EQ(engine.parallel_plan()->decisions.size(), one.cuts) << engine.parallel_plan()->text();
        const at::Tensor mine = tokens.narrow(0, 2 * mesh.rank(comm::kBatchAxes), 2);
        for (int step = 0; step < 3; ++step) {
          const at::Tensor loss = engine.forward(mine);
          at::Tensor mean = loss.detach().clone();
          mesh.group(Axis::DpShard)->all_reduce(mean, comm::ReduceOp::Sum, "loss");
          EXPECT_NEAR(mean.item<double>() / 2, losses[step], 1e-5) << step;
          loss.backward();
          engine.step();
        }
        for (size_t i = 0; i < engine.core().params().size(); ++i) {
          const std::string& name = engine.core().params()[i].name;
          const at::Tensor master = engine.core().states().get_full(static_cast<int>(i), engine::Quantity::Master);
          const at::Tensor expected = whole->named_parameters()[name];
          const at::Tensor found =
              master.sizes() == expected.sizes() ? expected : own_part(expected, cut_of(*net, name));
          EXPECT_TRUE(at::allclose(master, found, 1e-4, 1e-5)) << name;
        }
      });
    }
  }
}

// Saved at tp 2, loaded and exported whole at tp 1 and 2.
TEST(CutModel, WholeValues) {
  const io::TempFolder dir;
  const at::Tensor tokens = at::randint(kWords, {kRows, kLength});
  const Form form{.packed = true, .key_heads = 2};
  double norm = 0, loss = 0;
  testing::run_axes({{Axis::DpShard, 2}, {Axis::Tp, 2}}, [&](int rank, const comm::Mesh& mesh) {
    const auto net = built(form);
    auto engine = initialize(net, config_of(kPackedRules, 2), mesh);
    engine.forward(tokens).backward();
    engine.step();
    engine.save_checkpoint(dir.path());
    EXPECT_TRUE(engine.save_16bit_model(dir.path(), "weights.bin"));
    if (rank == 0) {
      norm = *engine.core().global_grad_norm();
      EXPECT_EQ(whole_sizes(*net, "layers.0.self_attn.qkv_proj.weight"), (parallel::Sizes{32, kWidth}));
      EXPECT_EQ(net->layers[0]->as<Block>()->self_attn->qkv_proj->options.out_features(), 16);
    }
    const at::Tensor after = engine.forward(tokens);
    if (rank == 0) loss = after.item<double>();
  });
  testing::run_axes({{Axis::DpShard, 2}}, [&](int, const comm::Mesh& mesh) {
    const auto net = built(form);
    auto engine = initialize(net, config_of("", 1, 0), mesh);
    engine.forward(tokens).backward();
    engine.step();
    EXPECT_NEAR(*engine.core().global_grad_norm(), norm, 1e-5);
    EXPECT_TRUE(engine.load_checkpoint(dir.path()));
    EXPECT_NEAR(engine.forward(tokens).item<double>(), loss, 1e-5);
    const std::string bytes = io::read_text(dir / "weights.bin", 1 << 20);
    const auto exported = torch::jit::pickle_load({bytes.begin(), bytes.end()}).toGenericDict();
    for (const auto& param : net->named_parameters())
      EXPECT_TRUE(exported.at(param.key()).toTensor().equal(param.value())) << param.key();
  });
}

// Whole values into a model that is cut over the ranks, from a dict and from files, of which a rank reads its slices.
TEST(CutModel, WholeValuesAreLoadedIntoSlices) {
  const std::string vocabulary = R"(, "preset_model": "llama", "vocab_parallel_lm_head": true)";
  const std::vector<std::pair<Form, std::string>> forms{
      {{.packed = true, .key_heads = 2}, kPackedRules}, {{}, vocabulary}, {{.tied = true}, vocabulary}};
  for (const auto& [form, section] : forms)
    for (const int stage : {0, 2, 3}) {
      const io::TempFolder dir;
      NamedTensors want;
      for (const auto& param : built(form)->named_parameters())
        want.insert(param.key(), at::randn_like(param.value()).detach());
      checkpoint::write_weights(dir / "weights", "model.safetensors", want, {.max_shard_bytes = 2000});
      testing::run_axes({{Axis::DpShard, 2}, {Axis::Tp, 2}}, [&](int, const comm::Mesh& mesh) {
        for (const bool of_files : {false, true}) {
          auto engine = initialize(built(form), config_of(section, stage), mesh);
          const LoadedNames names = of_files ? engine.load_module_state_dict(checkpoint::WeightReader(dir / "weights"))
                                             : engine.load_module_state_dict(want);
          EXPECT_TRUE(names.missing.empty() && names.unexpected.empty());
          const NamedTensors got = engine.module_state_dict();
          for (const auto& item : want) {
            EXPECT_TRUE(got[item.key()].equal(item.value())) << item.key() << ", stage " << stage;
            EXPECT_TRUE(engine.states().full_param(item.key()).numel() > 0);
          }
        }
      });
    }
}

// In 16-bit modes, and built in partitions, as an engine of one rank.
TEST(CutModel, ModesAndPartitionedModels) {
  const at::Tensor tokens = at::randint(kWords, {kRows, kLength});
  const auto losses = [&](auto& engine) {
    std::vector<double> result;
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = engine.forward(tokens);
      result.push_back(loss.template item<double>());
      engine.backward(loss);
      engine.step();
    }
    return result;
  };
  for (const std::string more :
       {R"("bf16": {"enabled": true}, )", R"("fp16": {"enabled": true, "initial_scale_power": 4}, )",
        R"("torch_autocast": {"enabled": true, "dtype": "bfloat16"}, )", ""}) {
    auto one = initialize(built({}), config_of("", 0, 0, more), comm::Mesh());
    const std::vector<double> expected = losses(one);
    for (const bool partitioned : {false, true})
      testing::run_axes({{Axis::DpShard, 2}, {Axis::Tp, 2}}, [&](int, const comm::Mesh& mesh) {
        SCOPED_TRACE(c10::str(more, partitioned ? " built in partitions" : ""));
        const Config config = config_of("", 3, 2, more);
        const auto net = built({});
        Construction building(config, mesh);
        if (partitioned) building.partition(net);
        auto engine = partitioned ? initialize(net, config, building) : initialize(net, config, mesh);
        const std::vector<double> found = losses(engine);
        for (size_t i = 0; i < found.size(); ++i)
          EXPECT_NEAR(found[i], expected[i], more.empty() ? 1e-5 : 2e-2) << i;
        EXPECT_EQ(net->layers[0]->template as<Block>()->mlp->up_proj->weight.size(0), kInner / 2);
      });
  }
}

// What a program may do with the weight of a cut layer besides calling the layer.
TEST(CutModel, OtherUsesOfASliceAreErrorsOrTheLayers) {
  testing::run_axes({{Axis::Tp, 2}}, [](int, const comm::Mesh& mesh) {
    const at::Tensor x = at::ones({3, 5, kWidth});
    const auto whole = built({}), net = built({});
    auto engine = initialize(net, config_of(""), mesh);
    const auto mlp = [](Gpt& of) { return of.layers[0]->as<Block>()->mlp; };
    const at::Tensor weight = mlp(*net)->up_proj->weight, row = mlp(*net)->down_proj->weight;
    const auto same = [](const at::Tensor& a, const at::Tensor& b) { return at::allclose(a, b, 1e-4, 1e-5); };
    {  // outside of the engine's forward, by the function as by the module, where nothing is recorded, and doubly
      const auto penalty = [&](Gpt& of) {
        const at::Tensor in = x.clone().requires_grad_();
        const at::Tensor out = mlp(of)->forward(in).square().sum();
        const at::Tensor slope = torch::autograd::grad({out}, {in}, {}, true, true)[0];
        of.zero_grad();
        slope.square().sum().backward();
        return mlp(of)->up_proj->weight.grad();
      };
      EXPECT_TRUE(same(penalty(*net), own_part(penalty(*whole), cut_of(*net, "layers.0.mlp.up_proj.weight"))));
      net->zero_grad();
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(same(mlp(*net)->forward(x), mlp(*whole)->forward(x)));
      const auto mid = [&](Gpt& of) { return at::linear(x, mlp(of)->up_proj->weight, mlp(of)->up_proj->bias); };
      const auto back = [&](Gpt& of) { return at::linear(mid(of), mlp(of)->down_proj->weight); };
      EXPECT_TRUE(same(back(*net), back(*whole)));
    }
    for (const bool recorded : {true, false}) {
      const at::AutoGradMode mode(recorded);
      for (const auto& product : std::vector<std::function<at::Tensor()>>{
               [&] { return weight.matmul(at::ones({kWidth})); }, [&] { return x.matmul(weight.transpose(0, 1)); },
               [&] { return at::mm(weight, at::ones({kWidth, 2})); },
               [&] { return at::embedding(weight, at::ones({2}, at::kLong)); }})
        EXPECT_TRUE(!error_of<UsageError>([&] { product().sum().backward(); }).empty()) << recorded;
    }
    EXPECT_HAS(error_of<UsageError>([&] { weight.square().sum().backward(); }),
               "parameter 'layers.0.mlp.up_proj.weight', of which this rank has a slice (heuristics: column layer), is "
               "used by aten::");
    const auto cast = [&](Gpt& of) {
      return F::linear(x.to(at::kDouble), mlp(of)->up_proj->weight.to(at::kDouble)).sum();
    };
    cast(*net).backward();
    EXPECT_TRUE(mlp(*net)->up_proj->weight.grad().defined());
    net->zero_grad();
    EXPECT_TRUE(weight.clone().equal(weight));
    std::ostringstream text;
    text << weight;
    EXPECT_FALSE(text.str().empty());
    // Data that somebody gave it.
    net->to(at::kFloat);
    const at::Tensor copy = row.detach().clone();
    torch::NoGradGuard no_grad;
    mlp(*net)->down_proj->weight.set_data(copy.mul(2));
    engine.forward(at::zeros({1, 4}, at::kLong));
    EXPECT_TRUE(cut_param(row) != nullptr);
    const auto copy_of = std::dynamic_pointer_cast<MlpImpl>(mlp(*net)->clone());
    EXPECT_TRUE(same(copy_of->forward(x), mlp(*net)->forward(x)));
    // Cut for good: another engine takes it as it is, of the same ranks.
    engine.core().destroy();
    auto next = initialize(net, config_of(""), mesh);
    EXPECT_FALSE(next.parallel_plan());
    next.core().destroy();
  });
}

// A whole parameter inside of a region: its gradient is the sum; what comes in beside the region is an error.
struct GatedImpl : torch::nn::Module {
  explicit GatedImpl(bool beside) : beside(beside) {
    up = register_module("up_proj", line(kWidth, kInner, true));
    gain = register_module("gain", torch::nn::PReLU());
    gate = register_module("gate", line(kWidth, 1, true));
    down = register_module("down_proj", line(kInner, kWidth, true));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor inner = gain(up(x));
    return down(beside ? inner * gate(x) : inner) + gate(x);
  }
  bool beside;
  torch::nn::Linear up{nullptr}, gate{nullptr}, down{nullptr};
  torch::nn::PReLU gain{nullptr};
};
TORCH_MODULE(Gated);

TEST(CutModel, WholeParametersInsideOfRegions) {
  const std::string rules = R"(, "partition_config": {"layer_specs": [
      {"patterns": [".*up_proj"]}, {"patterns": [".*down_proj"], "partition_type": "row"}]})";
  std::mutex seeds;
  for (const bool beside : {false, true})
    testing::run_axes({{Axis::Tp, 2}}, [&](int, const comm::Mesh& mesh) {
      const auto made = [&] {
        const std::scoped_lock lock(seeds);
        torch::manual_seed(2);
        return torch::nn::Sequential(torch::nn::Linear(kWidth, kWidth), Gated(beside));
      };
      auto whole = made(), net = made();
      auto engine = initialize(net, config_of(rules), mesh);
      const at::Tensor x = at::linspace(-1, 1, 3 * kWidth).view({3, kWidth});
      const auto trained = [&] { engine.forward(x).square().sum().backward(); };
      if (beside) {
        EXPECT_HAS(error_of<c10::ValueError>(trained), "1.down_proj: what comes into this row layer depends on");
        return;
      }
      trained();
      whole->forward(x).square().sum().backward();
      for (const auto& item : whole->named_parameters()) {
        const auto& specs = engine.core().params();
        const auto spec = std::ranges::find_if(specs, [&](const auto& s) { return s.name == item.key(); });
        const at::Tensor found =
            engine.core().states().get_full(static_cast<int>(spec - specs.begin()), engine::Quantity::Gradient);
        const at::Tensor all = item.value().grad();
        EXPECT_TRUE(at::allclose(found, found.sizes() == all.sizes() ? all : own_part(all, cut_of(*net, item.key())),
                                 1e-4, 1e-5))
            << item.key();
      }
    });
}

TEST(CutModel, WhatIsWrongIsNamed) {
  const auto wrong = [](const std::string& section, const Form& form = {}) {
    return error_of<c10::ValueError>([&] { plan_for(*built(form), config_of(section), 2); });
  };
  const auto specs = [](const std::string& list, const std::string& more = "") {
    return R"(, "partition_config": {"use_default_specs": false)" + more + R"(, "layer_specs": [)" + list + "]}";
  };
  EXPECT_HAS(wrong(specs(R"({"patterns": ["nothing"]})")), "no rule for tensor parallelism matches a module");
  EXPECT_HAS(wrong(specs(R"({"patterns": [".*q_proj"]})", R"(, "strict_mode": true)")),
             "No matching spec for 'layers.0");
  EXPECT_HAS(wrong(specs(R"({"patterns": [".*q_proj"], "shape": [5, -1]})")),
             "5 equal sub-parameters do not divide 16");
  EXPECT_HAS(wrong(specs(R"({"patterns": ["("]})")), "'(' is no regular expression");
  EXPECT_HAS(error_of<c10::ValueError>([&] { plan_for(*torch::nn::Linear(4, 4), config_of(""), 2); }),
             "no policy for this model");
  testing::run_axes({{Axis::Tp, 2}}, [&](int, const comm::Mesh& mesh) {
    const auto net = std::make_shared<torch::nn::EmbeddingImpl>(torch::nn::EmbeddingOptions(8, 4).max_norm(1.0));
    torch::nn::Sequential model;
    model->push_back("embed", torch::nn::AnyModule(net));
    EXPECT_HAS(
        error_of<c10::ValueError>([&] { initialize(model, config_of(specs(R"({"patterns": ["embed"]})")), mesh); }),
        "[tensor_parallel] embed: an embedding with max_norm cannot be cut (");
    EXPECT_EQ(net->weight.sizes(), at::IntArrayRef({8, 4}));
  });
}

// What a C++ class cannot be asked.
TEST(CutModel, WhatIsNotKnownIsWarnedOf) {
  torch::nn::Sequential attention;
  const auto net = std::make_shared<torch::nn::Module>("Net");
  attention->push_back("q_proj", line(4, 6, true));
  attention->push_back("drop", torch::nn::Dropout(0.1));
  attention->push_back("o_proj", line(6, 4, true));
  net->register_module("attention", attention);
  const std::string rules = R"(, "partition_config": {"layer_specs": [
      {"patterns": [".*q_proj"]}, {"patterns": [".*o_proj"], "partition_type": "row"}]})";
  const auto even = plan_for(*net, config_of(rules), 2), uneven = plan_for(*net, config_of(rules, 0, 4), 4);
  ASSERT_EQ(even.warnings.size(), 1U);
  EXPECT_HAS(even.warnings[0], "attention: how many heads it has is not known");
  ASSERT_EQ(uneven.warnings.size(), 2U);
  EXPECT_HAS(uneven.warnings[1], "attention.drop: ranks have slices of several sizes");
}

TEST(CutModel, ListsOfModules) {
  torch::nn::MultiheadAttention attention(torch::nn::MultiheadAttentionOptions(8, 2));
  const auto modules = plan_modules(*attention);
  EXPECT_TRUE(std::ranges::all_of(modules, [](const auto& m) { return m.weight_sizes.empty(); }));
  const auto net = built({});
  EXPECT_EQ(model_facts(*net).model_type, "gpt");
  EXPECT_EQ(model_facts(*net).parts.at("layers.1.self_attn").heads, kHeads);
  // Recipe::facts over what classes say, and where they say nothing.
  const parallel::ModelFacts said{.model_type = "mine", .heads = 8, .parts = {{"layers.1.self_attn", {.heads = 2}}}};
  EXPECT_EQ(model_facts(*net, said).model_type, "mine");
  EXPECT_EQ(model_facts(*net, said).heads, 8);
  EXPECT_EQ(model_facts(*net, said).vocabulary, kWords);
  EXPECT_EQ(model_facts(*net, said).of("layers.1.self_attn.q_proj").heads, 2);
  EXPECT_EQ(model_facts(*net, said).of("layers.0.self_attn.q_proj").heads, kHeads);
  EXPECT_HAS(error_of<c10::ValueError>([&] { model_facts(*net, {.parts = {{"nowhere", {.heads = 2}}}}); }),
             "Recipe::facts has a part 'nowhere', and the model has no such module");
}

// What an estimate counts is what each rank has once the model is cut.
TEST(CutModel, SizesAreThoseOfARank) {
  const Form form{.packed = true, .key_heads = 2};
  const Config config = config_of(kPackedRules);
  const auto sizes = model_sizes(*built(form), config);
  testing::run_axes({{Axis::Tp, 2}}, [&](int, const comm::Mesh& mesh) {
    const auto net = built(form);
    const auto engine = initialize(net, config, mesh);
    int64_t held = 0;
    for (const at::Tensor& param : net->parameters())
      held += param.numel();
    EXPECT_EQ(sizes.trained, held);
    EXPECT_EQ(config::estimate(sizes, config, 2).params, 4 * held);
  });
  const auto whole = model_sizes(*built({}), config_of("", 3, 0));
  EXPECT_GT(whole.units.size(), 1U);
  const auto net = built({});
  net->parameters().front().set_requires_grad(false);
  const auto some = model_sizes(*net, config_of("", 3, 0));
  EXPECT_EQ(some.frozen, net->parameters().front().numel());
  EXPECT_EQ(some.trained + some.frozen, whole.trained);
}

}  // namespace tessera::nn::cut_model_tests
