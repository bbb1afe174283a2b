// DeviceTable: the kernels of a device, as the core finds them at run time.
//
// Note [Device kernels]
//   The core is built once, without a device's toolkit. The kernels for tensors of device type T are a library of their
//   own, libtessera_T.so (T as torch writes it in lower case: "cuda"), which exports tessera_device_table(). The first tensor
//   of that type has the core load it (shard/device.h). A library that was compiled for another version of this header
//   is refused by its number.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/kernels/update.h"

namespace tessera::kernels {

constexpr int kDeviceTableVersion = 4;  // of DeviceTable and of what it points to
constexpr int64_t kSumBlock = 4096;     // elements that sum_of_squares adds to one number

constexpr int64_t sum_blocks(int64_t n) {
  return (n + kSumBlock - 1) / kSumBlock;
}

// A range with hyperparameters of its own.
template <class Rule>
struct UpdateSegment {
  Rule rule;
  UpdateRange range;
  float grad_scale;
  // Numbers of the elements, for the random bits: `run` from range.random.first on, then as many `stride` further on, and so
  // on, as the rows of a matrix of which the range is some columns. 0: one run.
  int64_t run = 0, stride = 0;
};

// The arguments of sum_of_squares() for each kSumBlock elements, the last of which may be fewer.
struct SumSegment {
  const void* src;
  DType dtype;
  int64_t n;
  double* sums;  // sum_blocks(n) sums
};

// Contracts are those of update.h, elementwise.h and split.h, and so are the bits (a NaN's payload may differ).
// Pointers are device pointers, each aligned to its element. Calls return at once: the work is done in order of `stream`,
// the device's own handle of a stream, and the device must be the calling thread's current one. std::runtime_error where a
// launch fails.
struct DeviceTable {
  int version;                        // kDeviceTableVersion
  std::string (*why_unusable)();      // empty where a device can be used, else why not
  bool (*is_captured)(void* stream);  // the stream's work is recorded for replays (a graph), and not done now

  // Segments share no element that is written. Segments that agree on which pointers they have, on dtypes and rounding
  // share launches.
  void (*adam)(const UpdateSegment<AdamRule>*, int64_t count, void* stream);
  void (*sgd)(const UpdateSegment<SgdRule>*, int64_t count, void* stream);
  void (*lion)(const UpdateSegment<LionRule>*, int64_t count, void* stream);
  void (*adagrad)(const UpdateSegment<AdagradRule>*, int64_t count, void* stream);
  void (*scaled_copy)(void* dst, DType, const void* src, DType, float scale, int64_t n, void* stream);
  void (*scaled_add)(void* dst, DType, const void* src, DType, float scale, int64_t n, void* stream);
  void (*scaled_copy_stochastic)(void* dst, DType, const void* src, DType, float scale, int64_t n, const RandomKey&,
                                 void* stream);
  void (*scaled_add_stochastic)(void* dst, DType, const void* src, DType, float scale, int64_t n, const RandomKey&,
                                void* stream);
  void (*split)(void* weight_bf16, void* residual, const float* src, int64_t n, void* stream);
  void (*join)(float* dst, const void* weight_bf16, const void* residual, int64_t n, void* stream);
  // Segments of one dtype that follow each other share launches.
  void (*sum_of_squares)(const SumSegment*, int64_t count, void* stream);
};

}  // namespace tessera::kernels

extern "C" {
using TesseraDeviceTable = const tessera::kernels::DeviceTable* (*)();  // the type of tessera_device_table
}
