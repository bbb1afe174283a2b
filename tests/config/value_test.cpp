#include "tessera/config/value.h"

#include <cmath>

#include "support.h"

namespace tessera::config {
namespace {

TEST(Value, PrintsAsJson) {
  EXPECT_EQ(Value().text(), "null");
  EXPECT_EQ(Value(true).text(), "true");
  EXPECT_EQ(Value(3).text(), "3");
  EXPECT_EQ(Value(3.0).text(), "3.0");
  EXPECT_EQ(Value("a\"b\n").text(), "\"a\\\"b \"");
  EXPECT_EQ(Value(List{0.9, 0.999}).text(), "[0.9, 0.999]");
  EXPECT_EQ(Value(Params{{"k", List{}}}).text(), "{\"k\": []}");
}

TEST(Value, NumbersReadBack) {
  for (double v : {1e-8, 0.1, 5e8, 1.0 / 3, -2.5}) {
    EXPECT_EQ(std::stod(number_text(v)), v);
  }
  EXPECT_EQ(number_text(INFINITY), "inf");
  EXPECT_EQ(number_text(NAN), "nan");
}

TEST(Value, KnowsWhatIsUnset) {
  EXPECT_TRUE(Value().is_unset());
  EXPECT_TRUE(Value("auto").is_unset());
  EXPECT_FALSE(Value("automatic").is_unset());
  EXPECT_FALSE(Value(0).is_unset());
}

}  // namespace
}  // namespace tessera::config
