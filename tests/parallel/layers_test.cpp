#include "tessera/parallel/layers.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include "tests/parallel/part.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera::parallel {

using testing::error_of;
using testing::run_ranks;

namespace {

at::Tensor leaf(const at::Tensor& t) {
  return t.clone().requires_grad_();
}

// A layer of the whole model and its gradients.
struct Dense {
  at::Tensor x, weight, bias, cotangent, y, x_grad, weight_grad, bias_grad;
  Dense(at::Tensor input, int64_t outputs, bool has_bias) : x(std::move(input)) {
    const auto dtype = x.scalar_type();
    weight = at::randn({outputs, x.size(-1)}).to(dtype);
    if (has_bias) bias = at::randn({outputs}).to(dtype);
    const at::Tensor in = leaf(x), w = leaf(weight), b = has_bias ? leaf(bias) : at::Tensor();
    y = at::linear(in, w, has_bias ? std::optional(b) : std::nullopt);
    cotangent = at::randn_like(y);
    y.backward(cotangent);
    y = y.detach();
    x_grad = in.grad();
    weight_grad = w.grad();
    if (has_bias) bias_grad = b.grad();
  }
};

bool close(const at::Tensor& a, const at::Tensor& b) {
  const double tolerance = a.scalar_type() == at::kBFloat16 ? 0.05 : 1e-5;
  return a.sizes() == b.sizes() && at::allclose(a, b, tolerance, tolerance);
}

struct LayerCase {
  at::ScalarType dtype;
  Sizes sizes;  // the ranks', of outputs or inputs
  int64_t sequence_dim = -1;
  Sizes sequence = {};
  bool bias = true, overlap = true, keep = false;
};
const std::vector<LayerCase> kLayerCases{
    {at::kFloat, {8, 8}},
    {at::kFloat, {6, 5, 5}, -1, {}, false, false},
    {at::kFloat, {16, 0}},
    {at::kBFloat16, {8, 8}},
    {at::kFloat, {8, 8}, 0, {2, 2}},
    {at::kFloat, {4, 4, 4, 4}, 1, {2, 2, 2, 2}, true, true, true},
    {at::kFloat, {10, 6}, 1, {5, 3}, true, false},
    {at::kBFloat16, {6, 6, 4}, 0, {2, 1, 1}, false},
};
constexpr int64_t kBatch = 4, kLength = 8, kWidth = 12;

int64_t sequence_bytes(const at::Tensor& x, const LayerCase& c, int rank) {
  return static_cast<int64_t>(x.nbytes()) / x.size(c.sequence_dim) * c.sequence[rank];
}

}  // namespace

TEST(Layers, ColumnIsTheDenseLayer) {
  for (const LayerCase& c : kLayerCases) {
    const Dense dense(at::randn({kBatch, kLength, kWidth}).to(c.dtype), 16, c.bias);
    const int ranks = static_cast<int>(c.sizes.size());
    run_ranks(ranks, [&](int rank, const comm::GroupPtr& group) {
      SCOPED_TRACE(c10::str(c.sizes, " sequence ", c.sequence_dim, " ", c.dtype));
      const bool cut = c.sequence_dim >= 0;
      const Region region{group, c.sequence_dim, c.sequence, c.overlap, "q_proj", c.keep};
      const auto own = [&](const at::Tensor& t) { return cut ? part(t, c.sequence_dim, c.sequence, rank) : t; };
      const at::Tensor x = leaf(own(dense.x)), weight = leaf(part(dense.weight, 0, c.sizes, rank));
      const at::Tensor bias = c.bias ? leaf(part(dense.bias, 0, c.sizes, rank)) : at::Tensor();
      const auto given_bias = c.bias ? std::optional(bias) : std::nullopt;
      at::Tensor y = column_linear(x, weight, given_bias, region);
      EXPECT_TRUE(close(y, part(dense.y, -1 + 3, c.sizes, rank)));
      y.backward(part(dense.cotangent, 2, c.sizes, rank));
      EXPECT_TRUE(close(x.grad(), own(dense.x_grad)));
      EXPECT_TRUE(close(weight.grad(), part(dense.weight_grad, 0, c.sizes, rank)));
      if (c.bias) {
        EXPECT_TRUE(close(bias.grad(), part(dense.bias_grad, 0, c.sizes, rank)));
      }
      const auto stats = group->stats();
      const auto full = static_cast<int64_t>(dense.x.nbytes());
      if (cut) {
        EXPECT_EQ(stats.all_gather.bytes + stats.reduce_scatter.bytes + stats.all_to_all.bytes,
                  (c.keep ? 1 : 2) * (ranks - 1) * sequence_bytes(dense.x, c, rank) + full / ranks * (ranks - 1));
      }
      EXPECT_EQ(stats.all_reduce.bytes, cut ? 0 : 2 * full * (ranks - 1) / ranks);
      const at::NoGradGuard guard;
      EXPECT_TRUE(column_linear(x, weight, given_bias, region).equal(y));
    });
  }
}

TEST(Layers, RowIsTheDenseLayer) {
  for (const LayerCase& c : kLayerCases) {
    const Dense dense(at::randn({kBatch, kLength, 16}).to(c.dtype), kWidth, c.bias);
    const int ranks = static_cast<int>(c.sizes.size());
    run_ranks(ranks, [&](int rank, const comm::GroupPtr& group) {
      SCOPED_TRACE(c10::str(c.sizes, " sequence ", c.sequence_dim, " ", c.dtype));
      const bool cut = c.sequence_dim >= 0;
      const Region region{group, c.sequence_dim, c.sequence, c.overlap, "o_proj"};
      const auto own = [&](const at::Tensor& t) { return cut ? part(t, c.sequence_dim, c.sequence, rank) : t; };
      const at::Tensor x = leaf(part(dense.x, 2, c.sizes, rank)), weight = leaf(part(dense.weight, 1, c.sizes, rank));
      const at::Tensor bias = c.bias ? leaf(dense.bias) : at::Tensor();
      const auto given_bias = c.bias ? std::optional(bias) : std::nullopt;
      const at::Tensor y = row_linear(x, weight, given_bias, region);
      EXPECT_TRUE(close(y, own(dense.y)));
      y.backward(own(dense.cotangent));
      EXPECT_TRUE(close(x.grad(), part(dense.x_grad, 2, c.sizes, rank)));
      EXPECT_TRUE(close(weight.grad(), part(dense.weight_grad, 1, c.sizes, rank)));
      if (c.bias) {
        EXPECT_TRUE(close(bias.grad(), dense.bias_grad));  // whole on every rank
      }
      const auto stats = group->stats();
      const auto full = static_cast<int64_t>(dense.y.nbytes());
      if (cut) {
        EXPECT_EQ(stats.all_gather.bytes + stats.reduce_scatter.bytes + stats.all_to_all.bytes,
                  (ranks - 1) * sequence_bytes(dense.y, c, rank) + full / ranks * (ranks - 1));
      }
      EXPECT_EQ(stats.all_reduce.bytes, cut ? 0 : 2 * full * (ranks - 1) / ranks);
      const at::NoGradGuard guard;
      EXPECT_TRUE(row_linear(x, weight, given_bias, region).equal(y));
    });
  }
}

// The same arithmetic: rows of a product are the product of the rows.
TEST(Layers, ColumnsHaveTheBitsOfTheDenseLayer) {
  const Dense dense(at::randn({64, 48}), 96, true);
  run_ranks(3, [&](int rank, const comm::GroupPtr& group) {
    const Sizes sizes{32, 32, 32};
    const at::Tensor x = leaf(dense.x), weight = leaf(part(dense.weight, 0, sizes, rank));
    const at::Tensor y = column_linear(x, weight, part(dense.bias, 0, sizes, rank), {group});
    EXPECT_TRUE(y.equal(part(dense.y, 1, sizes, rank)));
    y.backward(part(dense.cotangent, 1, sizes, rank));
    EXPECT_TRUE(weight.grad().equal(part(dense.weight_grad, 0, sizes, rank)));
  });
}

// Three layers of one input: one all-reduce, or one gather each way, whichever of them take part in a backward.
TEST(Layers, OneInputEntersOnce) {
  for (const int64_t sequence_dim : {-1, 0}) {
    const at::Tensor whole = at::randn({4, 6}), weights = at::randn({3, 8, 6}), cotangents = at::randn({3, 4, 8});
    run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
      const auto own = [&](const at::Tensor& t) { return sequence_dim < 0 ? t : t.narrow(0, 2 * rank, 2); };
      const at::Tensor x = leaf(own(whole));
      Region region{group, sequence_dim};
      region.entrance = std::make_shared<Entrance>(3);
      std::vector<at::Tensor> outputs, cuts;
      for (int i = 0; i < 3; ++i) {
        cuts.push_back(leaf(weights[i].narrow(0, 4 * rank, 4)));
        outputs.push_back(column_linear(x, cuts.back(), {}, region));
      }
      const auto loss = [&](std::vector<int> which) {
        at::Tensor sum = at::zeros({});
        for (const int i : which)
          sum = sum + (outputs[i] * cotangents[i].narrow(1, 4 * rank, 4)).sum();
        return sum;
      };
      const auto expected = [&](std::vector<int> which) {
        at::Tensor sum = at::zeros_like(whole);
        for (const int i : which)
          sum = sum + cotangents[i].mm(weights[i]);
        return own(sum);
      };
      EXPECT_EQ(group->stats().all_gather.calls, sequence_dim < 0 ? 0 : 1);
      for (const std::vector<int>& which : std::vector<std::vector<int>>{{0, 1, 2}, {1}, {2, 0}, {0, 1, 2}}) {
        group->reset_stats();
        const auto gradients = torch::autograd::grad({loss(which)}, {x, cuts[which[0]]}, {}, true);
        EXPECT_TRUE(close(gradients[0], expected(which)));
        EXPECT_TRUE(close(gradients[1], cotangents[which[0]].t().mm(whole).narrow(0, 4 * rank, 4)));
        const auto stats = group->stats();
        EXPECT_EQ(stats.all_reduce.calls, sequence_dim < 0 ? 1 : 0);
        EXPECT_EQ(stats.reduce_scatter.calls, sequence_dim < 0 ? 0 : 1);
        EXPECT_EQ(stats.all_gather.calls, sequence_dim < 0 ? 0 : 1);
      }
      // Another tensor, the same one changed, or without gradients, is another input.
      const at::Tensor other = column_linear(x.detach() * 2, cuts[0], {}, region);
      EXPECT_TRUE(close(other, 2 * outputs[0]));
      at::Tensor changing = x.detach().clone();
      column_linear(changing, cuts[0], {}, region);
      changing.mul_(3);
      EXPECT_TRUE(close(column_linear(changing, cuts[0], {}, region), 3 * outputs[0]));
    });
  }
}

// Code between a region's border and its layers sees the whole sequence; what is kept is the part.
TEST(Layers, AnInputThatIsOpenedIsKnownAgain) {
  const at::Tensor whole = at::randn({4, 6}), weights = at::randn({2, 8, 6}), cotangents = at::randn({2, 4, 8});
  run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
    const at::Tensor x = leaf(whole.narrow(0, 2 * rank, 2));
    Region region{group, 0};
    region.entrance = std::make_shared<Entrance>(2);
    const at::Tensor inside = region.entrance->open(x, region);
    EXPECT_TRUE(inside.equal(whole));
    at::Tensor loss = at::zeros({}), expected = at::zeros_like(whole);
    for (int i = 0; i < 2; ++i) {
      const at::Tensor out = column_linear(inside, weights[i].narrow(0, 4 * rank, 4), {}, region);
      loss = loss + (out * cotangents[i].narrow(1, 4 * rank, 4)).sum();
      expected = expected + cotangents[i].mm(weights[i]);
    }
    loss.backward();
    EXPECT_TRUE(close(x.grad(), expected.narrow(0, 2 * rank, 2)));
    EXPECT_EQ(group->stats().all_gather.calls, 1);  // frozen weights: not once more
    EXPECT_EQ(group->stats().reduce_scatter.calls, 1);
    EXPECT_HAS(error_of([&] { column_linear(x, weights[0].narrow(0, 4 * rank, 4), {}, region); }),
               "its input is not what came into the module");
  });
}

// A group of two of which the other rank never answers; notes what is called.
namespace {
class Recorder : public comm::Group {
 public:
  explicit Recorder(std::vector<std::string>& events) : events_(events) {}
  int rank() const override { return 0; }
  int size() const override { return 2; }
  std::string name() const override { return "recorder"; }
  void abort(const std::string&) override {}

 protected:
  struct Noted : comm::Pending::Work {
    explicit Noted(std::vector<std::string>& events) : events(events) {}
    void wait() override { events.emplace_back("wait"); }
    bool wait_for(std::chrono::milliseconds) override { return false; }
    std::vector<std::string>& events;
  };
  comm::Pending launch(const char* name) {
    events_.emplace_back(name);
    return comm::Pending(std::make_unique<Noted>(events_));
  }
  comm::Pending do_all_gather(at::Tensor out, at::Tensor, comm::Label) override {
    return out.zero_(), launch("gather");
  }
  comm::Pending do_reduce_scatter(at::Tensor out, at::Tensor, comm::ReduceOp, comm::Label) override {
    return out.zero_(), launch("scatter");
  }
  comm::Pending do_all_reduce(at::Tensor, comm::ReduceOp, comm::Label) override { return launch("sum"); }
  comm::Pending do_broadcast(at::Tensor, int, comm::Label) override { return {}; }
  comm::Pending do_all_to_all(at::Tensor, at::Tensor, std::vector<int64_t>, std::vector<int64_t>,
                              comm::Label) override {
    return {};
  }
  void do_barrier(comm::Label) override {}
  comm::GroupPtr do_sibling(c10::Device) override { return nullptr; }

 private:
  std::vector<std::string>& events_;
};
}  // namespace

TEST(Layers, TheSumRunsUnderTheWeightGradient) {
  using Events = std::vector<std::string>;
  for (const auto& [overlap, sequence, expected] :
       std::vector<std::tuple<bool, int64_t, Events>>{{true, -1, {"sum", "weight", "wait"}},
                                                      {false, -1, {"weight", "sum", "wait"}},
                                                      {true, 0, {"gather", "wait", "scatter", "weight", "wait"}},
                                                      {false, 0, {"gather", "wait", "weight", "scatter", "wait"}}}) {
    Events events;
    const at::Tensor x = at::ones({4, 3}).requires_grad_(), weight = at::ones({2, 3}).requires_grad_();
    const at::Tensor y = column_linear(x, weight, {}, {std::make_shared<Recorder>(events), sequence, {}, overlap});
    weight.register_hook([&](const at::Tensor&) { events.emplace_back("weight"); });
    events.clear();
    y.sum().backward();
    EXPECT_EQ(events, expected);
  }
}

TEST(Layers, MayBeDifferentiatedTwice) {
  for (const int64_t sequence_dim : {-1, 0}) {
    const at::Tensor whole = at::randn({4, 6}, at::kDouble), first = at::randn({8, 6}, at::kDouble);
    const at::Tensor second = at::randn({5, 8}, at::kDouble), bias = at::randn({5}, at::kDouble);
    const auto penalty = [](const at::Tensor& y, const at::Tensor& x) {
      return torch::autograd::grad({y.sin().sum()}, {x}, {}, true, true)[0].square().sum();
    };
    const at::Tensor x = leaf(whole), a = leaf(first), b = leaf(second);
    penalty(at::linear(at::linear(x, a).tanh(), b, bias), x).backward();
    run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
      const auto own = [&](const at::Tensor& t) { return sequence_dim < 0 ? t : t.narrow(0, 2 * rank, 2); };
      const at::Tensor mine = leaf(own(whole)), up = leaf(first.narrow(0, 4 * rank, 4));
      const at::Tensor down = leaf(second.narrow(1, 4 * rank, 4));
      const Region region{group, sequence_dim};
      penalty(row_linear(column_linear(mine, up, {}, region).tanh(), down, bias, region), mine).backward();
      EXPECT_TRUE(at::allclose(mine.grad(), own(x.grad())));
      EXPECT_TRUE(at::allclose(up.grad(), a.grad().narrow(0, 4 * rank, 4)));
      EXPECT_TRUE(at::allclose(down.grad(), b.grad().narrow(1, 4 * rank, 4)));
    });
  }
}

TEST(Layers, AutocastIsThatOfLinear) {
  const at::Tensor x = at::randn({6, 8}), weight = at::randn({8, 8}), bias = at::randn({8});
  run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const at::Tensor dense = at::linear(x, weight, bias);
    const at::Tensor in = leaf(x), up = leaf(weight.narrow(0, 4 * rank, 4)), down = leaf(weight.narrow(1, 4 * rank, 4));
    const at::Tensor columns = column_linear(in, up, bias.narrow(0, 4 * rank, 4), {group});
    const at::Tensor rows = row_linear(x.narrow(1, 4 * rank, 4), down, bias, {group});
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
    EXPECT_EQ(dense.scalar_type(), at::kBFloat16);
    EXPECT_EQ(columns.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(close(columns, dense.narrow(1, 4 * rank, 4)));
    EXPECT_TRUE(close(rows, dense));
    (columns.sum() + rows.sum()).backward();
    EXPECT_EQ(in.grad().scalar_type(), at::kFloat);
    EXPECT_EQ(group->stats().all_reduce.bytes, 2 * 6 * 8 * 2);  // two sums of 16-bit numbers
    EXPECT_TRUE(at::allclose(down.grad(), x.narrow(1, 4 * rank, 4).sum(0).expand({8, 4}), 0.05, 0.05));
  });
}

TEST(Layers, FrozenParts) {
  run_ranks(2, [&](int, const comm::GroupPtr& group) {
    const at::Tensor x = at::ones({2, 4}), weight = at::ones({3, 4});
    // Only the weight: nothing to sum. Only the input: no gradient for the weight.
    const at::Tensor trained = leaf(weight);
    column_linear(x, trained, {}, {group}).sum().backward();
    EXPECT_EQ(group->stats().all_reduce.calls, 0);
    EXPECT_TRUE(trained.grad().equal(at::full({3, 4}, 2.0)));
    const at::Tensor input = leaf(x);
    column_linear(input, weight, {}, {group}).sum().backward();
    EXPECT_TRUE(input.grad().equal(at::full({2, 4}, 6.0)));
    EXPECT_FALSE(column_linear(x, weight, {}, {group}).requires_grad());
    EXPECT_TRUE(column_linear(input, weight, {}, {comm::single_group()}).equal(at::full({2, 3}, 4.0)));
  });
}

TEST(Layers, Errors) {
  const Region region{comm::single_group(), -1, {}, true, "layers.0.q_proj"};
  const at::Tensor x = at::ones({2, 4}), weight = at::ones({3, 4});
  EXPECT_HAS(error_of([&] { column_linear(at::ones({2, 5}), weight, {}, region); }), "layers.0.q_proj");
  EXPECT_HAS(error_of([&] { row_linear(at::ones({2, 5}), weight, {}, region); }), "[2, 5] does not fit");
  EXPECT_HAS(error_of([&] { row_linear(x, weight, at::ones({4}), region); }), "a bias of 4 elements");
  EXPECT_HAS(error_of([&] { row_linear(x, weight, {}, {nullptr}); }), "no group");
  EXPECT_HAS(error_of([&] { row_linear(x, weight, {}, {comm::single_group(), 1}); }), "cannot be dim 1");
}

}  // namespace tessera::parallel
