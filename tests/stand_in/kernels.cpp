// Kernels of the stand-in accelerator: the reference on its memory, with the checks that a device would make.
#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>

#include "tessera/kernels/table.h"
#include "tests/stand_in/memory.h"
#include "tests/stand_in/stand_in.h"

namespace tessera::stand_in {
namespace {

using namespace tessera::kernels;

// What tests ask for and switch is the process's: a table has no place for more than functions.
constexpr const char* kEntries[] = {"adam",
                                    "sgd",
                                    "lion",
                                    "adagrad",
                                    "scaled_copy",
                                    "scaled_add",
                                    "scaled_copy_stochastic",
                                    "scaled_add_stochastic",
                                    "split",
                                    "join",
                                    "sum_of_squares"};
std::array<std::atomic<int64_t>, std::size(kEntries)> launches{};
std::atomic<bool> fail_next{false};

constexpr size_t entry(std::string_view name) {
  return static_cast<size_t>(std::find(std::begin(kEntries), std::end(kEntries), name) - std::begin(kEntries));
}

template <size_t kEntry>
void launch(void* stream) {
  static_assert(kEntry < std::size(kEntries));
  if (stream != stream_handle(current_device())) {
    throw std::runtime_error(std::string("[stand_in] ") + kEntries[kEntry] + ": not the stream of the current device");
  }
  if (fail_next.exchange(false)) {
    throw std::runtime_error(std::string("[stand_in] ") + kEntries[kEntry] + ": the launch failed, as was asked for");
  }
  ++launches[kEntry];
}

template <class T>
T* host(T* p, size_t element) {
  T* there = to_host(p);
  if (p != nullptr && device_of(p) != current_device()) {
    throw std::runtime_error("[stand_in] a pointer of another device than the current one");
  }
  if (reinterpret_cast<uintptr_t>(there) % element != 0) {
    throw std::runtime_error("[stand_in] a pointer is not aligned to its elements");
  }
  return there;
}
template <class T>
T* host(T* p, DType dtype) {
  return host(p, size_of(dtype));
}

UpdateRange host(const UpdateRange& range) {
  UpdateRange r = range;
  r.master = host(r.master, DType::F32);
  r.residual = host(r.residual, DType::BF16);
  r.weight = host(r.weight, r.weight_dtype);
  r.grad = host(r.grad, r.grad_dtype);
  r.state0 = host(r.state0, r.state_dtype);
  r.state1 = host(r.state1, r.state_dtype);
  return r;
}

void adam(const AdamRule& rule, const UpdateRange& range, float grad_scale, void* stream) {
  launch<entry("adam")>(stream);
  reference_table().adam(rule, host(range), grad_scale);
}
void sgd(const SgdRule& rule, const UpdateRange& range, float grad_scale, void* stream) {
  launch<entry("sgd")>(stream);
  reference_table().sgd(rule, host(range), grad_scale);
}
void lion(const LionRule& rule, const UpdateRange& range, float grad_scale, void* stream) {
  launch<entry("lion")>(stream);
  reference_table().lion(rule, host(range), grad_scale);
}
void adagrad(const AdagradRule& rule, const UpdateRange& range, float grad_scale, void* stream) {
  launch<entry("adagrad")>(stream);
  reference_table().adagrad(rule, host(range), grad_scale);
}

void scaled_copy(void* dst, DType to, const void* src, DType from, float scale, int64_t n, void* stream) {
  launch<entry("scaled_copy")>(stream);
  reference_table().scaled_copy(host(dst, to), to, host(src, from), from, scale, n);
}
void scaled_add(void* dst, DType to, const void* src, DType from, float scale, int64_t n, void* stream) {
  launch<entry("scaled_add")>(stream);
  reference_table().scaled_add(host(dst, to), to, host(src, from), from, scale, n);
}
void scaled_copy_stochastic(void* dst, DType to, const void* src, DType from, float scale, int64_t n,
                            const RandomKey& random, void* stream) {
  launch<entry("scaled_copy_stochastic")>(stream);
  reference_table().scaled_copy_stochastic(host(dst, to), to, host(src, from), from, scale, n, random);
}
void scaled_add_stochastic(void* dst, DType to, const void* src, DType from, float scale, int64_t n,
                           const RandomKey& random, void* stream) {
  launch<entry("scaled_add_stochastic")>(stream);
  reference_table().scaled_add_stochastic(host(dst, to), to, host(src, from), from, scale, n, random);
}

void split(void* weight, void* residual, const float* src, int64_t n, void* stream) {
  launch<entry("split")>(stream);
  reference_table().split(host(weight, DType::BF16), host(residual, DType::BF16), host(src, DType::F32), n);
}
void join(float* dst, const void* weight, const void* residual, int64_t n, void* stream) {
  launch<entry("join")>(stream);
  reference_table().join(host(dst, DType::F32), host(weight, DType::BF16), host(residual, DType::BF16), n);
}

void sum_of_squares(const void* src, DType dtype, int64_t n, double* lanes, double* sums, void* stream) {
  launch<entry("sum_of_squares")>(stream);
  const auto* from = static_cast<const char*>(host(src, dtype));
  double* to = host(sums, sizeof(double));
  // All of the scratch memory is written: a caller with too little of it, or who reads it, shall see that.
  std::fill_n(host(lanes, sizeof(double)), sum_blocks(n) * kSumLanes, std::numeric_limits<double>::quiet_NaN());
  for (int64_t b = 0; b < sum_blocks(n); ++b) {
    const int64_t begin = b * kSumBlock;
    const char* block = from + begin * static_cast<int64_t>(size_of(dtype));
    to[b] = reference_table().sum_of_squares(block, dtype, std::min(kSumBlock, n - begin));
  }
}

constexpr DeviceTable kTable{
    kDeviceTableVersion,    [] { return std::string(); }, adam,  sgd,  lion,          adagrad, scaled_copy, scaled_add,
    scaled_copy_stochastic, scaled_add_stochastic,        split, join, sum_of_squares};

}  // namespace
}  // namespace tessera::stand_in

const tessera::kernels::DeviceTable* tessera_device_table() {
  return &tessera::stand_in::kTable;
}
int64_t tessera_stand_in_launches() {
  int64_t sum = 0;
  for (const auto& count : tessera::stand_in::launches)
    sum += count;
  return sum;
}
int64_t tessera_stand_in_launches_of(const char* name) {
  const size_t i = tessera::stand_in::entry(name);
  return i < tessera::stand_in::launches.size() ? tessera::stand_in::launches[i].load() : -1;
}
void tessera_stand_in_fail_next_launch() {
  tessera::stand_in::fail_next = true;
}
