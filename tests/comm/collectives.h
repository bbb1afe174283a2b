// A reference for every collective, computed from the inputs of all ranks, and a random program of
// collectives that any back end can be checked with.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/comm/reduce_rows.h"
#include "tests/support/errors.h"

namespace tessera::testing {

using comm::ReduceOp;

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.numel() == b.numel() &&
         (a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

// The input that rank `rank` uses in call number `call`: any rank can compute that of any other.
inline at::Tensor input(int call, int rank, int64_t n, at::ScalarType dtype) {
  std::mt19937_64 random(static_cast<uint64_t>(call) * 1000 + static_cast<uint64_t>(rank));
  auto values = at::empty({n}, at::kFloat);
  std::uniform_int_distribution<int> pick(-50000, 50000);
  for (int64_t i = 0; i < n; ++i)
    values.data_ptr<float>()[i] = static_cast<float>(pick(random)) / 1024.0f;
  return dtype == at::kByte || dtype == at::kBool ? values.gt(0).to(dtype) : values.to(dtype);
}

inline constexpr ReduceOp kReductions[] = {ReduceOp::Sum,     ReduceOp::Avg,    ReduceOp::Min,   ReduceOp::Max,
                                           ReduceOp::Product, ReduceOp::BitAnd, ReduceOp::BitOr, ReduceOp::BitXor};

// Rank order, fp32 (double for double, the own type for integers), rounded once.
inline at::Tensor reference_reduce(const std::vector<at::Tensor>& rows, ReduceOp op) {
  const auto dtype = rows[0].scalar_type();
  const bool small = dtype == at::kBFloat16 || dtype == at::kHalf;
  const auto wide = small ? at::kFloat : dtype;
  at::Tensor sum = rows[0].to(wide).clone();
  for (size_t r = 1; r < rows.size(); ++r) {
    const at::Tensor row = rows[r].to(wide);
    if (op == ReduceOp::Min) sum = at::minimum(sum, row);
    if (op == ReduceOp::Max) sum = at::maximum(sum, row);
    if (op == ReduceOp::Sum || op == ReduceOp::Avg) sum = sum + row;
    if (op == ReduceOp::Product) sum = sum * row;
    if (op == ReduceOp::BitAnd) sum = at::bitwise_and(sum, row);
    if (op == ReduceOp::BitOr) sum = at::bitwise_or(sum, row);
    if (op == ReduceOp::BitXor) sum = at::bitwise_xor(sum, row);
  }
  if (op == ReduceOp::Avg) sum = sum / static_cast<double>(rows.size());
  return sum.to(dtype);
}

inline std::vector<at::Tensor> inputs(int call, int size, int64_t n, at::ScalarType dtype) {
  std::vector<at::Tensor> rows;
  for (int r = 0; r < size; ++r)
    rows.push_back(input(call, r, n, dtype));
  return rows;
}

// Launches call number `call` of kind `kind` and returns its handle; `check` compares the result
// afterwards.
struct Launched {
  comm::Pending pending;
  at::Tensor got, want;
  at::Tensor held;  // input buffer
};

inline Launched launch_call(comm::Group& group, int call, int kind, int64_t n, at::ScalarType dtype, ReduceOp op,
                            bool in_place) {
  const int size = group.size(), rank = group.rank();
  Launched l;
  const auto part = [&](const at::Tensor& t, int r) { return t.narrow(0, r * n, n); };
  if (kind == 0) {
    const auto rows = inputs(call, size, n, dtype);
    l.got = at::zeros({size * n}, at::TensorOptions(dtype));
    l.held = in_place ? part(l.got, rank) : rows[rank];
    if (in_place) l.held.copy_(rows[rank]);
    l.want = at::cat(rows);
    l.pending = group.all_gather(l.got, l.held, "gather");
  } else if (kind == 1) {
    const auto rows = inputs(call, size, size * n, dtype);
    l.held = rows[rank];
    l.got = in_place ? part(l.held, rank) : at::zeros({n}, at::TensorOptions(dtype));
    l.want = part(reference_reduce(rows, op), rank);
    l.pending = group.reduce_scatter(l.got, l.held, op, "scatter");
  } else if (kind == 2) {
    const auto rows = inputs(call, size, n, dtype);
    l.got = rows[rank];
    l.want = reference_reduce(rows, op);
    l.pending = group.all_reduce(l.got, op, "reduce");
  } else if (kind == 3) {
    const int root = call % size;
    l.got = input(call, rank, n, dtype);
    l.want = input(call, root, n, dtype);
    l.pending = group.broadcast(l.got, root, "spread");
  } else {
    // Rank r sends (r + to) % 3 * n rows of two elements to rank `to`.
    std::vector<int64_t> sent(size), received(size);
    int64_t out_rows = 0;
    std::vector<at::Tensor> wanted;
    for (int from = 0; from < size; ++from) {
      int64_t rows = 0, begin = 0, count = 0;
      for (int to = 0; to < size; ++to) {
        const int64_t split = (from + to) % 3 * n;
        if (to == rank) {
          begin = rows;
          count = split;
        }
        rows += split;
        if (from == rank) sent[to] = split;
      }
      const auto full = input(call, from, rows * 2, dtype).view({rows, 2});
      if (from == rank) l.held = full;
      wanted.push_back(full.narrow(0, begin, count));
      received[from] = count;
      out_rows += count;
    }
    l.got = at::zeros({out_rows, 2}, at::TensorOptions(dtype));
    l.want = at::cat(wanted).contiguous();
    l.pending = group.all_to_all(l.got, l.held, received, sent, "exchange");
  }
  return l;
}

// The same `calls` random collectives on every rank, up to four in flight, each compared bit for bit; one in `one_in` has
// `largest` elements.
inline void random_collectives(comm::Group& group, int calls, uint64_t seed, int64_t largest = 5000, int one_in = 7) {
  const std::vector<at::ScalarType> dtypes = {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kLong,
                                              at::kInt,   at::kShort,    at::kChar, at::kByte,   at::kBool};
  const std::vector<int64_t> sizes = {0, 1, 3, 17, 255, 4096};
  std::mt19937_64 random(seed);
  std::vector<Launched> flying;
  const auto finish = [&](size_t keep) {
    while (flying.size() > keep) {
      flying.front().pending.wait();
      EXPECT_TRUE(same_bits(flying.front().got, flying.front().want)) << "seed " << seed;
      flying.erase(flying.begin());
    }
  };
  for (int call = 0; call < calls; ++call) {
    const int kind = static_cast<int>(random() % 6);
    const auto dtype = dtypes[random() % dtypes.size()];
    const int64_t n = random() % one_in == 0 ? largest : sizes[random() % sizes.size()];
    auto op = kReductions[random() % std::size(kReductions)];
    if (op == ReduceOp::Product && at::isFloatingType(dtype)) op = ReduceOp::Max;  // not exact
    if (!comm::can_reduce(dtype, op)) op = at::isFloatingType(dtype) ? ReduceOp::Sum : ReduceOp::BitXor;
    const bool in_place = random() % 2 == 0;
    if (kind == 5) {
      group.barrier("barrier");
    } else {
      flying.push_back(launch_call(group, call, kind, n, dtype, op, in_place));
    }
    finish(random() % 4);
  }
  finish(0);
}

// Rank 0 is in a call of one sibling, the others in one of a second sibling: nobody calls anything different. Throws.
inline void wait_in_a_cycle(comm::Group& group) {
  const auto a = group.sibling(), b = group.sibling();
  a->barrier("begin");
  b->barrier("begin");
  auto part = at::ones({10}), whole = at::ones({10 * group.size()}), norm = at::ones({1});
  if (group.rank() == 0) a->all_gather(whole, part, "parameters of unit 'x'").wait();
  b->all_reduce(norm, ReduceOp::Sum, "gradient norm").wait();
}
inline constexpr auto kCycleBegin = "the ranks disagree: rank 0 is in all_gather (parameters of unit 'x', ";
inline constexpr auto kCycleEnd =
    "in all_reduce (gradient norm, 4 B), and each waits for a call that the next one never makes";

inline void expect_cycle(comm::Group& group) {
  const auto text = message_of<c10::DistBackendError>([&] { wait_in_a_cycle(group); });
  EXPECT_HAS(text, kCycleBegin);
  EXPECT_HAS(text, kCycleEnd);
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { group.barrier("later"); }), "the ranks disagree");
}

// The same picture for a while, but no cycle: every rank has a thread for each sibling, and one of the two is slow. Then
// one that is blocked while the others are busy elsewhere.
inline void expect_no_cycle(comm::Group& group, std::chrono::milliseconds slow) {
  const auto a = group.sibling(), b = group.sibling();
  a->barrier("begin");
  b->barrier("begin");
  const auto use = [&](comm::Group& sibling, bool late) {
    if (late) std::this_thread::sleep_for(slow);
    EXPECT_NO_THROW(sibling.barrier("first"));
  };
  std::thread second([&] { use(*b, group.rank() == 0); });
  use(*a, group.rank() != 0);
  second.join();
  if (group.rank() != 0) std::this_thread::sleep_for(slow);
  EXPECT_NO_THROW(a->barrier("second"));
  EXPECT_NO_THROW(b->barrier("second"));
}

}  // namespace tessera::testing
