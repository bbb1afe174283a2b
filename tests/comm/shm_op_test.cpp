#include "tessera/comm/shm_op.h"

#include <functional>

#include "tests/comm/collectives.h"

namespace tessera::comm {
namespace {

using testing::input;
using testing::inputs;
using testing::reference_reduce;
using testing::same_bits;

// Plays the script of one call on all ranks. Writers go first wherever they are ready, then a rank drawn by chance reads.
std::string play(const std::vector<ShmOpPtr>& ops, uint64_t seed) {
  const int size = static_cast<int>(ops.size());
  std::vector<std::vector<std::vector<char>>> records(size);  // [rank][step]
  std::mt19937_64 random(seed);
  while (true) {
    bool all_done = true;
    for (int r = 0; r < size; ++r) {
      ShmOp& op = *ops[r];
      while (op.written < op.steps().value_or(op.steps_at_least()) && op.ready(op.written, op.received)) {
        records[r].emplace_back(kRecordBytes, '\x7f');
        op.write(op.written++, records[r].back().data());
      }
      all_done = all_done && op.steps() && op.received == *op.steps();
    }
    if (all_done) return {};
    bool moved = false;
    const int start = static_cast<int>(random() % size);
    for (int i = 0; i < size && !moved; ++i) {
      const int r = (start + i) % size;
      ShmOp& op = *ops[r];
      if (op.received >= op.written) continue;
      std::vector<const char*> from(size, nullptr);
      bool there = true;
      for (int p = 0; p < size; ++p) {
        if (p == r) continue;
        there = there && static_cast<int64_t>(records[p].size()) > op.received;
        if (there) from[p] = records[p][op.received].data();
      }
      if (!there) continue;
      if (auto text = op.read(op.received, from.data()); !text.empty()) return text;
      op.received += 1;
      moved = true;
    }
    if (!moved) return "nothing moves";
  }
}

const std::vector<int64_t> kSizes = {0, 1, 5, 1000, 65536, 65537, 200003};

void over_sizes(const std::function<void(int, int64_t)>& body) {
  for (const int size : {2, 3, 5}) {
    for (const int64_t n : kSizes)
      body(size, n);
  }
}

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

TEST(ShmOp, ReduceScatterInPlaceAndNot) {
  over_sizes([](int size, int64_t n) {
    for (const bool in_place : {false, true}) {
      auto in = inputs(2, size, size * n, at::kBFloat16);
      const auto want = reference_reduce(in, ReduceOp::Avg);
      std::vector<ShmOpPtr> ops;
      std::vector<at::Tensor> out;
      for (int r = 0; r < size; ++r) {
        out.push_back(in_place ? in[r].narrow(0, r * n, n) : at::zeros({n}, at::kBFloat16));
        ops.push_back(shm_reduce_scatter(r, size, out[r], in[r], ReduceOp::Avg, "x"));
      }
      EXPECT_EQ(play(ops, n), "");
      for (int r = 0; r < size; ++r)
        EXPECT_TRUE(same_bits(out[r].clone(), want.narrow(0, r * n, n).clone())) << size << " ranks, " << n;
    }
  });
}

TEST(ShmOp, AllReduce) {
  over_sizes([](int size, int64_t n) {
    auto data = inputs(3, size, n, at::kFloat);
    const auto want = reference_reduce(data, ReduceOp::Sum);
    std::vector<ShmOpPtr> ops;
    for (int r = 0; r < size; ++r)
      ops.push_back(shm_all_reduce(r, size, data[r], ReduceOp::Sum, "x"));
    EXPECT_EQ(play(ops, n), "");
    for (int r = 0; r < size; ++r)
      EXPECT_TRUE(same_bits(data[r], want)) << size << " ranks, " << n;
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
