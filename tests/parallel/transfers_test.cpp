#include "tessera/parallel/transfers.h"

#include <chrono>
#include <future>
#include <memory>
#include <optional>

#include "tests/support/ranks.h"

namespace tessera::parallel {

using testing::run_ranks;

// The results are checked in functions_test: here what autograd does not see.
TEST(Transfers, SeveralInFlight) {
  run_ranks(3, [](int rank, const comm::GroupPtr& group) {
    const Along even{group, 0, {}, "even"}, uneven{group, 1, {3, 2, 1}, "uneven"};
    const at::Tensor x = at::full({3, 6}, rank + 1.0);
    auto sum = start_sum(x, even);
    auto scattered = start_scatter_sum(x, uneven);
    auto gathered = start_gather(x, even);
    EXPECT_TRUE(sum.wait().equal(at::full({3, 6}, 6.0)));
    EXPECT_TRUE(scattered.wait().equal(at::full({3, 3 - rank}, 6.0)));
    EXPECT_EQ(gathered.wait().sizes(), at::IntArrayRef({9, 6}));
    EXPECT_TRUE(x.equal(at::full({3, 6}, rank + 1.0)));
    EXPECT_TRUE(start_sum(x, even, true).wait().is_same(x));
    EXPECT_TRUE(x.equal(at::full({3, 6}, 6.0)));
  });
}

// As the graph of a backward that failed: no exception passes where it is dropped. The other rank never makes the call.
TEST(Transfers, WhatNobodyWaitsForHoldsUpNobody) {
  const auto start = std::chrono::steady_clock::now();
  std::promise<void> done;
  run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
    if (rank == 0) {
      const at::Tensor x = at::ones({4, 2});
      const auto kept = std::make_shared<std::optional<Transfer<at::Tensor>>>(start_sum(x, {group, 0, {}, "a sum"}));
      kept->reset();
      done.set_value();
    } else {
      done.get_future().wait_for(std::chrono::seconds(10));
    }
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

TEST(Transfers, OnlyHolder) {
  at::Tensor x = at::ones({4, 4});
  EXPECT_TRUE(is_only_holder(x));
  EXPECT_FALSE(is_only_holder(x.t()));
  {
    const at::Tensor other = x;  // NOLINT(performance-unnecessary-copy-initialization)
    EXPECT_FALSE(is_only_holder(x));
  }
  {
    const at::Tensor view = x.view({16});
    EXPECT_FALSE(is_only_holder(x));
    EXPECT_FALSE(is_only_holder(view));
  }
  EXPECT_TRUE(is_only_holder(x));
  EXPECT_FALSE(is_only_holder(at::ones({2}).requires_grad_()));
}

// Sums of 16-bit numbers are rounded once, in the order of the ranks, whether sizes are even or not.
TEST(Transfers, UnevenSumsHaveTheBitsOfEvenOnes) {
  std::vector<at::Tensor> inputs;
  for (int r = 0; r < 4; ++r)
    inputs.push_back((at::randn({8, 3}) * 100).to(at::kBFloat16));
  run_ranks(4, [&](int rank, const comm::GroupPtr& group) {
    const at::Tensor whole = start_sum(inputs[rank], {group, 0, {}, ""}).wait();
    const at::Tensor part = start_scatter_sum(inputs[rank], {group, 0, {5, 1, 0, 2}, ""}).wait();
    const auto range = ranges_of({5, 1, 0, 2})[rank];
    EXPECT_TRUE(part.equal(whole.narrow(0, range.begin, range.size())));
  });
}

}  // namespace tessera::parallel
