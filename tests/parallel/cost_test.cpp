#include "tessera/parallel/cost.h"

#include "tessera/parallel/attention.h"
#include "tessera/parallel/vocabulary.h"
#include "tests/support/errors.h"
#include "tests/support/toy.h"

namespace tessera::parallel {

using comm::Axis;
using testing::AxisSizes;
using testing::error_of;

namespace {

const BlockStack kModel{
    .layers = 2, .hidden = 16, .heads = 8, .kv_heads = 4, .head_dim = 4, .inner = 24, .vocabulary = 32};

// One rank's part of the model and a forward: what a front end would put together.
class Stack {
 public:
  Stack(const comm::Mesh& mesh, const Training& training)
      : t_(training), tp_(mesh.group(Axis::Tp)), sp_(mesh.group(Axis::Sp)) {
    const int64_t tp = tp_->size(), q = kModel.heads * kModel.head_dim / tp,
                  kv = kModel.kv_heads * kModel.head_dim / tp;
    const auto weight = [](int64_t outputs, int64_t inputs) { return at::randn({outputs, inputs}).requires_grad_(); };
    for (int64_t i = 0; i < kModel.layers; ++i) {
      const int64_t hidden = kModel.hidden, inner = kModel.inner / tp;
      blocks_.push_back({weight(q, hidden), weight(kv, hidden), weight(kv, hidden), weight(hidden, q),
                         weight(inner, hidden), weight(inner, hidden), weight(hidden, inner)});
    }
    rows_ = kModel.vocabulary / (t_.vocab_parallel ? tp : 1);
    embedding_ = weight(rows_, kModel.hidden);
    head_ = weight(rows_, kModel.hidden);
    region_ = {tp_, t_.sequence_regions ? 0 : -1};
    region_.keep_gathered = t_.keep_gathered;
  }

  void step() {
    const int64_t length = t_.length / sp_->size(), begin = tp_->rank() * rows_;
    for (int64_t micro = 0; micro < t_.micro_batches; ++micro) {
      const at::Tensor tokens = at::randint(kModel.vocabulary, {length, t_.batch});
      at::Tensor x, loss;
      if (t_.vocab_parallel) {
        x = vocab_embedding(tokens, embedding_, begin, kModel.vocabulary, -1, region_);
      } else {
        x = at::embedding(embedding_, tokens);
        if (t_.sequence_regions) x = x.narrow(0, tp_->rank() * (length / tp_->size()), length / tp_->size());
      }
      for (const auto& weights : blocks_) {
        if (t_.recompute) {
          const at::NoGradGuard guard;
          block(x, weights);
        }
        x = block(x, weights);
      }
      if (t_.vocab_parallel)
        loss = vocab_cross_entropy(column_linear(x, head_, {}, region_), tokens, begin, kModel.vocabulary, tp_).sum();
      else
        loss = x.sum();
      loss.backward();
    }
  }

 private:
  at::Tensor block(const at::Tensor& x, const std::vector<at::Tensor>& w) {
    const auto shared = [&](int uses) {
      Region region = region_;
      if (t_.shared_inputs) region.entrance = std::make_shared<Entrance>(uses);
      return region;
    };
    const Region attention = shared(3), mlp = shared(2);
    const auto heads = [&](const at::Tensor& t) { return t.unflatten(-1, {-1, kModel.head_dim}); };
    const auto local = [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
      return q + at::repeat_interleave(k * v, q.size(2) / k.size(2), 2);
    };
    const at::Tensor out = SequenceAttention(local, {sp_})(heads(column_linear(x, w[0], {}, attention)),
                                                           heads(column_linear(x, w[1], {}, attention)),
                                                           heads(column_linear(x, w[2], {}, attention)));
    const at::Tensor y = x + row_linear(out.flatten(2), w[3], {}, region_);
    return y + row_linear(column_linear(y, w[4], {}, mlp) * column_linear(y, w[5], {}, mlp), w[6], {}, region_);
  }

  Training t_;
  comm::GroupPtr tp_, sp_;
  int64_t rows_;
  std::vector<std::vector<at::Tensor>> blocks_;
  at::Tensor embedding_, head_;
  Region region_;
};

Traffic traffic(const comm::OpStats& stats) {
  return {stats.calls, stats.bytes};
}
const std::vector<std::pair<const char*, comm::OpStats comm::CommStats::*>> kOperations{
    {"all_gather", &comm::CommStats::all_gather},
    {"reduce_scatter", &comm::CommStats::reduce_scatter},
    {"all_reduce", &comm::CommStats::all_reduce},
    {"all_to_all", &comm::CommStats::all_to_all}};

void expect_counted(const Cost& cost, const std::string& axis, const comm::CommStats& stats) {
  for (const auto& [name, operation] : kOperations)
    EXPECT_EQ(cost.of(axis, name), traffic(stats.*operation))
        << axis << " " << name << ": " << cost.of(axis, name).bytes << " for " << (stats.*operation).bytes;
}

}  // namespace

TEST(Cost, OfTensorAndSequenceParallelismIsWhatIsCounted) {
  std::vector<Training> runs;
  for (const AxisSizes& axes : std::vector<AxisSizes>{{{Axis::Tp, 2}},
                                                      {{Axis::Tp, 4}},
                                                      {{Axis::Sp, 2}},
                                                      {{Axis::Sp, 8}},
                                                      {{Axis::Sp, 2}, {Axis::Tp, 2}},
                                                      {{Axis::Sp, 4}, {Axis::Tp, 2}},
                                                      {{Axis::DpShard, 2}, {Axis::Sp, 2}, {Axis::Tp, 2}}}) {
    const Training plain{.ranks = axes, .batch = 3, .length = 16, .micro_batches = 2, .activation_bytes = 4};
    for (int variant = 0; variant < 6; ++variant) {
      Training t = plain;
      t.vocab_parallel = variant > 0;
      t.shared_inputs = variant != 2;
      t.recompute = variant == 3;
      t.sequence_regions = variant >= 4;
      t.keep_gathered = variant == 5;
      runs.push_back(t);
    }
  }
  for (const Training& t : runs) {
    const Cost cost = parallel::cost(kModel, t);
    testing::run_axes(t.ranks, [&](int, const comm::Mesh& mesh) {
      Stack stack(mesh, t);
      stack.step();
      SCOPED_TRACE(c10::str("tp ", mesh.size(Axis::Tp), " sp ", mesh.size(Axis::Sp),
                            t.sequence_regions ? " regions" : "", t.shared_inputs ? "" : " apart",
                            t.recompute ? " recomputed" : "", t.keep_gathered ? " kept" : ""));
      if (mesh.size(Axis::Tp) > 1) expect_counted(cost, "tp", mesh.group(Axis::Tp)->stats());
      if (mesh.size(Axis::Sp) > 1) expect_counted(cost, "sp", mesh.group(Axis::Sp)->stats());
    });
  }
}

// The engine's own traffic, but for what it agrees on.
TEST(Cost, OfZeroIsWhatTheEngineSends) {
  constexpr int64_t kAgreements = 2048;
  BlockStack model = kModel;
  model.vocabulary = 0;
  for (const AxisSizes& axes : std::vector<AxisSizes>{{{Axis::DpShard, 2}},
                                                      {{Axis::DpShard, 3}},
                                                      {{Axis::DpReplicate, 2}, {Axis::DpShard, 2}},
                                                      {{Axis::DpShard, 2}, {Axis::Sp, 2}, {Axis::Tp, 2}}}) {
    for (int stage = 0; stage <= 3; ++stage) {
      const Training t{
          .ranks = axes, .stage = stage, .length = 16, .micro_batches = 2, .parameter_bytes = 4, .gradient_bytes = 4};
      const Cost cost = parallel::cost(model, t);
      testing::run_axes(axes, [&](int, const comm::Mesh& mesh) {
        const int64_t tp = mesh.size(Axis::Tp), h = model.hidden, q = model.heads * model.head_dim / tp, kv = q / 2,
                      inner = model.inner / tp;
        std::vector<engine::ParamSpec> specs;
        for (const char* unit : {"blocks.0", "blocks.1"})
          for (const int64_t size : {h, h * q, h * kv, h * kv, q * h, h, h * inner, h * inner, inner * h})
            specs.push_back({c10::str(unit, ".", specs.size()), at::ones({size}).requires_grad_(), 0, unit});
        auto options = testing::toy_options({.stage = stage, .accumulation = 2, .clip = 0, .persistence = 0});
        engine::Engine engine(options, mesh, specs, {testing::toy_adamw()});
        std::vector<int> modules;
        for (int block = 0; block < 2; ++block) {
          std::vector<int> params(9);
          for (int i = 0; i < 9; ++i)
            params[i] = 9 * block + i;
          modules.push_back(engine.modules().add(params));
        }
        const auto& states = mesh.size(Axis::Sp) > 1 ? mesh.group(comm::kStateAxes) : mesh.group(Axis::DpShard);
        states->reset_stats();
        mesh.group(Axis::DpReplicate)->reset_stats();
        for (int micro = 0; micro < 2; ++micro) {
          at::Tensor x = at::ones({1}).requires_grad_();
          for (int block = 0; block < 2; ++block) {
            if (modules[block] >= 0 && engine.modules().enter(modules[block])) engine.modules().note_inputs({x});
            at::Tensor y = x;
            for (int i = 0; i < 9; ++i)
              y = y * specs[9 * block + i].tensor.sum();
            if (modules[block] >= 0) engine.modules().leave(modules[block], {y});
            x = y;
          }
          x.sum().backward();
          engine.step();
        }
        SCOPED_TRACE(c10::str("stage ", stage, ", ", states->size(), " ranks, tp ", tp));
        for (const auto& [axis, group] :
             {std::pair<std::string, comm::GroupPtr>("dp_shard x sp", states),
              std::pair<std::string, comm::GroupPtr>("dp_replicate", mesh.group(Axis::DpReplicate))}) {
          if (group->size() == 1) continue;
          const comm::CommStats stats = group->stats();
          for (const auto& [name, operation] : kOperations) {
            const int64_t expected = cost.of(axis, name).bytes, counted = (stats.*operation).bytes;
            EXPECT_TRUE(counted >= expected && counted <= expected + kAgreements)
                << axis << " " << name << " " << expected << " " << counted;
          }
        }
      });
    }
  }
}

TEST(Cost, FollowsTheFormulas) {
  // Llama-like, 8 of tp in 16384 ranks: four sums of the activations a block and micro-batch.
  const BlockStack model{
      .layers = 32, .hidden = 4096, .heads = 32, .kv_heads = 8, .head_dim = 128, .inner = 14336, .vocabulary = 128256};
  Training t{.ranks = {{Axis::DpReplicate, 16}, {Axis::DpShard, 64}, {Axis::Sp, 2}, {Axis::Tp, 8}},
             .stage = 3,
             .length = 8192,
             .micro_batches = 4};
  const Cost cost = parallel::cost(model, t);
  EXPECT_EQ(cost.of("tp", "all_reduce"), (Traffic{4 * 32 * 4, 4 * 32 * 4 * (2 * (4096 * 4096 * 2LL) * 7 / 8)}));
  EXPECT_EQ(cost.bytes("dp_shard x sp"), 3 * 4 * 2 * (cost.parameters - cost.parameters / 128));
  EXPECT_HAS(cost.text(), "dp_replicate");
  EXPECT_HAS(cost.text(), "reduce_scatter");
  // Cutting the activations between blocks costs no more bytes, but for gathering again.
  t.sequence_regions = t.keep_gathered = true;
  EXPECT_EQ(parallel::cost(model, t).bytes("tp"), cost.bytes("tp"));
}

TEST(Cost, Errors) {
  const auto error = [](const BlockStack& model, const Training& training) {
    return error_of([&] { cost(model, training); });
  };
  EXPECT_HAS(error({}, {}), "layers is 0");
  BlockStack odd = kModel;
  odd.kv_heads = 3;
  EXPECT_HAS(error(odd, {}), "3 key/value heads do not divide 8");
  EXPECT_HAS(error(kModel, {.ranks = {{Axis::Sp, 2}}, .length = 15}), "15 tokens cannot be cut into 2");
  EXPECT_HAS(error(kModel, {.ranks = {{Axis::Tp, 3}}, .length = 16}), "3 ranks of tp");
}

}  // namespace tessera::parallel
