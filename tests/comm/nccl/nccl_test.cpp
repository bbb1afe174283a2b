// The library that carries CUDA's tensors in C++ programs, where it was built: its entry, and a collective where there is a device.
#include <ATen/DeviceAccelerator.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/comm/device_backend.h"

namespace tessera::comm {

TEST(Nccl, CarriesTensorsOfTheDevice) {
  void* const library = dlopen("libtessera_cuda_comm.so", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) GTEST_SKIP() << "this build has none: " << dlerror();
  const auto entry = reinterpret_cast<TesseraDeviceBackend>(dlsym(library, "tessera_device_backend"));
  ASSERT_NE(entry, nullptr);
  EXPECT_EQ(entry()->version, kDeviceBackendVersion);
  if (at::accelerator::getAccelerator() != c10::kCUDA || at::accelerator::deviceCount() == 0)
    GTEST_SKIP() << "there is no CUDA device";
  const c10::Device device(c10::kCUDA, 0);
  EXPECT_EQ(entry()->identity(device).size(), 16U);
  const auto backend = entry()->make(c10::make_intrusive<c10d::HashStore>(), 0, 1, std::chrono::seconds(30));
  EXPECT_TRUE(backend->supportsSplitting());
  std::vector<at::Tensor> tensors{at::full({4}, 3.0, device)};
  backend->allreduce(tensors)->wait();
  EXPECT_TRUE(tensors[0].cpu().equal(at::full({4}, 3.0)));
}

}  // namespace tessera::comm
