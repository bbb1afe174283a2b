// The library of kernels for a device, as the core loads it: TESSERA_DEVICE_LIBRARY by dlopen, in a program that is
// linked with nothing of it. Needs no device and no driver.
#include "tessera/kernels/device_table.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>

namespace tessera::kernels {
namespace {

class DeviceLibrary : public ::testing::Test {
 protected:
  void SetUp() override {
    library_ = dlopen(TESSERA_DEVICE_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library_, nullptr) << dlerror();
    const auto table = reinterpret_cast<TesseraDeviceTable>(dlsym(library_, "tessera_device_table"));
    ASSERT_NE(table, nullptr) << dlerror();
    table_ = table();
  }

  void* library_ = nullptr;  // stays loaded: CUDA's runtime has handlers that run at the process's end
  const DeviceTable* table_ = nullptr;
};

TEST_F(DeviceLibrary, TableIsOfThisHeaderAndComplete) {
  ASSERT_NE(table_, nullptr);
  ASSERT_EQ(table_->version, kDeviceTableVersion);
  EXPECT_TRUE(table_->is_captured);
  EXPECT_TRUE(table_->adam && table_->sgd && table_->lion && table_->adagrad);
  EXPECT_TRUE(table_->scaled_copy && table_->scaled_add);
  EXPECT_TRUE(table_->scaled_copy_stochastic && table_->scaled_add_stochastic);
  EXPECT_TRUE(table_->split && table_->join && table_->sum_of_squares);
}

TEST_F(DeviceLibrary, SaysWhyNoDeviceCanBeUsed) {
  ASSERT_NE(table_, nullptr);
  const std::string why = table_->why_unusable();
  EXPECT_TRUE(why.empty() || why.starts_with("CUDA has no device")) << why;
  EXPECT_EQ(table_->why_unusable(), why);
}

// A process may have torch's CUDA runtime, of another version, whose names must not meet this library's.
TEST_F(DeviceLibrary, ExportsNothingElse) {
  for (const char* name : {"cudaGetDeviceCount", "cudaLaunchKernel", "cudaMemcpyAsync", "__cudaRegisterFatBinary"})
    EXPECT_EQ(dlsym(library_, name), nullptr) << name;
  EXPECT_EQ(dlsym(library_, "_ZN7tessera7kernels4cuda12why_unusableB5cxx11Ev"), nullptr);
}

}  // namespace
}  // namespace tessera::kernels
