#include "tessera/base/env.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "tessera/base/error.h"

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

// Frames come behind the message where they are asked for, for every class of error.
TEST(Error, WhatIsTheMessageAlone) {
  const std::vector<std::function<void()>> calls = {
      [] { TESSERA_CHECK_VALUE(false, "test", "said"); }, [] { TESSERA_CHECK(false, "test", "said"); },
      [] { TESSERA_CHECK_IO(false, "test", "said"); },    [] { TESSERA_CHECK_BUILT(false, "test", "said"); },
      [] { TESSERA_CHECK_DIST(false, "test", "said"); },
  };
  const auto what_of = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const c10::Error& error) {
      return error.what();
    }
    return "";
  };
  for (const auto& call : calls) {
    EXPECT_EQ(what_of(call), "[test] said");
    ASSERT_EQ(setenv("TORCH_SHOW_CPP_STACKTRACES", "1", 1), 0);
    const std::string longer = what_of(call);
    ASSERT_EQ(unsetenv("TORCH_SHOW_CPP_STACKTRACES"), 0);
    EXPECT_EQ(longer.rfind("[test] said\n", 0), 0u) << longer;
    EXPECT_NE(longer.find("Exception raised from"), std::string::npos) << longer;
  }
}

}  // namespace tessera
