#include "tessera/comm/shm/op.h"

#include "tests/comm/shm/play.h"

namespace tessera::comm {
namespace {

using testing::input;
using testing::inputs;
using testing::over_sizes;
using testing::play;
using testing::same_bits;

TEST(ShmOp, AllGather) {
  over_sizes([](int size, int64_t n) {
    const auto in = inputs(1, size, n, at::kFloat);
    std::vector<ShmOpPtr> ops;
    std::vector<at::Tensor> out;
    for (int r = 0; r < size; ++r) {
      out.push_back(at::zeros({size * n}));
      ops.push_back(shm_all_gather(r, size, out[r], in[r], "x"));
    }
    EXPECT_EQ(play(ops, n), "");
    for (int r = 0; r < size; ++r)
      EXPECT_TRUE(same_bits(out[r], at::cat(in))) << size << " ranks, " << n;
  });
}

TEST(ShmOp, BroadcastAndBarrier) {
  over_sizes([](int size, int64_t n) {
    const int root = size - 1;
    auto data = inputs(4, size, n, at::kLong);
    const auto want = data[root].clone();
    std::vector<ShmOpPtr> ops, barrier;
    for (int r = 0; r < size; ++r) {
      ops.push_back(shm_broadcast(r, size, data[r], root, "x"));
      barrier.push_back(shm_barrier(r, size, "x"));
    }
    EXPECT_EQ(play(ops, n), "");
    EXPECT_EQ(play(barrier, n), "");
    for (int r = 0; r < size; ++r)
      EXPECT_TRUE(same_bits(data[r], want)) << size << " ranks, " << n;
  });
}

TEST(ShmOp, AllToAllLearnsItsLengthFromTheOthers) {
  over_sizes([](int size, int64_t n) {
    std::vector<ShmOpPtr> ops;
    std::vector<at::Tensor> in, out, want;
    const auto split = [&](int from, int to) { return (from * 2 + to) % 3 * n; };
    for (int r = 0; r < size; ++r) {
      std::vector<int64_t> sent, received;
      int64_t total = 0, coming = 0;
      for (int p = 0; p < size; ++p) {
        sent.push_back(split(r, p));
        received.push_back(split(p, r));
        total += sent.back();
        coming += received.back();
      }
      in.push_back(input(5, r, total, at::kFloat));
      out.push_back(at::zeros({coming}));
      ops.push_back(shm_all_to_all(r, size, out[r], in[r], received, sent, "x"));
    }
    EXPECT_EQ(play(ops, n), "");
    for (int r = 0; r < size; ++r) {
      int64_t at = 0;
      for (int p = 0; p < size; ++p) {
        int64_t begin = 0;
        for (int before = 0; before < r; ++before)
          begin += split(p, before);
        EXPECT_TRUE(out[r].narrow(0, at, split(p, r)).equal(in[p].narrow(0, begin, split(p, r))));
        at += split(p, r);
      }
    }
  });
}

TEST(ShmOp, AllToAllNamesSplitsThatDiffer) {
  const auto a = at::ones({4}), b = at::ones({4}), c = at::ones({4}), d = at::ones({4});
  const std::vector<ShmOpPtr> ops = {shm_all_to_all(0, 2, a, b, {1, 3}, {1, 3}, "x"),
                                     shm_all_to_all(1, 2, c, d, {2, 2}, {2, 2}, "x")};
  EXPECT_HAS(play(ops, 1), "the ranks disagree: in all_to_all (x, 16 B) rank ");
}

// Part r has n + 3 * r elements.
TEST(ShmOp, AllGatherIntoAListOfDifferentSizes) {
  over_sizes([](int size, int64_t n) {
    std::vector<ShmOpPtr> ops;
    std::vector<ShmTensors> out(size);
    for (int r = 0; r < size; ++r) {
      for (int p = 0; p < size; ++p)
        out[r].push_back(at::zeros({n + 3 * p}));
      ops.push_back(shm_all_gather(r, size, out[r], input(6, r, n + 3 * r, at::kFloat), "x"));
    }
    EXPECT_EQ(play(ops, n), "");
    for (int r = 0; r < size; ++r) {
      for (int p = 0; p < size; ++p)
        EXPECT_TRUE(same_bits(out[r][p], input(6, p, n + 3 * p, at::kFloat)));
    }
  });
}

TEST(ShmOp, GatherAndScatter) {
  over_sizes([](int size, int64_t n) {
    const int root = size - 1;
    ShmTensors gathered;
    for (int p = 0; p < size; ++p)
      gathered.push_back(at::zeros({n}, at::kDouble));
    const auto in = inputs(7, size, n, at::kDouble);
    std::vector<ShmOpPtr> gather, scatter;
    std::vector<at::Tensor> out;
    for (int r = 0; r < size; ++r) {
      gather.push_back(shm_gather(r, size, r == root ? gathered : ShmTensors{}, in[r], root, "x"));
      out.push_back(at::zeros({n}, at::kDouble));
      scatter.push_back(shm_scatter(r, size, out[r], r == root ? in : ShmTensors{}, root, "x"));
    }
    EXPECT_EQ(play(gather, n), "");
    EXPECT_EQ(play(scatter, n), "");
    for (int r = 0; r < size; ++r) {
      EXPECT_TRUE(same_bits(gathered[r], in[r]));
      EXPECT_TRUE(same_bits(out[r], in[r]));
    }
  });
}

TEST(ShmOp, AllToAllOfLists) {
  over_sizes([](int size, int64_t n) {
    const auto length = [&](int from, int to) { return (from + 2 * to) % 3 * n; };
    std::vector<ShmOpPtr> ops;
    std::vector<ShmTensors> in(size), out(size);
    for (int r = 0; r < size; ++r) {
      for (int p = 0; p < size; ++p) {
        in[r].push_back(input(r * 10 + p, 0, length(r, p), at::kHalf));
        out[r].push_back(at::zeros({length(p, r)}, at::kHalf));
      }
      ops.push_back(shm_all_to_all(r, size, out[r], in[r], "x"));
    }
    EXPECT_EQ(play(ops, n), "");
    for (int r = 0; r < size; ++r) {
      for (int p = 0; p < size; ++p)
        EXPECT_TRUE(same_bits(out[r][p], in[p][r]));
    }
  });
}

TEST(ShmOp, ListsThatDifferBetweenRanksAreDifferentCalls) {
  const auto list = [](int64_t a, int64_t b) { return ShmTensors{at::ones({a}), at::ones({b})}; };
  const auto one = shm_all_gather(0, 2, list(1, 3), at::ones({1}), "x");
  const auto other = shm_all_gather(1, 2, list(2, 2), at::ones({2}), "x");
  EXPECT_EQ(one->info().bytes, other->info().bytes);
  EXPECT_NE(one->hash(), other->hash());
}

TEST(ShmOp, ListsMustFitTheirRanks) {
  const ShmTensors two = {at::ones({3}), at::ones({3})};
  const auto text = [](const auto& call) { return testing::message_of<c10::ValueError>(call); };
  EXPECT_HAS(text([&] { shm_all_gather(0, 3, two, at::ones({3}), "x"); }), "2 tensors for 3 ranks");
  EXPECT_HAS(text([&] { shm_all_gather(0, 2, two, at::ones({4}), "x"); }), "the input has 16 B");
  EXPECT_HAS(text([&] { shm_gather(0, 2, two, at::ones({4}), 0, "x"); }), "this rank's own has 16 B");
  EXPECT_HAS(text([&] { shm_scatter(0, 2, at::ones({2}), two, 0, "x"); }), "this rank's own has 8 B");
  EXPECT_HAS(text([&] { shm_all_to_all(0, 2, two, {at::ones({2}), at::ones({3})}, "x"); }), "elements to itself");
}

TEST(ShmOp, RefusesWhatItCannotDo) {
  EXPECT_HAS(testing::message_of<c10::ValueError>(
                 [] { shm_all_to_all(0, 2, at::ones({3}), at::ones({3}), {1, 2}, {2, 1}, "x"); }),
             "rank 0 sends 2 elements to itself and expects 1");
  EXPECT_HAS(testing::message_of<c10::ValueError>(
                 [] { shm_broadcast(0, 2, at::empty({3}, at::TensorOptions(at::kMeta)), 0, "x"); }),
             "takes CPU tensors");
}

}  // namespace
}  // namespace tessera::comm
