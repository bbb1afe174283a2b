#include <ATen/cuda/CUDAContext.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "tessera/comm/device_backend.h"

namespace tessera::comm {
namespace {

std::string identity(c10::Device device) {
  const auto& bytes = at::cuda::getDeviceProperties(device.index())->uuid.bytes;
  return {bytes, sizeof(bytes)};
}

c10::intrusive_ptr<c10d::Backend> make(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                       std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, std::move(options));
}

constexpr DeviceBackend kBackend{kDeviceBackendVersion, &identity, &make};

}  // namespace
}  // namespace tessera::comm

extern "C" __attribute__((visibility("default"))) const tessera::comm::DeviceBackend* tessera_device_backend() {
  return &tessera::comm::kBackend;
}
