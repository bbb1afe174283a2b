// The collectives of sum.cpp.
#include "tests/comm/shm/play.h"

namespace tessera::comm {
namespace {

using testing::input;
using testing::inputs;
using testing::over_sizes;
using testing::play;
using testing::reference_reduce;
using testing::same_bits;

TEST(ShmSum, ReduceScatterInPlaceAndNot) {
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

TEST(ShmSum, AllReduce) {
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

TEST(ShmSum, ReduceLeavesTheOthersAsTheyWere) {
  over_sizes([](int size, int64_t n) {
    auto data = inputs(4, size, n, at::kInt);
    const auto want = reference_reduce(data, ReduceOp::BitXor);
    const int root = size / 2;
    std::vector<ShmOpPtr> ops;
    for (int r = 0; r < size; ++r)
      ops.push_back(shm_reduce(r, size, data[r], ReduceOp::BitXor, root, "x"));
    EXPECT_EQ(play(ops, n), "");
    for (int r = 0; r < size; ++r)
      EXPECT_TRUE(same_bits(data[r], r == root ? want : input(4, r, n, at::kInt))) << size << " ranks, " << n;
  });
}

TEST(ShmSum, ReduceScatterOfAListOfDifferentSizes) {
  over_sizes([](int size, int64_t n) {
    std::vector<ShmOpPtr> ops;
    std::vector<at::Tensor> out;
    for (int r = 0; r < size; ++r) {
      ShmTensors parts;
      for (int p = 0; p < size; ++p)
        parts.push_back(input(5 + p, r, n + 5 * p, at::kBFloat16));
      out.push_back(at::zeros({n + 5 * r}, at::kBFloat16));
      ops.push_back(shm_reduce_scatter(r, size, out[r], parts, ReduceOp::Sum, "x"));
    }
    EXPECT_EQ(play(ops, n), "");
    for (int r = 0; r < size; ++r)
      EXPECT_TRUE(same_bits(out[r], reference_reduce(inputs(5 + r, size, n + 5 * r, at::kBFloat16), ReduceOp::Sum)));
  });
}

TEST(ShmSum, RefusesWhatCannotBeAdded) {
  const auto text = [](const auto& call) { return testing::message_of<c10::ValueError>(call); };
  const at::Tensor t = at::ones({4}), whole = at::ones({4}, at::kInt);
  EXPECT_HAS(text([&] { shm_all_reduce(0, 2, t, ReduceOp::BitAnd, "x"); }), "bitwise and does not take dtype Float");
  EXPECT_HAS(text([&] { shm_all_reduce(0, 2, whole, ReduceOp::Avg, "x"); }), "avg does not take dtype Int");
  EXPECT_HAS(text([&] { shm_reduce(0, 2, whole, ReduceOp::Avg, 1, "x"); }), "avg does not take dtype Int");
  EXPECT_HAS(text([&] { shm_reduce_scatter(0, 2, t, ShmTensors{at::ones({3}), t}, ReduceOp::Sum, "x"); }),
             "the output has 16 B, its part of the input 12 B");
}

}  // namespace
}  // namespace tessera::comm
