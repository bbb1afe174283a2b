#include "tessera/amp/autocast.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

#include <thread>

namespace tessera::amp {
namespace {

bool on() {
  return at::autocast::is_autocast_enabled(at::kCPU);
}

at::ScalarType product() {
  return at::mm(at::ones({2, 2}), at::ones({2, 2})).scalar_type();
}

TEST(Autocast, ComputesInItsDtypeAndEnds) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const auto before = at::autocast::get_autocast_dtype(at::kCPU);
    const AutocastRegion region({true, dtype}, at::kCPU);
    EXPECT_EQ(product(), dtype);
    EXPECT_FALSE(region.switched_off());
    std::thread([] { EXPECT_FALSE(on()) << "of this thread only"; }).join();
    region.leave();
    EXPECT_FALSE(on());
    EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), before);
    EXPECT_EQ(product(), at::kFloat);
  }
}

TEST(Autocast, TheInnerDtypeWins) {
  const AutocastRegion outer({true, at::kBFloat16}, at::kCPU);
  const at::Tensor weight = at::ones({2, 2}).requires_grad_(true);
  EXPECT_EQ(at::mm(weight, weight).scalar_type(), at::kBFloat16);
  const AutocastRegion inner({true, at::kHalf}, at::kCPU);
  EXPECT_EQ(at::mm(weight, weight).scalar_type(), at::kHalf) << "no cast of the outer region is used again";
  inner.leave();
  EXPECT_EQ(at::mm(weight, weight).scalar_type(), at::kBFloat16);
  outer.leave();
}

TEST(Autocast, NotEnabledSwitchesAnOuterRegionOff) {
  const AutocastRegion alone({}, at::kCPU);
  EXPECT_FALSE(alone.switched_off());
  alone.leave();
  const AutocastRegion outer({true, at::kBFloat16}, at::kCPU);
  const AutocastRegion inner({}, at::kCPU);
  EXPECT_TRUE(inner.switched_off());
  EXPECT_EQ(product(), at::kFloat);
  inner.leave();
  EXPECT_EQ(product(), at::kBFloat16);
  const AutocastRegion plain({true, at::kFloat}, at::kCPU);
  EXPECT_EQ(product(), at::kFloat);
  EXPECT_FALSE(plain.switched_off()) << "as it was told to";
  plain.leave();
  outer.leave();
  EXPECT_FALSE(on());
}

// A loop inside one region of the caller's: weights change between two forwards.
TEST(Autocast, CastsDoNotOutliveTheRegion) {
  const AutocastRegion outer({true, at::kBFloat16}, at::kCPU);
  const at::Tensor weight = at::ones({2, 2}).requires_grad_(true);
  for (int i = 1; i < 4; ++i) {
    const AutocastRegion forward({true, at::kBFloat16}, at::kCPU);
    EXPECT_EQ(at::mm(weight, at::eye(2)).sum().item<float>(), static_cast<float>(4 * i));
    forward.leave();
    const at::NoGradGuard no_grad;
    weight.add_(1);
  }
  outer.leave();
}

// A cast made under no_grad has no graph; torch's cache would give it to the forward that follows in one region.
TEST(Autocast, CastsOfNoGradAreNotUsedAgain) {
  const at::Tensor weight = at::ones({2, 2}).requires_grad_(true);
  const AutocastRegion region({true, at::kBFloat16}, at::kCPU);
  EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
  {
    const at::NoGradGuard no_grad;
    at::mm(at::ones({2, 2}), weight);
  }
  const at::Tensor out = at::mm(at::ones({2, 2}), weight);
  region.leave();
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  ASSERT_TRUE(out.requires_grad());
  out.sum().backward();
  EXPECT_EQ(weight.grad().sum().item<float>(), 8);
}

// The loss term of a caller inside his own region, with a weight that is updated between steps.
TEST(Autocast, CastsOfTheCallerEndAtTheNextForward) {
  const AutocastRegion outer({true, at::kBFloat16}, at::kCPU);
  at::autocast::set_autocast_cache_enabled(true);
  const at::Tensor weight = at::ones({2, 2}).requires_grad_(true);
  for (int i = 1; i < 3; ++i) {
    EXPECT_EQ(at::mm(weight, at::eye(2)).sum().item<float>(), static_cast<float>(4 * i));
    const at::NoGradGuard no_grad;
    weight.add_(1);
    const AutocastRegion forward({true, at::kBFloat16}, at::kCPU);
    forward.leave();
  }
  outer.leave();
}

TEST(Autocast, Checks) {
  EXPECT_NO_THROW(check({true, at::kHalf}, at::kCPU));
  EXPECT_NO_THROW(check({true, at::kFloat}, at::kCPU));
  EXPECT_THROW(check({true, at::kDouble}, at::kCPU), c10::ValueError);
  EXPECT_THROW(check({true, at::kHalf}, at::kMeta), c10::ValueError);
  EXPECT_NO_THROW(check({false, at::kDouble}, at::kMeta));
  const AutocastRegion none({}, at::kMeta);
  none.leave();
}

}  // namespace
}  // namespace tessera::amp
