#include "tessera/comm/shm/channel.h"

#include <numeric>

#include "tessera/comm/shm/segment.h"
#include "tests/comm/collectives.h"

namespace tessera::comm {
namespace {

using testing::inputs;
using testing::same_bits;

// The channels of all ranks in one thread: nothing may ever need a wait.
struct Channels {
  explicit Channels(int size) : segment(ShmSegment::create(ShmLayout{size}.total())) {
    std::vector<int> numbers(size);
    std::iota(numbers.begin(), numbers.end(), kFirstNumber);
    for (int r = 0; r < size; ++r)
      ranks.emplace_back(segment->data(), 0, r, size, numbers);
  }
  static constexpr int kFirstNumber = 10;
  // Lets ranks progress until nothing moves.
  void run() {
    bool moved = true;
    while (moved) {
      moved = false;
      for (ShmChannel& channel : ranks)
        moved = channel.progress() || moved;
    }
  }
  std::shared_ptr<ShmSegment> segment;
  std::deque<ShmChannel> ranks;
};

TEST(ShmChannel, MovesCallsInOrderThoughOneRankIsFarAhead) {
  const int size = 3, calls = 3 * kSlots;
  Channels channels(size);
  std::vector<std::vector<at::Tensor>> data;
  std::vector<std::vector<ShmOpPtr>> ops(size);
  for (int i = 0; i < calls; ++i) {
    data.push_back(inputs(i, size, 100 + i * 50, at::kFloat));
    for (int r = 0; r < size; ++r)
      ops[r].push_back(shm_all_reduce(r, size, data[i][r], ReduceOp::Sum, "x"));
  }
  for (int r = 0; r < size; ++r) {
    for (const auto& op : ops[r]) {
      channels.ranks[r].add(op);
      channels.ranks[r].progress();
    }
    if (r == 0) {
      EXPECT_TRUE(channels.ranks[0].wants_space());
      EXPECT_EQ(channels.ranks[0].missing(), (std::vector<int>{1, 2}));
    }
  }
  channels.run();
  for (int i = 0; i < calls; ++i) {
    const auto want = testing::reference_reduce(inputs(i, size, 100 + i * 50, at::kFloat), ReduceOp::Sum);
    for (int r = 0; r < size; ++r) {
      EXPECT_TRUE(ops[r][i]->done);
      EXPECT_TRUE(same_bits(data[i][r], want));
    }
  }
  EXPECT_FALSE(channels.ranks[0].wants_space());
  EXPECT_TRUE(channels.ranks[0].missing().empty());
}

TEST(ShmChannel, ACallLongerThanTheRingFlowsThroughIt) {
  const int64_t n = 3 * kSlots * kRecordBytes / 4 + 7;
  Channels channels(2);
  auto data = inputs(1, 2, n, at::kFloat);
  for (int r = 0; r < 2; ++r)
    channels.ranks[r].add(shm_all_reduce(r, 2, data[r], ReduceOp::Max, "x"));
  channels.run();
  EXPECT_TRUE(same_bits(data[0], at::maximum(inputs(1, 2, n, at::kFloat)[0], inputs(1, 2, n, at::kFloat)[1])));
  EXPECT_TRUE(same_bits(data[0], data[1]));
}

TEST(ShmChannel, ACallMayFollowOneWhoseLengthIsNotKnownYet) {
  Channels channels(2);
  const int64_t n = 500000;
  at::Tensor in = at::arange(n, at::kFloat), none = at::empty({0}), out = at::zeros({n}), other = at::empty({0});
  at::Tensor a = at::ones({3}), b = at::ones({3});
  for (ShmChannel& channel : channels.ranks)
    channel.add(shm_barrier(&channel == &channels.ranks[0] ? 0 : 1, 2, "z"));
  channels.ranks[1].add(shm_all_to_all(1, 2, out, none, {n, 0}, {0, 0}, "x"));  // learns from rank 0 how long it is
  const auto last = shm_all_reduce(1, 2, b, ReduceOp::Sum, "y");
  channels.ranks[1].add(last);
  channels.ranks[1].progress();
  channels.ranks[0].add(shm_all_to_all(0, 2, other, in, {0, 0}, {0, n}, "x"));
  channels.ranks[0].add(shm_all_reduce(0, 2, a, ReduceOp::Sum, "y"));
  channels.run();
  EXPECT_TRUE(last->done);
  EXPECT_TRUE(out.equal(in));
  EXPECT_EQ(b.sum().item<float>(), 6.0f);
}

TEST(ShmChannel, StopsAtDifferentCallsAndNamesThem) {
  Channels channels(2);
  at::Tensor a = at::ones({4}), b = at::ones({4});
  channels.ranks[0].add(shm_all_reduce(0, 2, a, ReduceOp::Sum, "gradients"));
  channels.ranks[1].add(shm_broadcast(1, 2, b, 0, "weights"));
  channels.run();
  for (ShmChannel& channel : channels.ranks) {
    EXPECT_EQ(channel.disagreement(),
              "the ranks disagree: rank 10 called all_reduce (gradients, 16 B, Float, sum), rank 11 called broadcast "
              "(weights, 16 B, Float, root 0)");
  }
  EXPECT_TRUE(a.equal(at::ones({4})));
}

TEST(ShmChannel, KnowsWhoHasLeft) {
  Channels channels(2);
  EXPECT_FALSE(channels.ranks[0].has_left(1));
  channels.ranks[1].leave();
  EXPECT_TRUE(channels.ranks[0].has_left(1));
}

}  // namespace
}  // namespace tessera::comm
