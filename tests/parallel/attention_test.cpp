#include "tessera/parallel/attention.h"

#include "tests/parallel/part.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera::parallel {

using testing::error_of;
using testing::run_ranks;

namespace {

// Causal attention of [.., heads, width] tensors; `sequence_dim` of the layout.
at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, int64_t sequence_dim) {
  const auto turned = [&](const at::Tensor& t) {
    return sequence_dim == 0 ? t.permute({1, 2, 0, 3}) : t.transpose(1, 2);
  };
  const at::Tensor out =
      at::scaled_dot_product_attention(turned(query), turned(key), turned(value), {}, 0.0, true, {}, true);
  return sequence_dim == 0 ? out.permute({2, 0, 1, 3}) : out.transpose(1, 2);
}

}  // namespace

// The result and the gradients are those of attention over the whole sequence.
TEST(Attention, IsThatOfTheWholeSequence) {
  struct Case {
    int64_t queries, keys;
    Sizes lengths;
    int64_t value_width = 8;
    int parts = 1, made = 1;  // wanted, and as many as heads allow
  };
  for (const Case& c : std::vector<Case>{{4, 4, {6, 6}},
                                         {8, 2, {6, 6}},
                                         {3, 3, {6, 6}},
                                         {6, 3, {4, 8}},
                                         {4, 2, {4, 4, 4}},
                                         {6, 2, {3, 3, 3, 3}},
                                         {4, 1, {8, 4}, 4},
                                         {8, 8, {6, 6}, 8, 2, 2},
                                         {12, 6, {8, 4}, 4, 2, 2},
                                         {12, 12, {6, 6}, 8, 9, 6},
                                         {6, 3, {6, 6}, 8, 2, 1}}) {
    for (const int64_t sequence_dim : {0, 1}) {
      const int ranks = static_cast<int>(c.lengths.size());
      std::vector<at::Tensor> wholes;
      for (const auto& [heads, width] :
           {std::pair(c.queries, int64_t{8}), std::pair(c.keys, int64_t{8}), std::pair(c.keys, c.value_width)})
        wholes.push_back(
            (sequence_dim == 0 ? at::randn({12, 2, heads, width}) : at::randn({2, 12, heads, width})).requires_grad_());
      const at::Tensor expected = attend(wholes[0], wholes[1], wholes[2], sequence_dim),
                       cotangent = at::randn_like(expected);
      expected.backward(cotangent);
      run_ranks(ranks, [&](int rank, const comm::GroupPtr& group) {
        SCOPED_TRACE(c10::str(c.queries, " and ", c.keys, " heads, ", ranks, " ranks, sequence dim ", sequence_dim));
        const Sizes lengths = c.lengths[0] == c.lengths[1] ? Sizes() : c.lengths;
        const auto own = [&](const at::Tensor& t) { return part(t, sequence_dim, c.lengths, rank); };
        std::vector<at::Tensor> mine;
        for (const at::Tensor& whole : wholes)
          mine.push_back(own(whole.detach()).requires_grad_());
        SequenceAttention attention(&attend, {group, sequence_dim, lengths, c.parts});
        const at::Tensor out = attention(mine[0], mine[1], mine[2], sequence_dim);
        EXPECT_TRUE(at::allclose(out, own(expected), 1e-5, 1e-6));
        EXPECT_EQ(group->stats().all_to_all.calls, 2 * c.made);
        const int64_t bytes = group->stats().all_to_all.bytes;
        out.backward(own(cotangent));
        EXPECT_EQ(group->stats().all_to_all.calls, 4 * c.made);
        const bool even = lengths.empty() && c.queries % ranks == 0 && c.keys % ranks == 0;
        EXPECT_TRUE(!even || group->stats().all_to_all.bytes == 2 * bytes);
        for (size_t i = 0; i < mine.size(); ++i)
          EXPECT_TRUE(at::allclose(mine[i].grad(), own(wholes[i].grad()), 1e-4, 1e-5)) << i;
      });
    }
  }
}

TEST(Attention, Heads) {
  const auto heads = [](int64_t queries, int64_t keys, int ranks) {
    const Heads dealt = deal_heads(queries, keys, ranks);
    return std::tuple(dealt.queries, dealt.keys, dealt.repeat);
  };
  EXPECT_EQ(heads(8, 8, 4), (std::tuple(Sizes{2, 2, 2, 2}, Sizes{2, 2, 2, 2}, 1)));
  EXPECT_EQ(heads(12, 3, 2), (std::tuple(Sizes{8, 4}, Sizes{2, 1}, 1)));
  EXPECT_EQ(heads(8, 2, 4), (std::tuple(Sizes{2, 2, 2, 2}, Sizes{1, 1, 1, 1}, 2)));
  EXPECT_EQ(heads(6, 2, 3), (std::tuple(Sizes{2, 2, 2}, Sizes{2, 2, 2}, 3)));
  EXPECT_EQ(heads(5, 1, 4), (std::tuple(Sizes{2, 1, 1, 1}, Sizes{2, 1, 1, 1}, 5)));
  EXPECT_HAS(error_of([] { deal_heads(3, 3, 4); }), "3 query heads are too few for 4 ranks (sequence_parallel_size)");
  EXPECT_HAS(error_of([] { deal_heads(4, 3, 2, "mine"); }),
             "[mine] sequence parallel attention: 3 key/value heads do not divide 4");
}

TEST(Attention, Errors) {
  const auto group = comm::single_group();
  const at::Tensor q = at::ones({4, 1, 2, 3});
  const auto local = [](const at::Tensor& query, const at::Tensor&, const at::Tensor&) {
    return query.narrow(2, 0, 1);
  };
  EXPECT_HAS(error_of([&] { SequenceAttention(local, {group})(q, q, q); }), "does not have the 2 heads");
  EXPECT_HAS(error_of([&] { SequenceAttention(local, {group, 2}); }),
             "[SequenceAttention] sequence_dim must be 0 or 1, got 2");
  EXPECT_HAS(error_of([&] { SequenceAttention(local, {group})(q, q, q.narrow(2, 0, 1)); }),
             "2 key heads and 1 value heads");
  EXPECT_HAS(error_of([&] { SequenceAttention(local, {group})(q[0], q, q); }),
             "[SequenceAttention] query has the sizes [1, 2, 3], query [1, 2, 3]: all must be 4-D with the sequence");
  EXPECT_HAS(error_of([&] { SequenceAttention(local, {group})(q, q.narrow(0, 0, 3), q); }),
             "[SequenceAttention] key has the sizes [3, 1, 2, 3], query [4, 1, 2, 3]: all must be 4-D");
  for (const int parts : {0, -3}) {
    const std::string text = c10::str("parts must be an integer of 1 or more, got ", parts);
    EXPECT_HAS(error_of([&] { SequenceAttention(local, {group, 0, {}, parts}); }), "[SequenceAttention] " + text);
    EXPECT_HAS(error_of([&] { HeadParts(q, q, q, {group, 0, {}, parts}); }), "[SequenceAttention] " + text);
  }
  SequenceAttention attention(local, {group});
  const auto other = std::move(attention);
  EXPECT_HAS(error_of([&] { attention(q, q, q); }), "an attention that was moved from");  // NOLINT
  EXPECT_HAS(error_of([&] { to_sequence(q, {}, {}); }), "set SequenceCut::group");
}

}  // namespace tessera::parallel
