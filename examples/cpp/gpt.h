// A byte-level GPT in plain torch::nn: the twin of examples/python/gpt.py, with the same names, shapes and arithmetic.
#pragma once

#include <torch/nn.h>

#include <cmath>
#include <string>

namespace example {

struct GptOptions {
  int64_t layers = 6, width = 384, heads = 6, context = 256, vocabulary = 256;
};

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const GptOptions& options) : heads_(options.heads) {
    const int64_t width = options.width;
    norm1_ = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    qkv_ = register_module("qkv", torch::nn::Linear(width, 3 * width));
    out_ = register_module("out", torch::nn::Linear(width, width));
    norm2_ = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up_ = register_module("up", torch::nn::Linear(width, 4 * width));
    down_ = register_module("down", torch::nn::Linear(4 * width, width));
  }

  at::Tensor forward(at::Tensor x) {
    const int64_t batch = x.size(0), length = x.size(1), width = x.size(2);
    const auto qkv = qkv_(norm1_(x)).view({batch, length, 3, heads_, -1}).permute({2, 0, 3, 1, 4}).unbind(0);
    const auto attended = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, 0.0, /*is_causal=*/true);
    x = x + out_(attended.transpose(1, 2).reshape({batch, length, width}));
    return x + down_(at::gelu(up_(norm2_(x))));
  }

 private:
  int64_t heads_;
  torch::nn::LayerNorm norm1_{nullptr}, norm2_{nullptr};
  torch::nn::Linear qkv_{nullptr}, out_{nullptr}, up_{nullptr}, down_{nullptr};
};
TORCH_MODULE(Block);

class Gpt : public torch::nn::Module {
 public:
  explicit Gpt(const GptOptions& options) {
    token_ = register_module("token", torch::nn::Embedding(options.vocabulary, options.width));
    position_ = register_module("position", torch::nn::Embedding(options.context, options.width));
    blocks_ = register_module("blocks", torch::nn::Sequential());
    for (int64_t i = 0; i < options.layers; ++i) {
      blocks_->push_back(Block(options));
    }
    norm_ = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width})));
    head_ = register_module("head", torch::nn::Linear(options.width, options.vocabulary));
    reset_parameters(options.layers);
  }

  // x: (batch, length) of int64 bytes -> (batch, length, vocabulary).
  at::Tensor logits(const at::Tensor& x) {
    const auto positions = torch::arange(x.size(1), x.options());
    return head_(norm_(blocks_->forward(token_(x) + position_(positions))));
  }

  // Mean cross entropy of the next bytes `y`, both (batch, length); a scalar in fp32.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& y) {
    return torch::nn::functional::cross_entropy(logits(x).to(at::kFloat).flatten(0, 1), y.flatten());
  }

 private:
  void reset_parameters(int64_t layers) {
    const torch::NoGradGuard no_grad;
    for (auto& item : named_parameters()) {
      const std::string& name = item.key();
      if (item.value().dim() == 2) {
        const bool last = name.ends_with("out.weight") || name.ends_with("down.weight");
        item.value().normal_(0.0, last ? 0.02 / std::sqrt(2.0 * static_cast<double>(layers)) : 0.02);
      } else if (name.ends_with("bias")) {
        item.value().zero_();
      }
    }
  }

  torch::nn::Embedding token_{nullptr}, position_{nullptr};
  torch::nn::Sequential blocks_{nullptr};
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear head_{nullptr};
};

}  // namespace example
