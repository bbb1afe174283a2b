#include "tests/kernels/ptx/ptx_runtime.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "tests/kernels/ptx/ptx_machine.h"

namespace tessera::kernels::ptx {
namespace {

struct Launch {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};

struct Runtime {
  Memory memory;
  std::map<const void*, std::string> kernels;  // a host function of nvcc, and the entry it stands for
  std::vector<Program> programs;
  std::map<std::string, std::pair<const Program*, const Entry*>> entries;  // of the programs, by without_hash(name)
  std::vector<Launch> launches;                                            // configured and not yet popped
  int64_t most_blocks = std::numeric_limits<int64_t>::max();
  cudaError_t last = cudaSuccess;
  std::string why;  // of the last error
};

// Kernels are registered before main() and forgotten after it, as in CUDA's own.
Runtime& runtime() {
  static Runtime instance;
  return instance;
}

cudaError_t fail(cudaError_t error, const std::string& why) {
  runtime().last = error;
  runtime().why = why;
  return error;
}

// nvcc names a file's unnamed namespace by two hashes, the first of which depends on how and where it was called.
std::string without_hash(std::string name) {
  const std::string before = "_GLOBAL__N__";
  const size_t at = name.find(before);
  return at == std::string::npos ? name : name.erase(at + before.size(), 8);
}

void load_programs() {
  std::vector<Program> programs;
  std::istringstream files(TESSERA_PTX_FILES);
  for (std::string file; std::getline(files, file, ':');)
    programs.push_back(parse_file(file));
  runtime().programs = std::move(programs);
  for (const Program& program : runtime().programs) {
    for (const auto& [name, entry] : program.entries)
      runtime().entries[without_hash(name)] = {&program, &entry};
  }
}

cudaError_t launch(const void* kernel, const Launch& how, void** arguments) {
  const auto name = runtime().kernels.find(kernel);
  if (name == runtime().kernels.end()) return fail(cudaErrorInvalidDeviceFunction, "a kernel that was not registered");
  const bool flat = how.grid.y == 1 && how.grid.z == 1 && how.block.y == 1 && how.block.z == 1 && how.shared == 0;
  if (!flat) return fail(cudaErrorInvalidConfiguration, "only grids of one dimension without shared memory are known");
  const Grid grid{std::min<int64_t>(how.grid.x, runtime().most_blocks), how.block.x};
  try {
    if (runtime().programs.empty()) load_programs();
    const auto found = runtime().entries.find(without_hash(name->second));
    if (found == runtime().entries.end()) return fail(cudaErrorInvalidDeviceFunction, "no PTX of " + name->second);
    const auto& [program, entry] = found->second;
    const int64_t most_threads = entry->most_threads > 0 ? entry->most_threads : 1024;
    if (grid.blocks < 1 || grid.threads < 1 || grid.threads > most_threads) {
      return fail(cudaErrorInvalidConfiguration, "no such grid of " + name->second);
    }
    run(*program, *entry, grid, arguments, runtime().memory);
    return cudaSuccess;
  } catch (const std::exception& error) {
    return fail(cudaErrorLaunchFailure, error.what());
  }
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  const Memory& memory = runtime().memory;
  if (!to_device && !from_device) return fail(cudaErrorInvalidMemcpyDirection, "a copy of an unknown direction");
  if (memory.holds(to, bytes) != to_device || memory.holds(from, bytes) != from_device) {
    return fail(cudaErrorInvalidValue, "a copy's pointer is not where it says");
  }
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

}  // namespace

void limit_blocks(int64_t most) {
  runtime().most_blocks = most;
}

}  // namespace tessera::kernels::ptx

namespace ptx = tessera::kernels::ptx;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  return std::exchange(ptx::runtime().last, cudaSuccess);
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : ptx::runtime().why.c_str();
}

cudaError_t cudaMalloc(void** block, size_t bytes) {
  *block = ptx::runtime().memory.allocate(bytes);
  return cudaSuccess;
}

cudaError_t cudaFree(void* block) {
  if (block == nullptr || ptx::runtime().memory.release(block)) return cudaSuccess;
  return ptx::fail(cudaErrorInvalidValue, "frees what was not allocated");
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return ptx::copy(to, from, bytes, kind);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return ptx::copy(to, from, bytes, kind);
}

cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                             cudaStream_t stream) {
  return ptx::launch(kernel, {grid, block, shared, stream}, arguments);
}

// What nvcc's host code calls for kernel<<<...>>>(...): since CUDA 13 by a handle, here the host function itself.
cudaError_t __cudaGetKernel(cudaKernel_t* handle, const void* kernel) {
  *handle = reinterpret_cast<cudaKernel_t>(const_cast<void*>(kernel));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t handle, dim3 grid, dim3 block, void** arguments, size_t shared,
                               cudaStream_t stream) {
  return ptx::launch(handle, {grid, block, shared, stream}, arguments);
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  ptx::runtime().launches.push_back({grid, block, shared, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const ptx::Launch how = ptx::runtime().launches.back();
  ptx::runtime().launches.pop_back();
  *grid = how.grid;
  *block = how.block;
  *shared = how.shared;
  *static_cast<cudaStream_t*>(stream) = how.stream;
  return cudaSuccess;
}

void** __cudaRegisterFatBinary(void*) {
  static void* binary = nullptr;
  return &binary;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) {  // for managed variables; without optimisation the host code names it
  return 1;
}

void __cudaRegisterFunction(void**, const char* host_function, char*, const char* name, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
  ptx::runtime().kernels[host_function] = name;
}

}  // extern "C"
