#include "tessera/zero/grad_progress.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::zero {

namespace {

using Change = std::pair<const char*, std::function<void(GradProgress&)>>;

// Everything that changes a unit's progress, but for what begins a backward.
std::vector<Change> changes() {
  static ParamGrad param;
  return {{"accumulate", [](GradProgress& p) { p.accumulate(/*pooled=*/true); }},
          {"fire", [](GradProgress& p) { p.fire(param); }},
          {"launch", [](GradProgress& p) { p.launch(); }},
          {"launch_alone", [](GradProgress& p) { p.launch_alone(); }},
          {"arrive", [](GradProgress& p) { p.arrive(); }},
          {"sum_arrived", [](GradProgress& p) { p.sum_arrived(); }},
          {"put_sums", [](GradProgress& p) { p.put_sums(); }},
          {"end", [](GradProgress& p) { p.end(); }}};
}

// A unit in a state, and launched in its backward, if it says so.
GradProgress in_state(GradState state, bool launched = false) {
  GradProgress p;
  ParamGrad param;
  if (launched) {
    p.accumulate(false);
    p.launch_alone();
    if (state == GradState::Empty) p.end();
  }
  if (state == GradState::Accumulating || state == GradState::Late || state == GradState::Reducing) p.accumulate(true);
  if (state == GradState::Late) p.fire(param);
  if (state == GradState::Reducing) p.launch();
  if (state == GradState::Reduced && !launched) p.put_sums();
  return p;
}

}  // namespace

// What each change leads to from each state; what is not in its row throws.
TEST(GradProgress, ChangesOnlyAlongTheTable) {
  using enum GradState;
  struct Row {
    GradState from;
    bool launched;
    std::vector<std::pair<std::string, GradState>> to;
  };
  for (const Row& row : {
           Row{Empty, false, {{"accumulate", Accumulating}, {"fire", Empty}, {"put_sums", Reduced}, {"end", Empty}}},
           Row{Accumulating,
               false,
               {{"fire", Accumulating},
                {"launch", Reducing},
                {"launch_alone", Reduced},
                {"sum_arrived", Accumulating},
                {"end", Empty}}},
           Row{Accumulating,
               true,
               {{"fire", Late},
                {"launch", Reducing},
                {"launch_alone", Reduced},
                {"sum_arrived", Accumulating},
                {"end", Empty}}},
           Row{Late,
               true,
               {{"fire", Late},
                {"launch", Reducing},
                {"launch_alone", Reduced},
                {"sum_arrived", Late},
                {"end", Empty}}},
           Row{Reducing,
               false,
               {{"accumulate", Accumulating}, {"fire", Reducing}, {"arrive", Reduced}, {"sum_arrived", Reducing}}},
           Row{Reduced,
               false,
               {{"accumulate", Accumulating}, {"fire", Reduced}, {"sum_arrived", Reduced}, {"end", Empty}}},
       }) {
    for (const auto& [name, change] : changes()) {
      GradProgress p = in_state(row.from, row.launched);
      ASSERT_EQ(p.state(), row.from);
      const auto found = std::ranges::find(row.to, name, &std::pair<std::string, GradState>::first);
      if (found == row.to.end()) {
        EXPECT_ANY_THROW(change(p)) << name << " in " << grad_state_name(row.from);
      } else {
        EXPECT_NO_THROW(change(p)) << name << " in " << grad_state_name(row.from);
        EXPECT_EQ(p.state(), found->second) << name << " in " << grad_state_name(row.from);
      }
    }
  }
}

// Contributions that come while a reduction is on its way are reduced by another one.
TEST(GradProgress, ReductionsOverlap) {
  GradProgress p;
  ParamGrad first, second;
  p.begin_backward(2);
  p.accumulate(true);
  p.fire(first);
  EXPECT_FALSE(p.complete());
  p.fire(first);
  EXPECT_FALSE(p.complete()) << "once a backward";
  p.fire(second);
  EXPECT_TRUE(p.complete());
  p.end_calls();
  EXPECT_EQ(p.turn(), Turn::Over);
  p.launch();
  EXPECT_FALSE(p.pooled());
  EXPECT_ANY_THROW(p.end()) << "on its way";
  p.accumulate(false);
  p.fire(first);
  EXPECT_EQ(p.state(), GradState::Late);
  p.launch();
  EXPECT_EQ(p.in_flight(), 2);
  p.arrive();
  p.sum_arrived();
  EXPECT_EQ(p.state(), GradState::Reducing);
  p.arrive();
  EXPECT_EQ(p.state(), GradState::Reduced);
  EXPECT_ANY_THROW(p.arrive());
  p = {};
  p.begin_backward(1);
  EXPECT_EQ(p.turn(), Turn::Waiting);
}

// Where a parameter's gradient is after each change, from each place; and which units it cannot be in.
TEST(GradProgress, AGradientIsInOnePlace) {
  using enum GradAt;
  using Of = std::function<void(const GradProgress&, ParamGrad&)>;
  struct Row {
    const char* name;
    Of change;
    std::vector<GradAt> to;          // from each of `all`
    std::vector<GradState> refused;  // states of the unit
  };
  const std::vector<GradAt> all{Nowhere, Slot, Elsewhere, Unseen};
  const auto put = [](const GradProgress& p, ParamGrad& g, GradAt at) {
    p.restore(g, at == Slot || at == Elsewhere, at == Slot || at == Unseen, 0);
  };
  const std::vector<GradState> idle{GradState::Empty, GradState::Reducing, GradState::Reduced};
  for (const Row& row : {
           Row{"come", [](auto& p, auto& g) { p.come(g); }, {Slot, Slot, Slot, Slot}, {GradState::Empty}},
           Row{"fill", [](auto& p, auto& g) { p.fill(g); }, {Unseen, Slot, Slot, Unseen}, idle},
           Row{"empty", [](auto& p, auto& g) { p.empty(g); }, {Nowhere, Elsewhere, Elsewhere, Nowhere}, idle},
           Row{"show",
               [](auto& p, auto& g) { p.show(g, true); },
               {Elsewhere, Slot, Elsewhere, Slot},
               {GradState::Empty}},
           Row{"hide", [](auto& p, auto& g) { p.show(g, false); }, {Nowhere, Unseen, Nowhere, Unseen}, {}},
           Row{"drop", [](auto& p, auto& g) { p.drop(g); }, {Nowhere, Nowhere, Nowhere, Nowhere}, {}},
       }) {
    for (size_t i = 0; i < all.size(); ++i) {
      ParamGrad grad;
      const GradProgress p = in_state(GradState::Accumulating);
      put(p, grad, all[i]);
      ASSERT_EQ(grad.at(), all[i]);
      row.change(p, grad);
      EXPECT_EQ(grad.at(), row.to[i]) << row.name << " from place " << i;
    }
    for (const GradState state : row.refused) {
      ParamGrad grad;
      EXPECT_ANY_THROW(row.change(in_state(state), grad)) << row.name << " in " << grad_state_name(state);
    }
  }
  ParamGrad grad;
  EXPECT_ANY_THROW(in_state(GradState::Accumulating).count_addition(grad)) << "the first one overwrites";
  EXPECT_ANY_THROW(in_state(GradState::Empty).restore(grad, true, false, 0));
}

TEST(GradProgress, NothingIsLeftAtTheEnd) {
  GradProgress p;
  ParamGrad param;
  p.accumulate(true);
  p.come(param);
  p.count_addition(param);
  p.launch_alone();
  p.count_sum();
  EXPECT_TRUE(p.has_sum());
  EXPECT_ANY_THROW(p.end(param)) << "before its unit's";
  p.end();
  p.end(param);
  EXPECT_FALSE(p.has_sum());
  EXPECT_EQ(p.sums(), 0U);
  EXPECT_FALSE(param.has() || param.filled());
  EXPECT_EQ(param.additions(), 0U);
  p.restore_sums(5);
  EXPECT_EQ(p.sums(), 0U) << "without gradients";
  p.put_sums();
  p.restore_sums(5);
  EXPECT_EQ(p.sums(), 5U);
}

}  // namespace tessera::zero
