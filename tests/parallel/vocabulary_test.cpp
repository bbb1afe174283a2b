#include "tessera/parallel/vocabulary.h"

#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

#include "tests/parallel/part.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera::parallel {

using testing::error_of;
using testing::run_ranks;

TEST(Vocabulary, EmbeddingIsTheWhole) {
  struct Case {
    Sizes rows;
    int64_t padding = -1, sequence_dim = -1;
    Sizes sequence = {};
  };
  for (const Case& c :
       std::vector<Case>{{{6, 5}, 3}, {{4, 4, 3}, 9, 0, {1, 1, 1}}, {{11, 0}, 10, 1, {3, 2}}, {{3, 3, 3, 2}}}) {
    const at::Tensor weight = at::randn({11, 4}), indices = at::randint(11, {3, 5}), cotangent = at::randn({3, 5, 4});
    const at::Tensor expected = at::embedding(weight, indices, c.padding);
    const at::Tensor gradient = at::embedding_dense_backward(cotangent, indices, 11, c.padding, false);
    run_ranks(static_cast<int>(c.rows.size()), [&](int rank, const comm::GroupPtr& group) {
      const auto own = [&](const at::Tensor& t) {
        return c.sequence_dim < 0 ? t : part(t, c.sequence_dim, c.sequence, rank);
      };
      const Region region{group, c.sequence_dim, c.sequence, true, "embed_tokens"};
      const at::Tensor rows = part(weight, 0, c.rows, rank).requires_grad_();
      const int64_t begin = ranges_of(c.rows)[rank].begin;
      const at::Tensor y = vocab_embedding(indices, rows, begin, 11, c.padding, region);
      EXPECT_TRUE(y.equal(own(expected)));
      y.backward(own(cotangent), true);
      EXPECT_TRUE(rows.grad().equal(part(gradient, 0, c.rows, rank)));
      if (*std::ranges::min_element(c.rows) > 0) {  // a second derivative
        const at::Tensor weighted = at::randn_like(y).requires_grad_();
        const auto first = torch::autograd::grad({y}, {rows}, {weighted}, true, true)[0];
        const auto second = torch::autograd::grad({first}, {weighted}, {at::ones_like(first)})[0];
        EXPECT_TRUE(second.equal(own((indices != c.padding).to(at::kFloat).unsqueeze(-1).expand({3, 5, 4}))));
      }
      const at::NoGradGuard guard;
      EXPECT_TRUE(vocab_embedding(indices, rows, begin, 11, c.padding, region).equal(own(expected)));
    });
  }
}

TEST(Vocabulary, EmbeddingErrors) {
  const Region region{comm::single_group(), -1, {}, true, "embed_tokens"};
  const at::Tensor weight = at::ones({4, 2});
  for (const int64_t index : {-1, 8}) {
    const std::string error =
        error_of([&] { vocab_embedding(at::full({2}, index, at::kLong), weight, 0, 8, -1, region); });
    EXPECT_HAS(error, c10::str("index ", index, " is out of range for a vocabulary of 8"));
    EXPECT_HAS(error, "embed_tokens");
  }
  EXPECT_HAS(error_of([&] { vocab_embedding(at::ones({2}), weight, 0, 8, -1, region); }), "indices are integers");
  EXPECT_HAS(error_of([&] { vocab_embedding(at::zeros({2}, at::kLong), weight, 5, 8, -1, region); }), "from 5 on");
}

TEST(Vocabulary, CrossEntropyIsTheWhole) {
  for (const Sizes& sizes : std::vector<Sizes>{{17}, {9, 8}, {6, 6, 5}, {17, 0}}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      for (const bool give_away : {false, true}) {
        const at::Tensor logits = (3 * at::randn({4, 6, 17})).to(dtype), weights = at::randn({4, 6});
        at::Tensor target = at::randint(17, {4, 6});
        target[1][2] = -100;
        const at::Tensor whole = logits.clone().requires_grad_();
        const at::Tensor expected =
            at::cross_entropy_loss(whole.to(at::kFloat).flatten(0, 1), target.flatten(), {}, at::Reduction::None);
        expected.backward(weights.flatten());
        const int ranks = static_cast<int>(sizes.size());
        run_ranks(ranks, [&](int rank, const comm::GroupPtr& group) {
          const int64_t begin = ranges_of(sizes)[rank].begin;
          at::Tensor leaf = part(logits, 2, sizes, rank).requires_grad_();
          const at::Tensor mine = leaf * 1;
          const at::Tensor losses = vocab_cross_entropy(mine, target, begin, 17, group, -100, give_away);
          EXPECT_EQ(losses.scalar_type(), at::kFloat);
          EXPECT_TRUE(at::allclose(losses.flatten(), expected, 1e-5, 1e-5));
          EXPECT_EQ(group->stats().all_reduce.bytes, ranks == 1 ? 0 : 3 * (2 * 24 * 4 * (ranks - 1) / ranks));
          EXPECT_EQ(group->stats().all_reduce.calls, 2);
          losses.backward(weights, true);
          const double tolerance = dtype == at::kFloat ? 1e-5 : 0.02;
          EXPECT_TRUE(at::allclose(leaf.grad(), part(whole.grad(), 2, sizes, rank), tolerance, tolerance));
          EXPECT_EQ(group->stats().all_reduce.calls, 2);
          const std::string again = error_of([&] { losses.backward(weights); });
          if (give_away)
            EXPECT_HAS(again, "given away");
          else
            EXPECT_EQ(again, "");
          const at::NoGradGuard guard;
          EXPECT_TRUE(vocab_cross_entropy(leaf, target, begin, 17, group).equal(losses));
        });
      }
    }
  }
}

TEST(Vocabulary, CrossEntropyErrors) {
  const auto group = comm::single_group();
  const at::Tensor logits = at::randn({3, 8}).requires_grad_(), target = at::zeros({3}, at::kLong);
  EXPECT_HAS(error_of([&] { vocab_cross_entropy(logits, at::full({3}, 9, at::kLong), 0, 8, group); }), "index 9");
  EXPECT_HAS(error_of([&] { vocab_cross_entropy(logits, at::zeros({4}, at::kLong), 0, 8, group); }), "[4]");
  EXPECT_HAS(error_of([&] { vocab_cross_entropy(logits, target, 4, 8, group); }), "columns 4 to 12");
  EXPECT_HAS(error_of([&] {
               torch::autograd::grad({vocab_cross_entropy(logits, target, 0, 8, group).sum()}, {logits}, {}, true,
                                     true);
             }),
             "cannot be differentiated twice");
}

TEST(Vocabulary, ErrorsOfTheLossOfASequence) {
  const auto error = [](const at::Tensor& logits, const at::Tensor& target,
                        const comm::GroupPtr& group = comm::single_group()) {
    return error_of([&] { sequence_cross_entropy(logits, target, group).sum().backward({}, true, true); });
  };
  const at::Tensor logits = at::randn({3, 1, 8}).requires_grad_(), target = at::zeros({3, 1}, at::kLong);
  const std::string origin = "[sequence_cross_entropy] ";
  EXPECT_HAS(error(logits.select(1, 0), target.select(1, 0)),
             origin + "logits have the sizes [3, 8], target [3]; they must be [sequence, batch, vocabulary] and [seq");
  EXPECT_HAS(error(logits, target.narrow(0, 0, 2)), origin + "logits have the sizes [3, 1, 8], target [2, 1]");
  EXPECT_HAS(error(logits.to(at::kLong), target), origin + "logits are floating-point numbers, not Long");
  EXPECT_HAS(error(logits, target, nullptr), origin + "there is no group");
  EXPECT_HAS(error(logits, target + 9), "target of sequence_cross_entropy: index 9");
  EXPECT_HAS(error(logits, target), "sequence_cross_entropy cannot be differentiated twice");
}

TEST(Vocabulary, LossOfASequenceInParts) {
  for (const Sizes& sizes : std::vector<Sizes>{{3, 3}, {4, 2, 1}}) {
    int64_t length = 0;
    for (const int64_t size : sizes)
      length += size;
    const at::Tensor logits = at::randn({length, 2, 9}), weights = at::randn({length, 2});
    at::Tensor target = at::randint(9, {length, 2});
    target[0][1] = 7;
    const at::Tensor whole = logits.clone().requires_grad_();
    const at::Tensor expected =
        at::cross_entropy_loss(whole.flatten(0, 1), target.flatten(), {}, at::Reduction::None, 7).view({length, 2});
    (expected * weights).sum().backward();
    run_ranks(static_cast<int>(sizes.size()), [&](int rank, const comm::GroupPtr& group) {
      const at::Tensor mine = part(logits, 0, sizes, rank).requires_grad_();
      const at::Tensor losses = sequence_cross_entropy(mine, part(target, 0, sizes, rank), group, 7, sizes);
      EXPECT_TRUE(at::allclose(losses, expected, 1e-5, 1e-5));
      (losses * weights).sum().backward();
      EXPECT_TRUE(at::allclose(mine.grad(), part(whole.grad(), 0, sizes, rank), 1e-5, 1e-6));
    });
  }
}

// Its gradients, averaged over the ranks, are those of one rank; one of the ranks has no token that counts.
TEST(Vocabulary, MeanOverASequence) {
  const Sizes sizes{4, 2, 1};
  const at::Tensor x = at::randn({7}), labels = at::tensor({1, -100, 2, 3, -100, -100, 4});
  const at::Tensor whole = x.clone().requires_grad_();
  const at::Tensor counts = labels != -100;
  const at::Tensor expected = whole.square().masked_select(counts).mean();
  expected.backward();
  run_ranks(3, [&](int rank, const comm::GroupPtr& group) {
    const at::Tensor mine = part(x, 0, sizes, rank).requires_grad_();
    const at::Tensor own = part(labels, 0, sizes, rank);
    const at::Tensor loss = mean_over_sequence(mine.square().masked_select(own != -100).mean(), own, group);
    EXPECT_TRUE(at::allclose(loss, expected));
    (loss * 2).backward();
    const at::Tensor gradient = mine.grad() / (2 * 3);  // by what the loss was times, and the mean over ranks
    EXPECT_TRUE(at::allclose(at::nan_to_num(gradient), part(whole.grad(), 0, sizes, rank))) << rank;
  });
}

}  // namespace tessera::parallel
