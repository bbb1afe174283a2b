// What the small programs beside train_gpt share: a GPT of torch::nn, data that every rank can make, and the loop of plain torch that
// each of them is compared with. `--plain` runs that loop, in one process; both print the same losses.
#pragma once

#include <torch/nn.h>
#include <torch/optim/adamw.h>

#include <cstdio>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "tessera/engine.h"
#include "tessera/parallel.h"

namespace small {

constexpr int64_t kWords = 64, kWidth = 32, kHeads = 4, kHead = kWidth / kHeads, kLength = 16, kLayers = 2, kRows = 8;
constexpr int kSteps = 8;
constexpr double kRate = 3e-3, kDecay = 0.1;

// Of tensors [rows, heads, length, width of a head].
using Attend = std::function<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)>;
inline at::Tensor causal(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  return at::scaled_dot_product_attention(query, key, value, {}, 0.0, /*is_causal=*/true);
}

// Of torch::nn alone. It takes its number of heads from what its layers give, so that a plan may cut them.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(Attend attend = causal) : attend(std::move(attend)) {
    const auto linear = [&](const char* name, int64_t in, int64_t out) {
      return register_module(name, torch::nn::Linear(in, out));
    };
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    q_proj = linear("q_proj", kWidth, kWidth);
    k_proj = linear("k_proj", kWidth, kWidth);
    v_proj = linear("v_proj", kWidth, kWidth);
    o_proj = linear("o_proj", kWidth, kWidth);
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    up_proj = linear("up_proj", kWidth, 4 * kWidth);
    down_proj = linear("down_proj", 4 * kWidth, kWidth);
  }
  at::Tensor forward(at::Tensor x) {
    const at::Tensor seen = norm1(x);
    const auto heads = [](const at::Tensor& t) { return t.unflatten(-1, {-1, kHead}).transpose(1, 2); };
    const at::Tensor mixed = attend(heads(q_proj(seen)), heads(k_proj(seen)), heads(v_proj(seen)));
    x = x + o_proj(mixed.transpose(1, 2).flatten(2));
    return x + down_proj(at::gelu(up_proj(norm2(x))));
  }
  Attend attend;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr}, up_proj{nullptr},
      down_proj{nullptr};
};
TORCH_MODULE(Block);

inline at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& labels) {
  return at::cross_entropy_loss(logits.to(at::kFloat).flatten(0, -2), labels.flatten());
}

struct GptImpl : torch::nn::Module {
  // `units`: for stage 3, which gathers each block alone then.
  explicit GptImpl(const Attend& attend = causal, bool units = false) {
    token = register_module("token", torch::nn::Embedding(kWords, kWidth));
    position = register_module("position", torch::nn::Embedding(kLength, kWidth));
    blocks = register_module("blocks", torch::nn::Sequential());
    for (int64_t i = 0; i < kLayers; ++i) {
      if (units)
        blocks->push_back(tessera::nn::unit(Block(attend)));
      else
        blocks->push_back(Block(attend));
    }
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    head = register_module("head", torch::nn::Linear(kWidth, kWords));
  }
  // Mean over all of `labels`. `begin`: where the rows begin in their sequences.
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& labels, int64_t begin = 0) {
    const at::Tensor places = at::arange(begin, begin + ids.size(1), ids.options());
    return loss_of(head(norm(blocks->forward(token(ids) + position(places)))), labels);
  }
  torch::nn::Embedding token{nullptr}, position{nullptr};
  torch::nn::Sequential blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Gpt);

// Rows of a step, of one of `ranks`: the same on all that share a batch. Each word follows from the one before, so there is something
// to learn.
struct Batch {
  at::Tensor ids, labels;
};
inline Batch batch(int64_t step, int rank = 0, int ranks = 1) {
  at::Tensor text = at::empty({kRows, kLength + 1}, at::kLong);
  for (int64_t row = 0; row < kRows; ++row) {
    int64_t word = (step * kRows + row) * 7 % kWords;
    for (int64_t i = 0; i <= kLength; ++i, word = (word * 5 + 3) % kWords)
      text[row][i] = word;
  }
  const at::Tensor own = text.narrow(0, kRows / ranks * rank, kRows / ranks);
  return {own.slice(1, 0, kLength), own.slice(1, 1)};
}

inline void print(const std::string& what, int64_t step, double value) {
  std::printf("%s %ld loss %.5f\n", what.c_str(), static_cast<long>(step), value);
}

// kSteps updates of AdamW by plain torch, every gradient clipped to a norm of 1. `loss`: of a step.
inline void train_plain(
    std::vector<torch::optim::OptimizerParamGroup> groups, const std::vector<at::Tensor>& params,
    const std::function<at::Tensor(int64_t)>& loss,
    const std::function<double(int64_t)>& factor = [](int64_t) { return 1.0; }) {
  torch::optim::AdamW adam(std::move(groups), torch::optim::AdamWOptions(kRate).weight_decay(kDecay));
  for (int64_t step = 0; step < kSteps; ++step) {
    for (auto& group : adam.param_groups())
      static_cast<torch::optim::AdamWOptions&>(group.options()).lr(kRate * factor(step));
    const at::Tensor value = loss(step);
    adam.zero_grad();
    value.backward();
    torch::nn::utils::clip_grad_norm_(params, 1.0);
    adam.step();
    print("step", step, value.item<double>());
  }
}
// The `--plain` of most programs: the model whole, on whole batches.
inline void train_plain_gpt() {
  Gpt model;
  train_plain({torch::optim::OptimizerParamGroup(model->parameters())}, model->parameters(),
              [&](int64_t step) { return model->forward(batch(step).ids, batch(step).labels); });
}

// What the programs have in common of a configuration; `more` begins with a comma.
inline tessera::Config config(const std::string& more) {
  return tessera::Config::from_json(
      c10::str(R"({"optimizer": {"type": "AdamW", "params": {"lr": )", kRate, R"(, "weight_decay": )", kDecay,
               R"(}}, "gradient_clipping": 1.0, "train_batch_size": )", kRows, more, "}"));
}

// main() of a program: `plain` or `train`, by its argument. Errors are a line.
inline int run(int argc, char** argv, void (*train)(), void (*plain)()) try {
  torch::manual_seed(0);
  argc > 1 && std::string(argv[1]) == "--plain" ? plain() : train();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

}  // namespace small
