#include "tessera/parallel/functions.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>

#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera::parallel {

using testing::error_of;
using testing::run_ranks;
using Tensors = std::vector<at::Tensor>;

namespace {

at::Tensor sum_of(const Tensors& tensors) {
  at::Tensor sum = tensors[0].to(at::kFloat);
  for (size_t r = 1; r < tensors.size(); ++r)
    sum = sum + tensors[r].to(at::kFloat);
  return sum.to(tensors[0].scalar_type());
}

at::Tensor part_of(const at::Tensor& whole, int64_t dim, const Sizes& sizes, int rank) {
  const auto range = ranges_of(sizes)[rank];
  return whole.narrow(dim, range.begin, range.size());
}

int64_t bytes(const at::Tensor& t) {
  return static_cast<int64_t>(t.nbytes());
}

// The ranks' tensors along `dim`, or the whole on every rank.
Sizes shape(int64_t dim, int64_t size) {
  Sizes sizes{2, 3, 5};
  sizes[dim] = size;
  return sizes;
}

struct Function {
  const char* name;
  bool cut_input, cut_output;  // along dim
  std::function<at::Tensor(const at::Tensor&, const comm::GroupPtr&, int64_t, const Sizes&)> call;
  // By dense arithmetic: what `rank` gets for the ranks' inputs.
  std::function<at::Tensor(const Tensors&, int64_t, const Sizes&, int)> forward, backward;
  // What rank `r` sends at least, with the ranks' sizes of a whole of `full` bytes.
  std::function<int64_t(int64_t full, int64_t own, int ranks)> sent, sent_back;
};

const std::vector<Function>& functions() {
  const auto identity = [](const Tensors& x, int64_t, const Sizes&, int r) { return x[r]; };
  const auto sum = [](const Tensors& x, int64_t, const Sizes&, int) { return sum_of(x); };
  const auto gather = [](const Tensors& x, int64_t dim, const Sizes&, int) { return at::cat(x, dim); };
  const auto split = [](const Tensors& x, int64_t dim, const Sizes& sizes, int r) {
    return part_of(x[r], dim, sizes, r);
  };
  const auto scatter = [](const Tensors& x, int64_t dim, const Sizes& sizes, int r) {
    return part_of(sum_of(x), dim, sizes, r);
  };
  const auto none = [](int64_t, int64_t, int) -> int64_t { return 0; };
  const auto twice = [](int64_t full, int64_t, int ranks) { return 2 * full * (ranks - 1) / ranks; };
  const auto to_each = [](int64_t, int64_t own, int ranks) { return own * (ranks - 1); };
  const auto parts = [](int64_t full, int64_t, int ranks) { return full / ranks * (ranks - 1); };
  static const std::vector<Function> all{
      {"copy_to_ranks", false, false, [](auto& x, auto& g, int64_t, auto&) { return copy_to_ranks(x, g, "here"); },
       identity, sum, none, twice},
      {"reduce_from_ranks", false, false,
       [](auto& x, auto& g, int64_t, auto&) { return reduce_from_ranks(x, g, "here"); }, sum, identity, twice, none},
      {"gather_from_ranks", true, false,
       [](auto& x, auto& g, int64_t d, auto& s) { return gather_from_ranks(x, g, d, s, "here"); }, gather, split,
       to_each, none},
      {"split_to_ranks", false, true,
       [](auto& x, auto& g, int64_t d, auto& s) { return split_to_ranks(x, g, d, s, "here"); }, split, gather, none,
       to_each},
      {"gather_for_use", true, false,
       [](auto& x, auto& g, int64_t d, auto& s) { return gather_for_use(x, g, d, s, "here"); }, gather, scatter,
       to_each, parts},
      {"scatter_sum", false, true, [](auto& x, auto& g, int64_t d, auto& s) { return scatter_sum(x, g, d, s, "here"); },
       scatter, gather, parts, to_each},
  };
  return all;
}

int64_t sent_by(const comm::CommStats& stats) {
  return stats.all_gather.bytes + stats.all_reduce.bytes + stats.reduce_scatter.bytes + stats.all_to_all.bytes;
}

struct Case {
  int ranks;
  Sizes sizes;
  int64_t dim;
  bool name_sizes;
};
const std::vector<Case> kCases{{1, {4}, 0, true},         {2, {3, 3}, 0, false},     {2, {3, 3}, 1, true},
                               {2, {4, 1}, 2, true},      {3, {2, 2, 2}, -1, false}, {3, {3, 2, 0}, 0, true},
                               {4, {2, 1, 1, 1}, 1, true}};

}  // namespace

// Forward, backward and the backward of the backward equal dense arithmetic, to the bit; bytes are the least.
TEST(Functions, AreTheDenseArithmetic) {
  for (const Function& f : functions()) {
    for (const Case& c : kCases) {
      for (const auto dtype : {at::kFloat, at::kBFloat16}) {
        const int64_t dim = c.dim < 0 ? c.dim + 3 : c.dim;
        int64_t total = 0;
        for (const int64_t size : c.sizes)
          total += size;
        Tensors inputs, weights, seconds;
        for (int r = 0; r < c.ranks; ++r) {
          inputs.push_back(at::randn(shape(dim, f.cut_input ? c.sizes[r] : total)).to(dtype));
          weights.push_back(at::randn(shape(dim, f.cut_output ? c.sizes[r] : total)).to(dtype));
          seconds.push_back(at::randn_like(inputs.back()));
        }
        run_ranks(c.ranks, [&](int rank, const comm::GroupPtr& group) {
          SCOPED_TRACE(c10::str(f.name, " of ", c.ranks, " ranks along ", c.dim, ", ", dtype));
          at::Tensor x = inputs[rank].clone().requires_grad_();
          at::Tensor w = weights[rank].clone().requires_grad_();
          const Sizes sizes = c.name_sizes ? c.sizes : Sizes();
          const int64_t full = bytes(at::empty(shape(dim, total), dtype));
          const int64_t own = bytes(at::empty(shape(dim, c.sizes[rank]), dtype));
          at::Tensor y = f.call(x, group, c.dim, sizes);
          EXPECT_TRUE(y.equal(f.forward(inputs, dim, c.sizes, rank)));
          EXPECT_EQ(sent_by(group->stats()), f.sent(full, own, c.ranks));
          group->reset_stats();
          const at::Tensor gradient = torch::autograd::grad({y}, {x}, {w}, true, true)[0];
          EXPECT_TRUE(gradient.equal(f.backward(weights, dim, c.sizes, rank)));
          EXPECT_EQ(sent_by(group->stats()), f.sent_back(full, own, c.ranks));
          const at::Tensor second = torch::autograd::grad({gradient}, {w}, {seconds[rank]})[0];
          EXPECT_TRUE(second.equal(f.forward(seconds, dim, c.sizes, rank)));
          // A gradient that nobody else holds, which may be overwritten; another that all hold.
          (y * w.detach()).sum().backward();
          EXPECT_TRUE(x.grad().equal(f.backward(weights, dim, c.sizes, rank)));
          EXPECT_TRUE(w.equal(weights[rank]) && x.equal(inputs[rank]));
        });
      }
    }
  }
}

TEST(Functions, WithoutGradients) {
  for (const Function& f : functions()) {
    run_ranks(2, [&](int, const comm::GroupPtr& group) {
      const at::Tensor x = at::ones({2, 4});
      EXPECT_FALSE(f.call(x, group, 1, {}).requires_grad());
      const at::Tensor leaf = at::ones({2, 4}).requires_grad_();
      {
        const at::NoGradGuard guard;
        EXPECT_TRUE(f.call(leaf, group, 1, {}).is_leaf());
      }
      // The result may be changed in place; the input has its own values.
      const at::Tensor y = f.call(leaf.clone(), group, 1, {});
      EXPECT_TRUE(y.requires_grad());
      y.mul_(2).sum().backward();
      EXPECT_TRUE(leaf.grad().defined());
      EXPECT_TRUE(leaf.equal(at::ones({2, 4})));
    });
  }
}

TEST(Functions, Errors) {
  const at::Tensor x = at::ones({3, 5});
  run_ranks(2, [&](int, const comm::GroupPtr& group) {
    const auto error = [&](const auto& call) {
      const std::string message = error_of(call);
      EXPECT_HAS(message, "layers.0");
      return message;
    };
    EXPECT_HAS(error([&] { split_to_ranks(x, group, 1, {}, "layers.0"); }), "5 elements along dim 1 do not divide");
    EXPECT_HAS(error([&] { scatter_sum(x, group, 0, {2, 2}, "layers.0"); }), "add up to 4, the tensor has 3");
    EXPECT_HAS(error([&] { scatter_sum(x, group, 0, {1, 1, 1}, "layers.0"); }), "3 sizes for 2 ranks");
    EXPECT_HAS(error([&] { gather_for_use(x, group, 0, {2, 2}, "layers.0"); }), "has 3 elements along dim 0, its size");
    EXPECT_HAS(error([&] { gather_from_ranks(x, group, 2, {}, "layers.0"); }), "2 dims has no dim 2");
    EXPECT_HAS(error([&] { copy_to_ranks(x, nullptr, "layers.0"); }), "no group");
    EXPECT_HAS(error([&] { exchange({x}, group, 0, 0, {}, {}, "layers.0"); }), "cannot be cut and joined at once");
    EXPECT_HAS(error([&] { exchange({x}, group, 1, 0, {}, {}, "layers.0"); }), "5 elements along dim 1 do not divide");
    EXPECT_HAS(error([&] { exchange({x, x.to(at::kDouble)}, group, 1, 0, {{3, 2}, {3, 2}}, {}, "layers.0"); }),
               "tensor 1 differs");
    EXPECT_HAS(error([&] { exchange({x, x}, group, 1, 0, {{3, 2}}, {}, "layers.0"); }), "2 are given");
    EXPECT_HAS(error([&] { exchange({}, group, 1, 0, {}, {}, "layers.0"); }), "nothing to exchange");
  });
}

// Query, key and value cut along the sequence come back cut along the heads: of unlike numbers, uneven, of other widths.
TEST(Functions, ExchangeDealsOutHeads) {
  struct Heads {
    Sizes heads, widths;  // of query, key, value
    std::vector<Sizes> sizes;
    Sizes lengths;
  };
  const std::vector<Heads> cases{
      {{4, 4, 4}, {3, 3, 3}, {}, {2, 2}},
      {{6, 3, 3}, {2, 2, 2}, {{4, 2}, {2, 1}, {2, 1}}, {3, 2}},
      {{3, 3, 3}, {4, 4, 2}, {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}}, {1, 2, 3}},
      {{4, 2, 2}, {2, 2, 2}, {{2, 2, 0}, {1, 1, 0}, {1, 1, 0}}, {2, 2, 2}},
      {{8}, {2}, {}, {2, 2, 2, 2}},
  };
  for (const Heads& c : cases) {
    const int ranks = static_cast<int>(c.lengths.size());
    for (const int64_t batch : {1, 2}) {
      for (const bool batch_first : {false, true}) {
        const int64_t sequence = batch_first ? 1 : 0;
        int64_t length = 0;
        for (const int64_t size : c.lengths)
          length += size;
        std::vector<Sizes> heads = c.sizes;
        Tensors wholes, weights;
        for (size_t i = 0; i < c.heads.size(); ++i) {
          Sizes sizes{length, batch, c.heads[i], c.widths[i]};
          if (batch_first) std::swap(sizes[0], sizes[1]);
          wholes.push_back(at::randn(sizes));
          weights.push_back(at::randn(sizes));
          if (c.sizes.empty()) heads.push_back(Sizes(ranks, c.heads[i] / ranks));
        }
        run_ranks(ranks, [&](int rank, const comm::GroupPtr& group) {
          SCOPED_TRACE(c10::str("heads ", c.heads, " batch ", batch, batch_first ? " first" : " second"));
          Tensors parts;
          for (const at::Tensor& whole : wholes)
            parts.push_back(part_of(whole, sequence, c.lengths, rank).clone().requires_grad_());
          const Tensors dealt = exchange(parts, group, 2, sequence, c.sizes, c.lengths, "qkv");
          EXPECT_EQ(group->stats().all_to_all.calls, 1);
          at::Tensor loss = at::zeros({});
          for (size_t i = 0; i < dealt.size(); ++i) {
            EXPECT_TRUE(dealt[i].equal(part_of(wholes[i], 2, heads[i], rank)));
            loss = loss + (dealt[i] * part_of(weights[i], 2, heads[i], rank)).sum();
          }
          // One copy: the results lie in the receive buffer.
          const bool alike = c.widths.back() == c.widths.front();
          if (alike && (!batch_first || batch == 1)) {
            for (const at::Tensor& t : dealt)
              EXPECT_EQ(t.storage().data(), dealt[0].storage().data());
          }
          loss.backward({}, true);
          EXPECT_EQ(group->stats().all_to_all.calls, 2);
          for (size_t i = 0; i < parts.size(); ++i)
            EXPECT_TRUE(parts[i].grad().equal(part_of(weights[i], sequence, c.lengths, rank)));
          // There and back; a gradient of a gradient.
          const Tensors back = exchange({dealt[0]}, group, sequence, 2, {c.lengths}, heads[0]);
          EXPECT_TRUE(back[0].equal(parts[0]));
          const auto first = torch::autograd::grad({back[0].square().sum()}, {parts[0]}, {}, true, true)[0];
          EXPECT_TRUE(first.equal(2 * parts[0]));
          EXPECT_TRUE(torch::autograd::grad({first.sum()}, {parts[0]})[0].equal(at::full_like(parts[0], 2)));
          dealt.back().mul_(2);  // no view of anything that autograd knows
        });
      }
    }
  }
}

}  // namespace tessera::parallel
