#include "tessera/zero/plan.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <limits>
#include <set>

namespace tessera::zero {

namespace {
constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

std::vector<std::string> names(const std::vector<PlannedUnit>& units) {
  std::vector<std::string> result;
  for (const PlannedUnit& u : units)
    result.push_back(u.name);
  return result;
}
}  // namespace

TEST(Plan, UnitsInOrderOfFirstAppearanceAndRootLast) {
  const std::vector<PlanItem> items{{"", 10, 0}, {"b0", 5, 0}, {"b1", 5, 0}, {"b0", 5, 0}, {"root", 1, 0}};
  const auto units = plan_units(items, 0, kNoLimit);
  EXPECT_EQ(names(units), (std::vector<std::string>{"b0", "b1", "root"}));
  EXPECT_EQ(units[0].items, (std::vector<int>{1, 3}));
  EXPECT_EQ(units[2].items, (std::vector<int>{0, 4}));
}

TEST(Plan, MergesSmallNeighboursButNeverTheRoot) {
  const std::vector<PlanItem> items{{"b0", 4, 0}, {"b1", 4, 0}, {"b2", 4, 0}, {"b3", 4, 0}, {"", 1, 0}};
  EXPECT_EQ(names(plan_units(items, 8, kNoLimit)), (std::vector<std::string>{"b0..b1", "b2..b3", "root"}));
  EXPECT_EQ(names(plan_units(items, 8, 6)), (std::vector<std::string>{"b0", "b1", "b2", "b3", "root"}));
}

TEST(Plan, ANameThatBeginsLikeTheRootsIsAnyOther) {
  const std::vector<PlanItem> items{{"", 4, 0}, {"root_blocks.0", 4, 0}, {"roots", 4, 0}, {"b", 4, 0, 1}};
  const auto units = plan_units(items, 8, kNoLimit);
  EXPECT_EQ(names(units), (std::vector<std::string>{"root_blocks.0..roots", "b (resident)", "root"}));
  EXPECT_FALSE(units[0].root);
  EXPECT_TRUE(units[2].root);
}

TEST(Plan, SplitsLargeUnitsBetweenParameters) {
  const std::vector<PlanItem> items{{"b", 50, 0}, {"b", 50, 0}, {"b", 200, 0}, {"b", 1, 0}};
  const auto units = plan_units(items, 0, 100);
  EXPECT_EQ(names(units), (std::vector<std::string>{"b#0", "b#1", "b#2"}));
  EXPECT_EQ(units[0].items, (std::vector<int>{0, 1}));
  EXPECT_EQ(units[1].items, (std::vector<int>{2})) << "a parameter above the limit is a unit of its own";
}

TEST(Plan, EveryItemOnceForAnyLimits) {
  std::vector<PlanItem> items;
  for (int i = 0; i < 40; ++i)
    items.push_back({i % 7 == 0 ? std::string() : std::string("b").append(std::to_string(i % 5)), i % 11, i % 3});
  for (const int64_t lower : {0, 1, 30, 1000}) {
    for (const int64_t upper : {0, 1, 30, 1000}) {
      std::multiset<int> seen;
      for (const auto& unit : plan_units(items, lower, upper))
        seen.insert(unit.items.begin(), unit.items.end());
      EXPECT_EQ(seen.size(), items.size());
      for (int i = 0; i < 40; ++i)
        EXPECT_EQ(seen.count(i), 1U);
    }
  }
}

TEST(Plan, OptimizerGroupsAreContiguousInAUnit) {
  const std::vector<PlanItem> items{{"b", 1, 1}, {"b", 1, 0}, {"b", 1, 1}, {"b", 1, 0}};
  EXPECT_EQ(plan_units(items, 0, kNoLimit)[0].items, (std::vector<int>{1, 3, 0, 2}));
}

TEST(Plan, NegativeLimitsAreValueErrors) {
  EXPECT_THROW(plan_units({}, -1, 1), c10::ValueError);
}

}  // namespace tessera::zero
