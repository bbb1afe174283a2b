// A byte-level GPT in torch::nn: the twin of examples/python/gpt.py, with the same names, shapes and arithmetic. Its linear layers
// and its embedding may be cut over the ranks of `tp`, and sequences over those of `sp`; on one rank each they are whole.
#pragma once

#include <torch/nn.h>

#include <cmath>
#include <string>

#include "tessera/comm.h"
#include "tessera/parallel.h"
#include "tessera/pipeline.h"

namespace example {

struct GptOptions {
  int64_t layers = 6, width = 384, heads = 6, context = 256, vocabulary = 256;
  tessera::comm::GroupPtr tp = tessera::comm::single_group(), sp = tessera::comm::single_group();
};

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const GptOptions& options) : head_width_(options.width / options.heads), sp_(options.sp) {
    using torch::nn::LinearOptions;
    const int64_t width = options.width;
    const tessera::parallel::Region region{options.tp};
    const tessera::parallel::SizeRule heads{.heads = options.heads};
    norm1_ = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    qkv_ = register_module("qkv",
                           tessera::nn::ColumnLinear(LinearOptions(width, 3 * width), region, Sizes(3, width), heads));
    out_ = register_module("out", tessera::nn::RowLinear(LinearOptions(width, width), region, Sizes(), heads));
    norm2_ = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up_ = register_module("up", tessera::nn::ColumnLinear(LinearOptions(width, 4 * width), region));
    down_ = register_module("down", tessera::nn::RowLinear(LinearOptions(4 * width, width), region));
  }

  at::Tensor forward(at::Tensor x) {
    const auto qkv = qkv_(norm1_(x)).unflatten(-1, {3, -1, head_width_}).unbind(2);
    tessera::parallel::SequenceAttention attention(&attend, {sp_, /*sequence_dim=*/1});
    x = x + out_(attention(qkv[0], qkv[1], qkv[2]).flatten(2));
    return x + down_(at::gelu(up_(norm2_(x))));
  }

 private:
  using Sizes = tessera::parallel::Sizes;
  // Tensors of [batch, length, heads, width of a head].
  static at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
    const auto turned = [](const at::Tensor& t) { return t.transpose(1, 2); };
    return turned(
        at::scaled_dot_product_attention(turned(query), turned(key), turned(value), {}, 0.0, /*is_causal=*/true));
  }

  int64_t head_width_;
  tessera::comm::GroupPtr sp_;
  torch::nn::LayerNorm norm1_{nullptr}, norm2_{nullptr};
  tessera::nn::ColumnLinear qkv_{nullptr}, up_{nullptr};
  tessera::nn::RowLinear out_{nullptr}, down_{nullptr};
};
TORCH_MODULE(Block);

class Gpt : public torch::nn::Module {
 public:
  explicit Gpt(const GptOptions& options) : options_(options) {
    const tessera::parallel::Region region{options.tp};
    token_ = register_module(
        "token", tessera::nn::VocabEmbedding(torch::nn::EmbeddingOptions(options.vocabulary, options.width), region));
    position_ = register_module("position", torch::nn::Embedding(options.context, options.width));
    blocks_ = register_module("blocks", torch::nn::Sequential());
    for (int64_t i = 0; i < options.layers; ++i) {
      blocks_->push_back(Block(options));
    }
    norm_ = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width})));
    head_ = register_module(
        "head", tessera::nn::ColumnLinear(torch::nn::LinearOptions(options.width, options.vocabulary), region));
    reset_parameters(options.layers);
  }

  // x: (batch, length) of int64 bytes, this rank's part of them -> (batch, length, its part of the vocabulary).
  at::Tensor logits(const at::Tensor& x) {
    const int64_t begin = options_.sp->rank() * x.size(1);
    const auto positions = torch::arange(begin, begin + x.size(1), x.options());
    return head_(norm_(blocks_->forward(token_(x) + position_(positions))));
  }

  // The same model as a list, for a pipeline: its last layer returns logits.
  tessera::nn::Layers layers() {
    tessera::nn::Layers list;
    list.add(std::make_shared<Start>(token_, position_));
    for (const auto& block : blocks_->children())
      list.add(std::dynamic_pointer_cast<BlockImpl>(block));
    list.add(norm_).add(head_);
    return list;
  }

  // Mean cross entropy of the next bytes `y`, both (batch, length); a scalar in fp32. Its value is that of all parts of the
  // sequences, its gradient that of this part: engines average gradients over sp.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& y) {
    const at::Tensor out = logits(x);
    const auto parts =
        tessera::parallel::ranges_of(tessera::parallel::part_sizes(options_.vocabulary, options_.tp->size()));
    const int64_t begin = parts[options_.tp->rank()].begin;
    const at::Tensor loss =
        tessera::parallel::vocab_cross_entropy(out, y, begin, options_.vocabulary, options_.tp).mean();
    if (options_.sp->size() == 1) return loss;
    const at::Tensor whole = tessera::parallel::reduce_from_ranks(loss.detach(), options_.sp) / options_.sp->size();
    return loss + (whole - loss.detach());
  }

 private:
  // The first layer of the list.
  struct Start : torch::nn::Module {
    Start(tessera::nn::VocabEmbedding tokens, torch::nn::Embedding places)
        : token(register_module("token", std::move(tokens))),
          position(register_module("position", std::move(places))) {}
    at::Tensor forward(const at::Tensor& x) { return token(x) + position(torch::arange(x.size(1), x.options())); }
    tessera::nn::VocabEmbedding token;
    torch::nn::Embedding position;
  };

  void reset_parameters(int64_t layers) {
    for (const auto& item : named_parameters()) {
      const std::string& name = item.key();
      const at::Tensor value = torch::zeros(tessera::nn::whole_sizes(*this, name));
      if (value.dim() == 2) {
        const bool last = name.ends_with("out.weight") || name.ends_with("down.weight");
        value.normal_(0.0, last ? 0.02 / std::sqrt(2.0 * static_cast<double>(layers)) : 0.02);
      } else if (!name.ends_with("bias")) {
        continue;
      }
      tessera::nn::set_whole(*this, name, value);  // on any number of ranks the same model
    }
  }

  GptOptions options_;
  tessera::nn::VocabEmbedding token_{nullptr};
  torch::nn::Embedding position_{nullptr};
  torch::nn::Sequential blocks_{nullptr};
  torch::nn::LayerNorm norm_{nullptr};
  tessera::nn::ColumnLinear head_{nullptr};
};

}  // namespace example
