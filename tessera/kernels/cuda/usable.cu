// Whether a device can be used, and what a stream does with its work.
#include <cuda_runtime.h>

#include <algorithm>
#include <iterator>
#include <string>

#include "tessera/kernels/cuda/cuda.h"

namespace tessera::kernels::cuda {
namespace {

constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};  // what this file was compiled for: 800 is sm_80

// The version's text: 13000 is "13.0".
std::string toolkit(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string why_no_device(cudaError_t error) {
  int driver = 0;
  if (error != cudaErrorInsufficientDriver || cudaDriverGetVersion(&driver) != cudaSuccess)
    return std::string(": ") + cudaGetErrorString(error);
  if (driver == 0) return ": there is no driver (libcuda.so.1); install NVIDIA's";
  return ": the driver serves CUDA " + toolkit(driver) + " and these kernels need " + toolkit(CUDART_VERSION) +
         "; update the driver, or build Tessera with a toolkit that is no newer than it";
}

}  // namespace

std::string why_unusable() {
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess)
    return "CUDA has no device" + why_no_device(error);
  if (devices == 0) return "CUDA has no device";
  const int oldest = *std::min_element(std::begin(kArchitectures), std::end(kArchitectures)) / 10;
  int newest_card = 0;
  for (int device = 0; device < devices; ++device) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    newest_card = std::max(newest_card, 10 * major + minor);
  }
  if (newest_card >= oldest) return "";
  constexpr int kOldestOf13 = 75;
  const bool dropped = newest_card < kOldestOf13 && CUDART_VERSION >= 13000;
  return "the card is of architecture " + std::to_string(newest_card) + ", and these kernels were built for " +
         std::to_string(oldest) +
         " and later; build Tessera with CMAKE_CUDA_ARCHITECTURES=" + std::to_string(newest_card) +
         (dropped ? " and a toolkit of CUDA 12, the last one that knows it" : "");
}

// The legacy stream cannot be captured, and asking for it is an error while a stream that it waits for is.
bool is_captured(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace tessera::kernels::cuda
