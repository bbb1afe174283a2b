#include "tessera/base/env.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cstdlib>

namespace tessera {

TEST(Env, UnsetAndEmptyAreNothing) {
  unsetenv("TESSERA_TEST_VARIABLE");
  EXPECT_FALSE(env::get("TESSERA_TEST_VARIABLE"));
  setenv("TESSERA_TEST_VARIABLE", "", 1);
  EXPECT_FALSE(env::get("TESSERA_TEST_VARIABLE"));
  EXPECT_FALSE(env::get_int("TESSERA_TEST_VARIABLE"));
}

TEST(Env, ReadsIntegersAndNamesTheVariableOtherwise) {
  setenv("TESSERA_TEST_VARIABLE", "-17", 1);
  EXPECT_EQ(env::get_int("TESSERA_TEST_VARIABLE"), -17);
  for (const char* bad : {"2x", "x", "1.5", "99999999999"}) {
    setenv("TESSERA_TEST_VARIABLE", bad, 1);
    try {
      env::get_int("TESSERA_TEST_VARIABLE");
      FAIL() << bad;
    } catch (const c10::ValueError& e) {
      EXPECT_NE(std::string(e.what()).find("TESSERA_TEST_VARIABLE"), std::string::npos);
    }
  }
}

}  // namespace tessera
