// What libtessera_cuda_comm.so is to CUDA (Note [Back ends of devices] in comm/device_backend.h).
#include "tessera/comm/device_backend.h"

#include <unistd.h>

#include <cstdlib>
#include <string>

#include "tessera/comm/c10d/gloo.h"
#include "tests/stand_in/staged_backend.h"

namespace {

using tessera::comm::DeviceBackend;

// Each process has devices of its own, unless a test says that all have one.
std::string identity(c10::Device device) {
  const char* const shared = std::getenv("TESSERA_TEST_ONE_DEVICE");
  return shared != nullptr ? "one" : std::to_string(::getpid()) + " " + std::to_string(device.index());
}

c10::intrusive_ptr<c10d::Backend> make(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                       std::chrono::milliseconds timeout) {
  return c10::make_intrusive<tessera::testing::StagedBackend>(
      tessera::comm::gloo_backend(store, rank, size, timeout, /*loopback=*/true));
}

constexpr DeviceBackend kBackend{tessera::comm::kDeviceBackendVersion, &identity, &make};

}  // namespace

extern "C" __attribute__((visibility("default"))) const DeviceBackend* tessera_device_backend() {
  return &kBackend;
}
