#include "tessera/checkpoint/misfits.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "tests/support/errors.h"

namespace tessera::checkpoint {
namespace {

TEST(Misfits, WhatATensorCannotTake) {
  const at::Tensor own = at::ones({2, 2}), wave = own.to(at::kComplexFloat);
  EXPECT_EQ(misfit(own, own), "");
  EXPECT_EQ(misfit(own.to(at::kBFloat16), own), "");
  EXPECT_EQ(misfit(own, wave), "");
  EXPECT_EQ(misfit(wave, wave), "");
  EXPECT_EQ(misfit(own.to_sparse(), own.to_sparse()), "");
  EXPECT_EQ(misfit(own.to(at::kMeta), own), "is on the meta device there, and has no values");
  EXPECT_EQ(misfit(wave, own), "is complex there and real here");
  EXPECT_EQ(misfit(at::kComplexDouble, own), "is complex there and real here");
  EXPECT_EQ(misfit(own.to_sparse(), own), "is sparse or quantized there; make it dense");
}

TEST(Misfits, AllAreListed) {
  Misfits misfits;
  misfits.add("a", "");
  misfits.list("not there:", {});
  misfits.check();
  misfits.add("b", "is wrong");
  misfits.list("not there:", {"c", "d"});
  EXPECT_HAS(
      testing::error_of<c10::ValueError>([&] { misfits.check(); }),
      "[engine.load_module_state_dict] what is to be loaded does not fit:\n  'b' is wrong\n  not there: 'c' 'd'");
}

}  // namespace
}  // namespace tessera::checkpoint
