// What the engine's tests on it rely on; that it computes as the host does shows there.
#include "tests/stand_in/stand_in.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <barrier>
#include <cstdio>
#include <cstring>
#include <thread>

#include "tests/stand_in/memory.h"
#include "tests/support/errors.h"

namespace tessera::stand_in {
namespace {

using testing::error_of;
const at::Device kHere(at::kPrivateUse1, 0);

// Equal bits, both brought to the host.
bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && at::equal(a.cpu(), b.cpu());
}

TEST(StandInDeathTest, TheHostCannotTouchItsMemory) {
  const at::Tensor t = at::ones({8}, kHere);
  auto* p = static_cast<volatile float*>(t.data_ptr());
  EXPECT_DEATH(std::printf("%f", p[0]), "");
  EXPECT_DEATH(p[7] = 1, "");
  EXPECT_DEATH(std::memcpy(t.data_ptr(), "abc", 3), "");
}

TEST(StandIn, MemoryIsFreedAndStartsAsNan) {
  const int64_t before = tessera_stand_in_bytes();
  {
    const at::Tensor t = at::empty({100}, kHere);
    EXPECT_EQ(tessera_stand_in_bytes(), before + 400);
    EXPECT_TRUE(at::isnan(t).all().item<bool>());
    t.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(nullptr, kHere));
    EXPECT_EQ(tessera_stand_in_bytes(), before);
    EXPECT_HAS(error_of([&] { t.cpu(); }), "no memory");
  }
  at::Tensor grown = at::ones({4}, kHere);
  grown.resize_({100});
  EXPECT_EQ(tessera_stand_in_bytes(), before + 400);
  EXPECT_TRUE(same(grown.narrow(0, 0, 4), at::ones({4})));
}

TEST(StandIn, DevicesAreSeveral) {
  const at::Device second(at::kPrivateUse1, 1);
  const at::Tensor t = at::ones({4}, second), inner = t.narrow(0, 1, 2);
  EXPECT_EQ(inner.device(), second);
  EXPECT_EQ((inner + 1).device(), second);
  EXPECT_EQ(device_of(inner.data_ptr()), 1);
  EXPECT_EQ(at::from_blob(inner.data_ptr(), {2}, [](void*) {}, at::TensorOptions(second)).device(), second);
  EXPECT_EQ(at::ones({4}, at::kPrivateUse1).device(), kHere);
  EXPECT_TRUE(same(t.to(kHere), t));
  at::Tensor grown = at::ones({0}, second);
  grown.resize_({100});
  EXPECT_EQ(device_of(grown.data_ptr()), 1);
  {
    const c10::DeviceGuard guard(second);
    EXPECT_EQ(at::ones({4}, at::kPrivateUse1).device(), second);
  }
  EXPECT_HAS(error_of([] { at::ones({4}, at::Device(at::kPrivateUse1, kDevices)); }), "there is no device");
}

// Ranks in one process, a device each: a hook of one may wait for a hook of the other.
TEST(StandIn, BackwardPassesOfSeveralDevicesJoin) {
  std::barrier<> meeting(2);
  const auto rank = [&](int index) {
    at::Tensor leaf = at::ones({3}, at::Device(at::kPrivateUse1, index)).requires_grad_();
    leaf.register_hook([&](const at::Tensor&) { meeting.arrive_and_wait(); });
    (leaf * 2).sum().backward();
    EXPECT_EQ(leaf.grad().sum().item<float>(), 6);
  };
  std::thread other(rank, 1);
  rank(0);
  other.join();
}

// Autograd has a thread for each device. The engine's hooks run there.
TEST(StandIn, HooksRunOnTheThreadOfTheDevice) {
  for (const at::Device device : {at::Device(at::kCPU), kHere}) {
    at::Tensor leaf = at::ones({3}, device).requires_grad_();
    std::thread::id thread;
    float seen = 0;
    leaf.register_hook([&](const at::Tensor& grad) {
      thread = std::this_thread::get_id();
      seen = grad.sum().item<float>();
    });
    (leaf * 2).sum().backward();
    EXPECT_EQ(seen, 6);
    EXPECT_EQ(thread == std::this_thread::get_id(), device.is_cpu());
  }
}

}  // namespace
}  // namespace tessera::stand_in
