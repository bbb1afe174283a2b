#include "tessera/shard/device.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/errors.h"

namespace tessera::shard {
namespace {

// tests/stand_in has a device that is served.
TEST(Device, TypesWithoutKernelsAreRefused) {
  EXPECT_NO_THROW(check_device(at::kCPU));
  for (int i = 0; i < 2; ++i) {  // what was found once is kept
    EXPECT_THROW(check_device(at::Device(at::kMeta)), c10::NotImplementedError);
    const auto text = testing::error_of([] { check_device(at::Device(at::kMeta)); });
    EXPECT_HAS(text, "tensors on device type 'meta' cannot be trained: its kernels were not found");
    EXPECT_HAS(text, "libtessera_meta.so");
  }
}

}  // namespace
}  // namespace tessera::shard
