#include "tessera/comm/backends.h"
#include "tests/comm/collectives.h"

namespace tessera::comm {
namespace {

TEST(SingleGroup, RunsEveryCollective) {
  const auto group = single_group();
  EXPECT_EQ(group->size(), 1);
  EXPECT_EQ(group->rank(), 0);
  EXPECT_EQ(group->name(), "single");
  testing::random_collectives(*group, 300, 5);
}

TEST(SingleGroup, SendsNothing) {
  const auto group = single_group();
  auto t = at::ones({64});
  group->all_reduce(t, ReduceOp::Avg).wait();
  group->broadcast(t, 0).wait();
  EXPECT_EQ(group->stats().all_reduce.calls, 1);
  EXPECT_EQ(group->stats().all_reduce.bytes, 0);
  EXPECT_EQ(group->stats().broadcast.bytes, 0);
}

TEST(SingleGroup, TakesParametersThatRequireGrad) {
  auto parameter = at::zeros({4}).requires_grad_();
  single_group()->all_gather(parameter, at::ones({4})).wait();
  EXPECT_EQ(parameter.sum().item<float>(), 4.0f);
}

TEST(SingleGroup, FailsAfterAbort) {
  const auto group = single_group();
  group->abort("stop");
  const auto text = testing::message_of<c10::DistBackendError>([&] { group->barrier("end"); });
  EXPECT_EQ(text, "[comm] rank 0 of 1: barrier (end, 0 B) failed after 0.00 s: rank 0 aborted: stop");
}

TEST(SingleGroup, AllToAllNeedsEqualSizes) {
  EXPECT_HAS(testing::message_of<c10::ValueError>(
                 [] { single_group()->all_to_all(at::zeros({2}), at::zeros({3}), {}, {}, "x").wait(); }),
             "differ in size");
}

}  // namespace
}  // namespace tessera::comm
