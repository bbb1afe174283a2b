#include "tessera/comm/timed_group.h"

#include "tests/comm/collectives.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera::comm {
namespace {

using testing::launch_call;
using testing::run_ranks;
using testing::same_bits;

TEST(TimedGroup, GivesWhatTheGroupGives) {
  run_ranks(3, [](int, GroupPtr group) {
    const auto record = std::make_shared<CallRecord>();
    const GroupPtr timed = timed_group(group, record);
    EXPECT_EQ(timed->rank(), group->rank());
    EXPECT_EQ(timed->size(), group->size());
    EXPECT_EQ(timed->name(), group->name());
    const GroupPtr sibling = timed->sibling();
    int call = 0;
    for (const int64_t n : {0, 1, 17}) {
      for (int kind = 0; kind < 5; ++kind) {
        for (Group* of : {timed.get(), sibling.get()}) {
          ++call;
          auto l = launch_call(*of, call, kind, n, at::kFloat, ReduceOp::Sum, call % 2 == 0);
          l.pending.wait();
          EXPECT_TRUE(same_bits(l.got, l.want)) << kind << " " << n;
        }
      }
    }
    timed->barrier();
    int64_t calls = 0;
    for (const CallTimes& row : record->totals())
      calls += row.calls;
    EXPECT_EQ(calls, call + 1);
    const CommStats stats = timed->stats();
    EXPECT_EQ(stats.barrier.calls, 1);
  });
}

TEST(TimedGroup, SumsByOperationAndSize) {
  run_ranks(2, [](int rank, GroupPtr group) {
    const auto record = std::make_shared<CallRecord>(std::vector<std::string>{"all_reduce", "all_gather"});
    const GroupPtr timed = timed_group(group, record);
    at::Tensor whole = at::zeros({8}), part = whole.narrow(0, 4 * rank, 4);
    for (int i = 0; i < 2; ++i)
      timed->all_reduce(whole, ReduceOp::Sum, "gradients").wait();
    timed->all_gather(whole, part, "parameters").wait();
    timed->broadcast(whole, 0).wait();  // not asked for
    const std::vector<CallTimes> rows = record->totals();
    ASSERT_EQ(rows.size(), 2u);
    EXPECT_EQ(rows[0].op, "all_gather");
    EXPECT_EQ(rows[0].bytes, 32);
    EXPECT_EQ(rows[1].op, "all_reduce");
    EXPECT_EQ(rows[1].calls, 2);
    EXPECT_GT(rows[1].seconds, 0);
    const std::vector<CallTime> calls = record->take_calls();
    ASSERT_EQ(calls.size(), 3u);
    EXPECT_EQ(calls[0].label, "gradients");
    EXPECT_TRUE(record->take_calls().empty());
    record->reset();
    EXPECT_TRUE(record->totals().empty());
  });
}

TEST(TimedGroup, Bandwidths) {
  const CallTimes reduce{"all_reduce", 1000, 4, 3, 0.5};
  EXPECT_DOUBLE_EQ(reduce.algorithm_bandwidth(), 6000);
  EXPECT_DOUBLE_EQ(reduce.bus_bandwidth(), 9000);  // 2 (n-1)/n
  EXPECT_DOUBLE_EQ((CallTimes{"all_gather", 1000, 4, 3, 0.5}.bus_bandwidth()), 4500);
  EXPECT_DOUBLE_EQ((CallTimes{"broadcast", 1000, 4, 3, 0.5}.bus_bandwidth()), 6000);
  EXPECT_DOUBLE_EQ((CallTimes{"barrier", 0, 4, 3, 0.0}.bus_bandwidth()), 0);
}

TEST(TimedGroup, AnUnknownOperationIsAnError) {
  const std::string text = testing::error_of([] { const CallRecord record({"allreduce"}); });
  EXPECT_NE(text.find("'allreduce' is no collective"), std::string::npos) << text;
}

TEST(TimedGroup, AMeshKeepsItsAxes) {
  Mesh mesh(single_group());
  const Mesh timed = timed_mesh(mesh, std::make_shared<CallRecord>());
  EXPECT_EQ(timed.size(kStateAxes), 1);
  run_ranks(2, [](int rank, GroupPtr group) {
    Mesh two;
    two.set(Axis::Tp, group);
    const auto record = std::make_shared<CallRecord>();
    const Mesh timed_two = timed_mesh(two, record);
    EXPECT_EQ(timed_two.rank(Axis::Tp), rank);
    timed_two.group(Axis::Tp)->barrier();
    EXPECT_EQ(record->totals().size(), 1u);
  });
}

}  // namespace
}  // namespace tessera::comm
