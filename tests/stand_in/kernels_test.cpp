// The table of the stand-in accelerator; that it has the reference's bits shows in engine_test.cpp.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/kernels/device_table.h"
#include "tests/stand_in/clocks.h"
#include "tests/stand_in/stand_in.h"
#include "tests/support/errors.h"

namespace tessera::stand_in {
namespace {

using namespace kernels;
using tessera::testing::error_of;

void* const kStream = stream_handle(0);
const DeviceTable& device = *tessera_device_table();

TEST(StandInKernels, WhatADeviceWouldRefuse) {
  const at::Tensor t = at::ones({8}, at::kPrivateUse1);
  auto* p = static_cast<float*>(t.data_ptr());
  float host[2] = {};
  const auto copy = [&](void* dst, void* stream) {
    return error_of([&] { device.scaled_copy(dst, DType::F32, p, DType::F32, 1, 2, stream); });
  };
  EXPECT_EQ(copy(p + 4, kStream), "");
  EXPECT_HAS(copy(p + 4, nullptr), "scaled_copy: not a stream");
  EXPECT_HAS(copy(host, kStream), "a host pointer");
  EXPECT_HAS(copy(reinterpret_cast<char*>(p) + 2, kStream), "not aligned");
  EXPECT_HAS(copy(at::ones({2}, at::Device(at::kPrivateUse1, 1)).data_ptr(), kStream), "another device");
  EXPECT_HAS(copy(p + 4, stream_handle(kStreams)), "not a stream of the current device");
  {
    const c10::DeviceGuard guard(at::Device(at::kPrivateUse1, 1));
    EXPECT_HAS(copy(p + 4, kStream), "another device");
  }
  const int64_t before = tessera_stand_in_launches();
  tessera_stand_in_fail_next_launch();
  EXPECT_HAS(copy(p + 4, kStream), "the launch failed");
  EXPECT_EQ(tessera_stand_in_launches(), before);
  EXPECT_EQ(copy(p + 4, kStream), "");
  EXPECT_EQ(tessera_stand_in_launches(), before + 1);
  EXPECT_EQ(tessera_stand_in_launches_of("nothing"), -1);
  EXPECT_EQ(device.version, kDeviceTableVersion);
  EXPECT_EQ(device.why_unusable(), "");
}

}  // namespace
}  // namespace tessera::stand_in
