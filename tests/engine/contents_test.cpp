#include "tessera/engine/contents.h"

#include <gtest/gtest.h>

namespace tessera::engine {
namespace {

TEST(Contents, WhatIsReplacedOrAddedIsNamedAndWhatMovedIsNot) {
  const std::vector<NamedParam> built{{"a", 1}, {"b", 2}, {"tied", 1}};
  const auto compare = [&](const std::vector<NamedParam>& now) { return compare_contents(built, now, {1, 2, 7}); };
  for (const std::vector<NamedParam>& fine : std::vector<std::vector<NamedParam>>{
           built, {{"b", 2}, {"a", 1}}, {{"a", 1}, {"b.original", 2}}, {{"a", 1}, {"joins", 7}}, {}})
    EXPECT_EQ(compare(fine).fault + compare(fine).warning, "");
  EXPECT_EQ(compare({{"a", 1}, {"b", 3}, {"tied", 1}}).fault.substr(0, 11), "b: replaced");
  EXPECT_EQ(compare({{"a", 1}, {"b", 2}, {"tied", 2}}).fault.substr(0, 14), "tied: replaced");  // tied otherwise
  EXPECT_EQ(compare({{"a", 3, false}}).fault.substr(0, 11), "a: replaced");
  EXPECT_EQ(compare({{"a", 1}, {"c", 4}}).fault.substr(0, 8), "c: added");
  const ContentsReport still = compare_contents({{"a", 1, false}}, {{"a", 3, false}}, {1});
  EXPECT_NE(still.fault.find("a: replaced after the engine was built, which saves"), std::string::npos) << still.fault;
  const ContentsReport frozen = compare({{"a", 1}, {"c", 4, false}});
  EXPECT_EQ(frozen.fault, "");
  EXPECT_NE(frozen.warning.find("c: frozen"), std::string::npos);
}

}  // namespace
}  // namespace tessera::engine
