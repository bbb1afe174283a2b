// Which policies there are: those of the modes pass, others say what would do.
#include "tessera/amp/precision.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/support/errors.h"
#include "tests/support/modes.h"

namespace tessera::amp {
namespace {

using testing::mode;

TEST(PrecisionPolicy, ModesPass) {
  for (PrecisionPolicy policy : testing::all_modes()) {
    EXPECT_NO_THROW(check(policy)) << policy.param;
    for (const at::ScalarType grad : {at::kFloat, at::kBFloat16, at::kHalf}) {
      policy.grad = grad;
      EXPECT_NO_THROW(check(policy)) << policy.param << " with gradients in " << grad;
    }
  }
  EXPECT_NO_THROW(check(PrecisionPolicy::bf16()));
  EXPECT_NO_THROW(check(PrecisionPolicy::fp16()));
  EXPECT_NO_THROW(check(mode(at::kFloat, Master::Weight, at::kBFloat16)));
  EXPECT_NO_THROW(check(mode(at::kBFloat16, Master::Fp32, at::kBFloat16)));
}

TEST(PrecisionPolicy, OthersAreValueErrors) {
  EXPECT_THROW(check(mode(at::kHalf, Master::Split, at::kFloat)), c10::ValueError);
  const auto expect = [](const PrecisionPolicy& policy, const std::string& text) {
    EXPECT_HAS(testing::error_of([&] { check(policy); }), "[amp.precision] " + text);
  };
  expect(mode(at::kDouble, Master::Weight, at::kFloat), "param must be fp32, bf16 or fp16, got Double");
  expect(mode(at::kFloat, Master::Fp32, at::kFloat), "fp32 parameters are their own masters");
  expect(mode(at::kFloat, Master::Split, at::kFloat), "fp32 parameters are their own masters");
  expect(mode(at::kHalf, Master::Split, at::kFloat), "only bf16 parameters can be split, not Half");
  expect(mode(at::kBFloat16, Master::Weight, at::kHalf), "state must be fp32 or bf16, got Half");
  for (const Master master : {Master::Fp32, Master::Weight})
    expect(mode(at::kHalf, master, at::kBFloat16), "fp16 parameters go with fp32 states");
  PrecisionPolicy policy = PrecisionPolicy::bf16();
  policy.grad = at::kDouble;
  expect(policy, "grad must be fp32, bf16 or fp16, got Double");
}

}  // namespace
}  // namespace tessera::amp
