#include "tessera/engine/flops_profile.h"

#include <ATen/ThreadLocalState.h>
#include <gtest/gtest.h>
#include <torch/nn/functional.h>
#include <torch/torch.h>

#include <chrono>
#include <thread>

#include "tessera/base/error.h"
#include "tests/support/errors.h"

// Of its own: other files have such names, too.
namespace tessera::engine::flops_profile_tests {
namespace {

using Numbers = std::vector<int64_t>;

Numbers operations_of(const FlopsProfile& profile) {
  Numbers found;
  for (const ProfileRow& row : profile.rows())
    found.push_back(row.operations);
  return found;
}

const std::vector<ProfileRow> kRows{{.name = "", .kind = "Net", .parameters = 2500},
                                    {.name = "blocks", .kind = "ModuleList"},
                                    {.name = "blocks.0", .kind = "Block", .parameters = 12},
                                    {.name = "head", .kind = "Linear"}};
enum { kModel, kBlocks, kBlock, kHead };

// An operation of 16.
void multiply() {
  at::ones({2, 2}).mm(at::ones({2, 2}));
}

TEST(FlopsProfile, WhatRunsAndWhatIsAroundItHasAnOperation) {
  FlopsProfile profile(0.5);
  profile.start(kRows);
  multiply();  // nobody's
  profile.enter(kModel);
  profile.enter(kBlock);
  multiply();
  profile.enter(kHead);  // another module's, called from here
  multiply();
  profile.leave(kHead);
  profile.leave(kBlock);
  multiply();
  profile.leave(kModel);
  profile.stop();
  multiply();
  EXPECT_EQ(operations_of(profile), (Numbers{48, 32, 32, 16}));
  EXPECT_EQ(profile.operations(), 72);
  EXPECT_EQ(profile.multiply_adds(), 24);
  EXPECT_EQ(profile.parameters(), 2500);
  profile.start(kRows);
  EXPECT_EQ(operations_of(profile), (Numbers{0, 0, 0, 0}));
}

TEST(FlopsProfile, ACallInsideItsOwnCountsOnce) {
  FlopsProfile profile;
  profile.start(kRows);
  const auto begin = std::chrono::steady_clock::now();
  profile.enter(kBlock);
  profile.enter(kBlock);
  multiply();
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  profile.leave(kBlock);
  profile.leave(kBlock);
  const double passed = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  EXPECT_EQ(operations_of(profile), (Numbers{16, 16, 16, 0}));
  const ProfileRow& block = profile.rows()[kBlock];
  EXPECT_TRUE(block.timed);
  EXPECT_GE(block.seconds, 0.005);
  EXPECT_LE(block.seconds, passed);
  EXPECT_FALSE(profile.rows()[kBlocks].timed);
}

TEST(FlopsProfile, CallsThatAnExceptionLeftOpenEnd) {
  FlopsProfile profile;
  profile.start(kRows);
  profile.leave(kHead);
  profile.enter(kModel);
  profile.enter(kBlock);
  profile.leave(kModel);
  profile.enter(kHead);
  multiply();
  profile.leave(kHead);
  EXPECT_EQ(operations_of(profile), (Numbers{16, 0, 0, 16}));
  EXPECT_FALSE(profile.rows()[kBlock].timed);
}

// A backward that begins while nothing runs is left out, with what it computes again; one inside a forward is part of that.
TEST(FlopsProfile, ABackwardIsNoForward) {
  const at::Tensor x = at::ones({2, 2}).requires_grad_();
  for (const bool inside : {false, true}) {
    FlopsProfile profile;
    profile.start(kRows, std::vector<FlopsProfile::Weight>{{x, kHead}});
    if (inside) profile.enter(kBlock);
    x.mm(at::ones({2, 2})).sum().backward();
    if (inside) profile.leave(kBlock);
    EXPECT_EQ(profile.rows()[kHead].operations, 16) << inside;
    EXPECT_EQ(profile.rows()[kModel].operations, inside ? 32 : 16) << inside;
  }
}

// By the weight's storage, whatever part of it is read, and wherever its values are.
TEST(FlopsProfile, AWeightSaysWhoseAnOperationIs) {
  const at::Tensor w = at::ones({6, 4}), other = at::ones({4, 4}), x = at::ones({3, 4}), flat = at::ones({2 * 24});
  const at::Tensor part = flat.narrow(0, 24, 24).view({6, 4}), before = flat.narrow(0, 0, 24).view({6, 4});
  const std::vector<std::pair<std::function<void()>, int64_t>> rows{
      {[&] { x.mm(w.t()); }, 2 * 3 * 4 * 6},
      {[&] { torch::nn::functional::linear(x, w, at::ones({6})); }, 2 * 3 * 4 * 6},
      {[&] { x.mm(w.narrow(0, 1, 2).t()); }, 2 * 3 * 4 * 2},
      {[&] { w.mm(x.t()); }, 2 * 3 * 4 * 6},
      {[&] { x.to(at::kBFloat16).mm(w.to(at::kBFloat16).t()); }, 2 * 3 * 4 * 6},
      {[&] { x.mm(w.t().contiguous()); }, 2 * 3 * 4 * 6},
      {[&] { at::einsum("ab,cb->ac", {x, w}); }, 2 * 3 * 4 * 6},
      {[&] { at::conv1d(at::ones({1, 4, 5}), w.unsqueeze(-1)); }, 2 * 5 * 4 * 6},
      {[&] { x.mm(part.t()); }, 2 * 3 * 4 * 6},
      {[&] { x.mm(before.t()); }, 0},
      {[&] { x.mm(other); }, 0},
      {[&] { x.mm((w * 2).t()); }, 0}};
  for (size_t i = 0; i < rows.size(); ++i) {
    FlopsProfile profile;
    profile.start(kRows, std::vector<FlopsProfile::Weight>{{w, kHead}, {part, kHead}});
    profile.enter(kBlock);
    rows[i].first();
    profile.leave(kBlock);
    EXPECT_EQ(profile.rows()[kHead].operations, rows[i].second) << "row " << i;
    EXPECT_GT(profile.rows()[kBlock].operations, 0) << "row " << i;
    EXPECT_EQ(profile.rows()[kBlock].operations, profile.rows()[kModel].operations) << "row " << i;
  }
}

// Of a weight that several modules have the one counts around which most runs, then the last.
TEST(FlopsProfile, ATiedWeightIsThatOfWhatRuns) {
  const at::Tensor w = at::ones({2, 2});
  for (const int runs : {kModel, kBlock}) {
    FlopsProfile profile;
    profile.start(kRows, std::vector<FlopsProfile::Weight>{{w, kBlock}, {w, kHead}});
    profile.enter(runs);
    at::ones({2, 2}).mm(w);
    profile.leave(runs);
    EXPECT_EQ(operations_of(profile), runs == kModel ? (Numbers{16, 0, 0, 16}) : (Numbers{16, 16, 16, 0}));
  }
}

TEST(FlopsProfile, OtherThreadsAreNotCounted) {
  FlopsProfile profile;
  profile.start(kRows);
  const at::ThreadLocalState state;  // which a thread of torch's takes, as for a backward on a device
  std::thread([&] {
    const at::ThreadLocalStateGuard guard(state);
    profile.enter(kHead);
    multiply();
    profile.leave(kHead);
  }).join();
  EXPECT_EQ(operations_of(profile), (Numbers{0, 0, 0, 0}));
  EXPECT_FALSE(profile.rows()[kHead].timed);
}

// Profiles, and a counter inside them, end in any order.
TEST(FlopsProfile, SeveralCountAtOnce) {
  auto first = std::make_unique<FlopsProfile>();
  FlopsProfile second;
  first->start(kRows, std::vector<FlopsProfile::Weight>());
  second.start(kRows, std::vector<FlopsProfile::Weight>());
  EXPECT_HAS(testing::error_of<UsageError>([&] { second.start(kRows); }), "[flops_profiler] it counts already");
  {
    const FlopCounter counter;
    multiply();
    EXPECT_EQ(counter.total(), 16);
  }
  EXPECT_EQ(first->operations(), 16);
  first.reset();
  multiply();
  second.stop();
  multiply();
  EXPECT_EQ(second.operations(), 32);
}

TEST(FlopsProfile, TheText) {
  FlopsProfile profile;
  profile.start(kRows, std::vector<FlopsProfile::Weight>());
  profile.enter(kModel);
  profile.leave(kModel);
  profile.enter(kHead);
  multiply();
  profile.enter(kBlock);
  at::ones({100, 100}).mm(at::ones({100, 100}));
  profile.stop();
  const std::string text = profile.text({.step = 7, .depth = 1, .top_modules = 2});
  EXPECT_TRUE(text.starts_with("flops profile of step 7: Net\n  parameters 2.50 K, forward 1.00 MMACs, 2.00 MFLOPs, "))
      << text;
  EXPECT_HAS(text, " ms\n  with backward 6.00 MFLOPs\n  depth 1: head (Linear): 0 params, 2.00 MFLOPs (100%), ");
  EXPECT_HAS(text, ", blocks (ModuleList): 0 params, 2.00 MFLOPs (100%)\n  modules:\n    model (Net): 2.50 Kparams, ");
  EXPECT_HAS(text, "\n      blocks (ModuleList): 0 params, ");
  EXPECT_EQ(text.find("blocks.0"), std::string::npos) << text;
  EXPECT_HAS(profile.text(), "\n        blocks.0 (Block): 12 params, ");
  EXPECT_EQ(profile.text({.detailed = false}).find("modules:"), std::string::npos);
  EXPECT_EQ(profile.text({.top_modules = 0, .detailed = false}).find("depth"), std::string::npos);
}

}  // namespace
}  // namespace tessera::engine::flops_profile_tests
