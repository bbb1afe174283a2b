#include "tessera/nn/parallel.h"

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <mutex>

#include "tessera/nn/engine.h"
#include "tessera/parallel/attention.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera::nn {

using comm::Axis;
using testing::AxisSizes;
using testing::error_of;

namespace {

constexpr int64_t kWidth = 12, kHeads = 4, kWords = 10, kLength = 8;

// Embedding, attention with query, key and value in one, MLP: whole, or cut along tp and sp.
struct Net : torch::nn::Module {
  explicit Net(const comm::Mesh& mesh) : sp(mesh.group(Axis::Sp)) {
    const parallel::Region region{mesh.group(Axis::Tp)};
    embed = register_module("embed", VocabEmbedding(torch::nn::EmbeddingOptions(kWords, kWidth), region));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    const parallel::SizeRule heads{.heads = kHeads};
    qkv = register_module(
        "qkv", ColumnLinear(torch::nn::LinearOptions(kWidth, 3 * kWidth), region, parallel::Sizes(3, kWidth), heads));
    out = register_module("out", RowLinear(torch::nn::LinearOptions(kWidth, kWidth), region, parallel::Sizes(), heads));
    up = register_module("up", ColumnLinear(torch::nn::LinearOptions(kWidth, 20), region));
    down = register_module("down", RowLinear(torch::nn::LinearOptions(20, kWidth).bias(false), region));
  }
  // Mean over this rank's tokens.
  at::Tensor forward(const at::Tensor& tokens) {
    const at::Tensor x = embed(tokens);
    const auto parts = qkv(norm(x)).unflatten(-1, {3, -1, kWidth / kHeads}).unbind(2);
    const auto local = [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
      return at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2);
    };
    const at::Tensor attended = parallel::SequenceAttention(local, {sp, 1})(parts[0], parts[1], parts[2]);
    const at::Tensor y = x + out(attended.flatten(2));
    return (y + down(at::gelu(up(y)))).square().mean();
  }
  comm::GroupPtr sp;
  VocabEmbedding embed{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  ColumnLinear qkv{nullptr}, up{nullptr};
  RowLinear out{nullptr}, down{nullptr};
};

}  // namespace

// Weights after three steps are those of the whole model in plain PyTorch, for every stage. By SGD: the gradient of a key's
// bias is zero but for rounding, of which Adam would make steps.
TEST(Parallel, TrainsAsTheWholeModel) {
  const at::Tensor tokens = at::randint(kWords, {4, kLength});
  torch::manual_seed(3);
  Net whole{comm::Mesh()};
  torch::optim::SGD optimizer(whole.parameters(), torch::optim::SGDOptions(0.5));
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    whole.forward(tokens).backward();
    optimizer.step();
  }
  std::mutex seeds;  // of one generator for all threads
  for (const AxisSizes& axes : std::vector<AxisSizes>{{{Axis::Tp, 2}},
                                                      {{Axis::Tp, 3}},
                                                      {{Axis::Sp, 2}},
                                                      {{Axis::DpShard, 2}, {Axis::Tp, 2}},
                                                      {{Axis::Sp, 2}, {Axis::Tp, 2}},
                                                      {{Axis::DpShard, 2}, {Axis::Sp, 2}, {Axis::Tp, 2}}}) {
    for (int stage = 0; stage <= 3; ++stage) {
      testing::run_axes(axes, [&](int, const comm::Mesh& mesh) {
        std::shared_ptr<Net> net;
        {
          const std::scoped_lock lock(seeds);
          torch::manual_seed(3);
          net = std::make_shared<Net>(mesh);
        }
        const int64_t rows = 4 / mesh.size(comm::kBatchAxes), length = kLength / mesh.size(Axis::Sp);
        const at::Tensor mine =
            tokens.narrow(0, rows * mesh.rank(comm::kBatchAxes), rows).narrow(1, length * mesh.rank(Axis::Sp), length);
        const auto config = Config::from_json(c10::str(R"({"gradient_clipping": 0, "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "zero_optimization": {"stage": )",
                                                       stage, "}}"));
        auto engine = initialize(net, config, mesh);
        for (int step = 0; step < 3; ++step) {
          engine.forward(mine).backward();
          engine.step();
        }
        SCOPED_TRACE(c10::str("stage ", stage, " tp ", mesh.size(Axis::Tp), " sp ", mesh.size(Axis::Sp)));
        for (size_t i = 0; i < engine.core().params().size(); ++i) {
          const std::string& name = engine.core().params()[i].name;
          const at::Tensor master = engine.core().states().get_full(static_cast<int>(i), engine::Quantity::Master);
          const at::Tensor expected = whole.named_parameters()[name];
          const shard::CutPtr cut = cut_of(*net, name);
          at::Tensor own = expected;
          if (cut) {
            std::vector<at::Tensor> parts;
            for (const shard::Range& range : cut->ranges)
              parts.push_back(expected.narrow(cut->dim, range.begin, range.size()));
            own = at::cat(parts, cut->dim);
          }
          const at::Tensor found = master.sizes() == expected.sizes() ? expected : own;
          EXPECT_TRUE(at::allclose(master, found, 1e-4, 1e-5)) << name;
        }
      });
    }
  }
}

TEST(Parallel, WholeValues) {
  testing::run_axes({{Axis::Tp, 2}}, [](int rank, const comm::Mesh& mesh) {
    Net net(mesh);
    EXPECT_EQ(whole_sizes(net, "qkv.weight"), (parallel::Sizes{3 * kWidth, kWidth}));
    EXPECT_EQ(whole_sizes(net, "out.bias"), (parallel::Sizes{kWidth}));
    EXPECT_EQ(cut_of(net, "norm.weight"), nullptr);
    const at::Tensor values = at::arange(3 * kWidth, at::kFloat);
    set_whole(net, "qkv.bias", values);  // two heads of three of each part
    std::vector<at::Tensor> parts;
    for (const int64_t begin : {0, 12, 24})
      parts.push_back(values.narrow(0, begin + 6 * rank, 6));
    EXPECT_TRUE(net.qkv->bias.equal(at::cat(parts)));
    EXPECT_HAS(error_of([&] { set_whole(net, "qkv.bias", at::ones({4})); }), "which is a slice of [36]");
    EXPECT_HAS(error_of([&] { set_whole(net, "none", at::ones({4})); }), "no parameter 'none'");
  });
}

TEST(Parallel, Errors) {
  const parallel::Region region{comm::single_group(), -1, {}, true, "blocks.0.up"};
  EXPECT_HAS(error_of([] { ColumnLinear(torch::nn::LinearOptions(4, 4), parallel::Region{}); }), "no group of ranks");
  EXPECT_HAS(error_of([&] { ColumnLinear(torch::nn::LinearOptions(4, 6), region, parallel::Sizes{2, 2}); }),
             "blocks.0.up: sub-parameters add up to 4");
  EXPECT_THROW(VocabEmbedding(torch::nn::EmbeddingOptions(4, 4).max_norm(1.0), region), c10::NotImplementedError);
}

}  // namespace tessera::nn
