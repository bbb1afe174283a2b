// Activations between blocks that are cut along the sequence: the whole model's numbers, of parts.
#include "tessera/nn/sequence_cut.h"

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <mutex>

#include "tessera/nn/cut_model.h"
#include "tessera/nn/engine.h"
#include "tessera/nn/hooked.h"
#include "tessera/nn/recompute.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera::nn::sequence_cut_tests {
namespace {

using comm::Axis;
using testing::error_of;

constexpr int64_t kWidth = 16, kHeads = 4, kHead = 4, kInner = 24, kWords = 11, kRows = 4, kLength = 6;

struct Form {
  bool bias = true, recompute = false, unseen_mlp = false, flat_mlp = false;
};

// What this thread's model last saw: lengths of sequences in a block and in its attention.
thread_local int64_t in_block = 0, in_attention = 0;

torch::nn::Linear line(int64_t in, int64_t out, bool bias) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(bias));
}
torch::nn::LayerNorm norm_of(int64_t width) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}));
}

struct AttentionImpl : Hooked<AttentionImpl, at::Tensor(const at::Tensor&, bool)>, HasFacts {
  explicit AttentionImpl(const Form& form) {
    q_proj = register_module("q_proj", line(kWidth, kWidth, form.bias));
    k_proj = register_module("k_proj", line(kWidth, 2 * kHead, form.bias));
    v_proj = register_module("v_proj", line(kWidth, 2 * kHead, form.bias));
    q_norm = register_module("q_norm", norm_of(kHead));  // works on this rank's heads
    o_proj = register_module("o_proj", line(kWidth, kWidth, form.bias));
  }
  parallel::ModelFacts facts() const override { return {.heads = kHeads, .kv_heads = 2, .head_dim = kHead}; }
  at::Tensor forward_impl(const at::Tensor& x, bool causal) {
    in_attention = x.size(1);
    const auto heads = [](const at::Tensor& y) { return y.view({y.size(0), y.size(1), -1, kHead}); };
    const at::Tensor q = q_norm(heads(q_proj(x))).transpose(1, 2);
    const auto shared = [&](const at::Tensor& y) {
      const at::Tensor mine = heads(y).transpose(1, 2);
      return mine.repeat_interleave(q.size(1) / mine.size(1), 1);
    };
    const at::Tensor y = at::scaled_dot_product_attention(q, shared(k_proj(x)), shared(v_proj(x)), {}, 0.0, causal);
    return o_proj(y.transpose(1, 2).flatten(2));
  }
  torch::nn::Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr};
  torch::nn::LayerNorm q_norm{nullptr};
};
TORCH_MODULE(Attention);

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(const Form& form) : flat(form.flat_mlp) {
    up_proj = register_module("up_proj", line(kWidth, kInner, form.bias));
    down_proj = register_module("down_proj", line(kInner, kWidth, form.bias));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = at::gelu(up_proj(x));
    return flat ? down_proj(y.flatten(0, 1)).view(x.sizes()) : down_proj(y);
  }
  bool flat;
  torch::nn::Linear up_proj{nullptr}, down_proj{nullptr};
};
TORCH_MODULE(Mlp);

struct BlockImpl : Hooked<BlockImpl, at::Tensor(at::Tensor)> {
  explicit BlockImpl(const Form& form) : recomputes(form.recompute) {
    input_norm = register_module("input_norm", norm_of(kWidth));
    attention = register_module("attention", Attention(form));
    post_norm = register_module("post_norm", norm_of(kWidth));
    if (form.unseen_mlp)
      plain = register_module("mlp", Mlp(form));
    else
      mlp = register_module("mlp", unit(Mlp(form)));
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    in_block = x.size(1);
    const auto body = [this](const std::vector<at::Tensor>& in) -> std::vector<at::Tensor> {
      const at::Tensor y = in[0] + attention(input_norm(in[0]), true), z = post_norm(y);
      return {y + (mlp.is_empty() ? plain(z) : mlp(z))};
    };
    return recomputes ? recompute(body, {x})[0] : body({x})[0];
  }
  bool recomputes;
  torch::nn::LayerNorm input_norm{nullptr}, post_norm{nullptr};
  Attention attention{nullptr};
  UnitOf<Mlp> mlp{nullptr};
  Mlp plain{nullptr};
};
TORCH_MODULE(Block);

struct Gpt : torch::nn::Module {
  explicit Gpt(const Form& form) {
    tokens = register_module("tokens", torch::nn::Embedding(kWords, kWidth));
    blocks = register_module("blocks", torch::nn::Sequential(Block(form), Block(form)));
    norm = register_module("norm", unit(norm_of(kWidth)));
    lm_head = register_module("lm_head", line(kWidth, kWords, form.bias));
    const at::NoGradGuard no_grad;
    for (at::Tensor& p : parameters())
      p.add_(at::randn_like(p), 0.2);
  }
  at::Tensor logits(const at::Tensor& text) { return lm_head(norm(blocks->forward(tokens(text)))); }
  at::Tensor forward(const at::Tensor& text) {
    return torch::nn::functional::cross_entropy(logits(text).flatten(0, 1), text.roll({1}, {1}).flatten());
  }
  torch::nn::Embedding tokens{nullptr};
  torch::nn::Sequential blocks{nullptr};
  UnitOf<torch::nn::LayerNorm> norm{nullptr};
  torch::nn::Linear lm_head{nullptr};
};

// One generator for all threads.
std::shared_ptr<Gpt> built(const Form& form = {}) {
  static std::mutex mutex;
  const std::scoped_lock lock(mutex);
  torch::manual_seed(3);
  return std::make_shared<Gpt>(form);
}

Config config_of(int stage, bool cuts = true, const std::string& more = "") {
  return Config::from_json(c10::str(
      R"({"gradient_clipping": 0.5, "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.3}},
          "zero_optimization": {"stage": )",
      stage, R"(}, "tensor_parallel": {"autotp_size": 2}, "tessera": {"sequence_parallel_norms": )",
      cuts ? "true" : "false", "}", more, "}"));
}

at::Tensor text_of(int64_t length = kLength) {
  return at::arange(kRows * length).view({kRows, length}).mul(7).remainder(kWords);
}

struct Trained {
  std::vector<double> losses = {};
  std::shared_ptr<Gpt> model = nullptr;
};
Trained trained_whole(const Form& form) {
  Trained whole{.model = built(form)};
  torch::optim::SGD optimizer(whole.model->parameters(), torch::optim::SGDOptions(0.3));
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = whole.model->forward(text_of());
    whole.losses.push_back(loss.item<double>());
    loss.backward();
    torch::nn::utils::clip_grad_norm_(whole.model->parameters(), 0.5);
    optimizer.step();
  }
  return whole;
}

void train(const Form& form, int stage, const std::string& more, const Trained& whole, const comm::Mesh& mesh,
           double tolerance) {
  const auto net = built(form);
  auto engine = initialize(net, config_of(stage, true, more), mesh);
  EXPECT_HAS(engine.parallel_plan()->text(), "activations from blocks.0 to norm are cut along the sequence");
  const at::Tensor mine = text_of().narrow(0, 2 * mesh.rank(comm::kBatchAxes), 2);
  for (int step = 0; step < 3; ++step) {
    const at::Tensor loss = engine.forward(mine);
    EXPECT_EQ(in_block, kLength / 2);
    EXPECT_EQ(in_attention, kLength);
    EXPECT_NEAR(engine.mean(loss.detach()).item<double>(), whole.losses[step], tolerance) << step;
    engine.backward(loss);
    engine.step();
  }
  const auto state = engine.module_state_dict();
  for (const auto& item : whole.model->named_parameters())
    EXPECT_TRUE(at::allclose(state[item.key()].to(at::kFloat), item.value(), 10 * tolerance, tolerance)) << item.key();
}

}  // namespace

TEST(SequenceCut, TrainsAsTheWholeModel) {
  for (const Form& form : {Form{}, Form{.bias = false}, Form{.recompute = true}}) {
    const Trained whole = trained_whole(form);
    for (int stage = 0; stage <= 3; ++stage)
      testing::run_axes({{Axis::DpShard, 2}, {Axis::Tp, 2}}, [&](int, const comm::Mesh& mesh) {
        SCOPED_TRACE(c10::str("bias ", form.bias, ", recompute ", form.recompute, ", stage ", stage));
        train(form, stage, "", whole, mesh, 1e-5);
      });
  }
}

// 16 bits have about three digits.
TEST(SequenceCut, Precisions) {
  const Trained whole = trained_whole({});
  for (const char* more : {R"(, "bf16": {"enabled": true})", R"(, "torch_autocast": {"enabled": true})"})
    testing::run_axes({{Axis::DpShard, 2}, {Axis::Tp, 2}}, [&](int, const comm::Mesh& mesh) {
      SCOPED_TRACE(more);
      train({}, 3, more, whole, mesh, 3e-2);
    });
}

TEST(SequenceCut, WithoutGradientsAnyLengthIsTaken) {
  const auto whole = built();
  testing::run_axes({{Axis::Tp, 2}}, [&](int, const comm::Mesh& mesh) {
    const auto net = built();
    auto engine = initialize(net, config_of(0), mesh);
    EXPECT_HAS(error_of([&] { engine.forward(text_of(5)); }),
               "blocks.0: tessera.sequence_parallel_norms cuts activations of [batch, sequence, hidden] along the "
               "sequence; [4, 5, 16] cannot be cut into 2 equal parts");
    for (const int64_t length : {5, 6}) {
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(at::allclose(net->logits(text_of(length)), whole->logits(text_of(length)), 1e-4, 1e-5)) << length;
      EXPECT_EQ(in_block, length == 6 ? 3 : 5);
    }
    engine.forward(text_of()).backward();
    EXPECT_EQ(in_block, 3);
    EXPECT_TRUE(engine.step());
  });
}

TEST(SequenceCut, WhatIsWrongIsNamed) {
  testing::run_axes({{Axis::Tp, 2}}, [](int, const comm::Mesh& mesh) {
    EXPECT_HAS(
        error_of([&] { initialize(built({.unseen_mlp = true}), config_of(0), mesh); }),
        "blocks.0.mlp: tessera.sequence_parallel_norms cuts or joins activations where it is called, which Tessera "
        "cannot see; let its class be a tessera::nn::Hooked, or register tessera::nn::unit() of it");
    const auto net = built();
    {
      auto before = initialize(net, config_of(0, false), mesh);
    }
    EXPECT_HAS(error_of([&] { initialize(net, config_of(0), mesh); }), "the model was cut without it; build it anew");
    auto flat = initialize(built({.flat_mlp = true}), config_of(0), mesh);
    EXPECT_HAS(error_of([&] { flat.forward(text_of()); }), "blocks.0.mlp.down_proj");
  });
  auto alone = Config::from_json(
      R"({"train_micro_batch_size_per_gpu": 2, "tessera": {"sequence_parallel_norms": true}, "optimizer": {"type": "SGD"}})");
  const testing::KeptWarnings kept;
  const auto engine = initialize(built(), alone, comm::Mesh());
  ASSERT_FALSE(kept.lines.empty());
  EXPECT_HAS(kept.lines[0], "tessera.sequence_parallel_norms has no effect: the model is not cut");
}

}  // namespace tessera::nn::sequence_cut_tests
