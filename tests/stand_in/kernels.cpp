// Kernels of the stand-in accelerator: the reference on its memory, with the checks that a device would make.
#include <algorithm>
#include <array>
#include <atomic>
#include <initializer_list>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/kernels/table.h"
#include "tests/stand_in/clocks.h"
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
std::atomic<void (*)(const char* entry)> on_launch{nullptr};
std::atomic<Stream> captured{-1};

constexpr size_t entry(std::string_view name) {
  return static_cast<size_t>(std::find(std::begin(kEntries), std::end(kEntries), name) - std::begin(kEntries));
}

// A launch on a stream of the current device, which may be asked to fail. What it uses is told by used().
template <size_t kEntry>
Stream launch(void* handle) {
  static_assert(kEntry < std::size(kEntries));
  const Stream stream = stream_of_handle(handle);
  if (stream < 0 || stream / kStreams != current_device()) {
    throw std::runtime_error(std::string("[stand_in] ") + kEntries[kEntry] + ": not a stream of the current device");
  }
  if (fail_next.exchange(false)) {
    throw std::runtime_error(std::string("[stand_in] ") + kEntries[kEntry] + ": the launch failed, as was asked for");
  }
  if (const auto notice = on_launch.load(); notice != nullptr) notice(kEntries[kEntry]);
  ++launches[kEntry];
  return stream;
}

template <size_t kEntry>
void used(Stream stream, std::initializer_list<Use> uses) {
  give(stream, kEntries[kEntry], uses);
}

template <size_t kEntry>
void launch(void* handle, std::initializer_list<Use> uses) {
  used<kEntry>(launch<kEntry>(handle), uses);
}

Use use(const char* part, bool writes, const void* p, size_t element, int64_t n) {
  return {bytes_at(p, p == nullptr ? 0 : element * static_cast<size_t>(n)), writes, part};
}
Use reads(const char* part, const void* p, DType dtype, int64_t n) {
  return use(part, false, p, size_of(dtype), n);
}
Use writes(const char* part, const void* p, DType dtype, int64_t n) {
  return use(part, true, p, size_of(dtype), n);
}

template <size_t kEntry>
void used(Stream stream, const UpdateRange& r) {
  used<kEntry>(stream,
               {writes("master", r.master, DType::F32, r.n), writes("residual", r.residual, DType::BF16, r.n),
                writes("weight", r.weight, r.weight_dtype, r.n), reads("grad", r.grad, r.grad_dtype, r.n),
                writes("state0", r.state0, r.state_dtype, r.n), writes("state1", r.state1, r.state_dtype, r.n)});
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

// Run by run, as the elements are numbered.
template <class Rule>
void update(const UpdateSegment<Rule>& segment, const UpdateRange& range,
            void (*reference)(const Rule&, const UpdateRange&, float)) {
  const int64_t run = segment.run > 0 ? segment.run : range.n;
  for (int64_t begin = 0; begin < range.n; begin += run) {
    UpdateRange one = part(range, begin, std::min(range.n, begin + run));
    one.random.first = range.random.first + static_cast<uint64_t>(begin / run * segment.stride);
    reference(segment.rule, one, segment.grad_scale);
  }
}

template <size_t kEntry, class Rule>
void update_all(const UpdateSegment<Rule>* segments, int64_t count, void* handle,
                void (*reference)(const Rule&, const UpdateRange&, float)) {
  const Stream stream = launch<kEntry>(handle);
  std::vector<UpdateRange> ranges;
  for (int64_t i = 0; i < count; ++i) {
    ranges.push_back(host(segments[i].range));
    used<kEntry>(stream, ranges.back());
  }
  for (int64_t i = 0; i < count; ++i)
    update(segments[i], ranges[static_cast<size_t>(i)], reference);
}

void adam(const UpdateSegment<AdamRule>* segments, int64_t count, void* stream) {
  update_all<entry("adam")>(segments, count, stream, reference_table().adam);
}
void sgd(const UpdateSegment<SgdRule>* segments, int64_t count, void* stream) {
  update_all<entry("sgd")>(segments, count, stream, reference_table().sgd);
}
void lion(const UpdateSegment<LionRule>* segments, int64_t count, void* stream) {
  update_all<entry("lion")>(segments, count, stream, reference_table().lion);
}
void adagrad(const UpdateSegment<AdagradRule>* segments, int64_t count, void* stream) {
  update_all<entry("adagrad")>(segments, count, stream, reference_table().adagrad);
}

void scaled_copy(void* dst, DType to, const void* src, DType from, float scale, int64_t n, void* stream) {
  dst = host(dst, to);
  src = host(src, from);
  launch<entry("scaled_copy")>(stream, {reads("src", src, from, n), writes("dst", dst, to, n)});
  reference_table().scaled_copy(dst, to, src, from, scale, n);
}
void scaled_add(void* dst, DType to, const void* src, DType from, float scale, int64_t n, void* stream) {
  dst = host(dst, to);
  src = host(src, from);
  launch<entry("scaled_add")>(stream, {reads("src", src, from, n), writes("dst", dst, to, n)});
  reference_table().scaled_add(dst, to, src, from, scale, n);
}
void scaled_copy_stochastic(void* dst, DType to, const void* src, DType from, float scale, int64_t n,
                            const RandomKey& random, void* stream) {
  dst = host(dst, to);
  src = host(src, from);
  launch<entry("scaled_copy_stochastic")>(stream, {reads("src", src, from, n), writes("dst", dst, to, n)});
  reference_table().scaled_copy_stochastic(dst, to, src, from, scale, n, random);
}
void scaled_add_stochastic(void* dst, DType to, const void* src, DType from, float scale, int64_t n,
                           const RandomKey& random, void* stream) {
  dst = host(dst, to);
  src = host(src, from);
  launch<entry("scaled_add_stochastic")>(stream, {reads("src", src, from, n), writes("dst", dst, to, n)});
  reference_table().scaled_add_stochastic(dst, to, src, from, scale, n, random);
}

void split(void* weight, void* residual, const float* src, int64_t n, void* stream) {
  weight = host(weight, DType::BF16);
  residual = host(residual, DType::BF16);
  src = host(src, DType::F32);
  launch<entry("split")>(stream, {reads("src", src, DType::F32, n), writes("weight", weight, DType::BF16, n),
                                  writes("residual", residual, DType::BF16, n)});
  reference_table().split(weight, residual, src, n);
}
void join(float* dst, const void* weight, const void* residual, int64_t n, void* stream) {
  dst = host(dst, DType::F32);
  weight = host(weight, DType::BF16);
  residual = host(residual, DType::BF16);
  launch<entry("join")>(stream, {reads("weight", weight, DType::BF16, n), reads("residual", residual, DType::BF16, n),
                                 writes("dst", dst, DType::F32, n)});
  reference_table().join(dst, weight, residual, n);
}

void sum_of_squares(const SumSegment* segments, int64_t count, void* handle) {
  const Stream stream = launch<entry("sum_of_squares")>(handle);
  for (const SumSegment* segment = segments; segment < segments + count; ++segment) {
    const auto* from = static_cast<const char*>(host(segment->src, segment->dtype));
    double* sums = host(segment->sums, sizeof(double));
    used<entry("sum_of_squares")>(stream, {reads("src", from, segment->dtype, segment->n),
                                           use("sums", true, sums, sizeof(double), sum_blocks(segment->n))});
    for (int64_t b = 0; b < sum_blocks(segment->n); ++b) {
      const int64_t begin = b * kSumBlock;
      const char* block = from + begin * static_cast<int64_t>(size_of(segment->dtype));
      sums[b] = reference_table().sum_of_squares(block, segment->dtype, std::min(kSumBlock, segment->n - begin));
    }
  }
}

const char* unusable = "";

std::string why_unusable() {
  return unusable;
}
bool is_captured(void* stream) {
  return stream_of_handle(stream) == captured;
}

constexpr DeviceTable kTable{kDeviceTableVersion,
                             why_unusable,
                             is_captured,
                             adam,
                             sgd,
                             lion,
                             adagrad,
                             scaled_copy,
                             scaled_add,
                             scaled_copy_stochastic,
                             scaled_add_stochastic,
                             split,
                             join,
                             sum_of_squares};

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
void tessera_stand_in_on_launch(void (*notice)(const char* entry)) {
  tessera::stand_in::on_launch = notice;
}
void tessera_stand_in_unusable(const char* why) {
  tessera::stand_in::unusable = why;
}
void tessera_stand_in_fail_next_launch() {
  tessera::stand_in::fail_next = true;
}
void tessera_stand_in_capture(bool on) {
  using namespace tessera::stand_in;
  captured = on ? current_stream(current_device()) : -1;
}
