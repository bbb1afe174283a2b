// Updates of many ranges by one launch, for all rules; each rule has a file of its own, so that they compile side by side.
//
// Note [Update kernels]
//   A kernel is made of a rule (kernels/rules.h) and a form: where the master weights are, the dtypes of gradient and
//   states, and the rounding, all known when it is compiled. A launch gets a table: segments, which are ranges with
//   pointers and numbers of their own, and settings (hyperparameters, the step's key of random bits), which segments
//   share. A block is of one segment, and a thread has an eight of it (Note [Eights]).
#pragma once

#include <algorithm>
#include <limits>

#include "tessera/kernels/cuda/cuda.h"
#include "tessera/kernels/cuda/draws.cuh"
#include "tessera/kernels/cuda/eight.cuh"
#include "tessera/kernels/cuda/launch.cuh"
#include "tessera/kernels/rules.h"

namespace tessera::kernels::cuda {

struct Segment {
  void* weights;  // the master, or weights that are their own
  void* beside;   // a copy for compute, or the residual
  const void* grad;
  void* state0;
  void* state1;
  Eights eights;
  Numbers numbers;
  int settings;
  bool adopts;
};

template <class Rule>
struct Settings {
  Rule rule;
  float grad_scale;
  StepKey key;

  bool operator==(const Settings&) const = default;
};

constexpr int kSegments = 40, kSettings = 8;  // of a launch

template <class Rule>
struct Table {
  Shares<kSegments> shares;
  Segment segments[kSegments];
  Settings<Rule> settings[kSettings];
};

// Rounding to nearest, where there are no random bits.
struct Nearest {};
template <DType dtype>
__device__ void rounded(Eight<dtype>& eight, const float (&values)[kEight], Nearest) {
  eight.set(values);
}
template <DType dtype, class Random>
__device__ void rounded(Eight<dtype>& eight, const float (&values)[kEight], const Random& random) {
  eight.set_stochastic(values, random);
}

// The master weights of an eight in each of the ways that kernels/update.h lists.
struct Fp32Weights {
  Eight<DType::F32> master;

  static constexpr bool rounds = false;
  template <class Access>
  __device__ void load(const Access& access, const Segment& segment) {
    access.load(master, segment.weights);
  }
  __device__ float value(int k, const Segment&) const { return master.value(k); }
  template <class Random>
  __device__ void set(const float (&values)[kEight], const Random&) {
    master.set(values);
  }
  template <class Access>
  __device__ void store(const Access& access, const Segment& segment) const {
    access.store(master, segment.weights);
  }
};

template <DType half>
struct MasterAndCopy {
  Eight<DType::F32> master;
  Eight<half> copy;

  static constexpr bool rounds = false;
  template <class Access>
  __device__ void load(const Access& access, const Segment& segment) {
    if (segment.adopts) access.load(copy, segment.beside);
    access.load(master, segment.weights);
  }
  __device__ float value(int k, const Segment& segment) const {
    return segment.adopts ? adopted(master.value(k), copy.bits(k), half) : master.value(k);
  }
  template <class Random>
  __device__ void set(const float (&values)[kEight], const Random&) {
    master.set(values);
    copy.set(values);
  }
  template <class Access>
  __device__ void store(const Access& access, const Segment& segment) const {
    access.store(master, segment.weights);
    access.store(copy, segment.beside);
  }
};

struct SplitWeights {
  SplitEight halves;

  static constexpr bool rounds = false;
  template <class Access>
  __device__ void load(const Access& access, const Segment& segment) {
    access.load(halves.weight, segment.weights);
    access.load(halves.residual, segment.beside);
  }
  __device__ float value(int k, const Segment&) const { return halves.value(k); }
  template <class Random>
  __device__ void set(const float (&values)[kEight], const Random&) {
    halves.set(values);
  }
  template <class Access>
  __device__ void store(const Access& access, const Segment& segment) const {
    access.store(halves.weight, segment.weights);
    access.store(halves.residual, segment.beside);
  }
};

template <DType half>
struct HalfWeights {
  Eight<half> weight;

  static constexpr bool rounds = true;
  template <class Access>
  __device__ void load(const Access& access, const Segment& segment) {
    access.load(weight, segment.weights);
  }
  __device__ float value(int k, const Segment&) const { return weight.value(k); }
  template <class Random>
  __device__ void set(const float (&values)[kEight], const Random& random) {
    rounded(weight, values, random);
  }
  template <class Access>
  __device__ void store(const Access& access, const Segment& segment) const {
    access.store(weight, segment.weights);
  }
};

template <class Rule, class Weights, DType grad_dtype, DType state_dtype, Rounding rounding>
__global__ void __launch_bounds__(kThreads, 4) update_eights(const __grid_constant__ Table<Rule> table) {
  const auto [number, share] = table.shares.of(blockIdx.x);
  const Segment& segment = table.segments[number];
  const int eight = static_cast<int>(share * kThreads + threadIdx.x);
  if (eight >= segment.eights.count()) return;
  const int begin = eight * kEight - segment.eights.before;

  Weights weights;
  Eight<grad_dtype> grad;
  Eight<state_dtype> state0, state1;
  segment.eights.access(begin, [&](const auto& access) {
    weights.load(access, segment);
    access.load(grad, segment.grad);
    if constexpr (Rule::states > 0) access.load(state0, segment.state0);
    if constexpr (Rule::states > 1) access.load(state1, segment.state1);
  });

  const Settings<Rule> settings = table.settings[segment.settings];
  float w[kEight], s0[kEight] = {}, s1[kEight] = {};
#pragma unroll
  for (int k = 0; k < kEight; ++k) {
    w[k] = weights.value(k, segment);
    if constexpr (Rule::states > 0) s0[k] = state0.value(k);
    if constexpr (Rule::states > 1) s1[k] = state1.value(k);
    settings.rule.apply(w[k], grad.value(k) * settings.grad_scale, s0[k], s1[k]);
  }
  if constexpr (rounding == Rounding::Stochastic) {
    const Draws<kState0, kWeight> draws(settings.key, segment.numbers, begin);
    if constexpr (Rule::states > 0) rounded(state0, s0, [&](int k) { return draws.of(kState0, k); });
    if constexpr (Rule::states > 1) rounded(state1, s1, [&](int k) { return draws.of(kState1, k); });
    weights.set(w, [&](int k) { return draws.of(kWeight, k); });
  } else {
    if constexpr (Rule::states > 0) rounded(state0, s0, Nearest());
    if constexpr (Rule::states > 1) rounded(state1, s1, Nearest());
    weights.set(w, Nearest());
  }

  segment.eights.access(begin, [&](const auto& access) {
    if constexpr (Rule::states > 0) access.store(state0, segment.state0);
    if constexpr (Rule::states > 1) access.store(state1, segment.state1);
    weights.store(access, segment);
  });
}

// ---- which kernel updates a range
template <class Rule>
using Kernel = void (*)(Table<Rule>);

template <class Rule, class Weights, DType state, Rounding rounding>
Kernel<Rule> kernel_by_grad(DType grad) {
  if (grad == DType::F32) return update_eights<Rule, Weights, DType::F32, state, rounding>;
  if (grad == DType::BF16) return update_eights<Rule, Weights, DType::BF16, state, rounding>;
  return update_eights<Rule, Weights, DType::F16, state, rounding>;
}

// A kernel rounds stochastically only where something is rounded.
template <class Rule, class Weights, DType state>
Kernel<Rule> kernel_by_rounding(const UpdateRange& range) {
  if constexpr (Weights::rounds || (Rule::states > 0 && state == DType::BF16)) {
    if (range.rounding == Rounding::Stochastic)
      return kernel_by_grad<Rule, Weights, state, Rounding::Stochastic>(range.grad_dtype);
  }
  return kernel_by_grad<Rule, Weights, state, Rounding::Nearest>(range.grad_dtype);
}

template <class Rule, class Weights, bool half_states>
Kernel<Rule> kernel_by_state(const UpdateRange& range) {
  if constexpr (half_states && Rule::states > 0) {
    if (range.state_dtype == DType::BF16) return kernel_by_rounding<Rule, Weights, DType::BF16>(range);
  }
  return kernel_by_rounding<Rule, Weights, DType::F32>(range);
}

template <class Rule>
Kernel<Rule> kernel_of(const UpdateRange& range) {
  const bool bf16 = range.weight_dtype == DType::BF16;
  if (range.master != nullptr) {
    if (range.weight == nullptr) return kernel_by_state<Rule, Fp32Weights, true>(range);
    return bf16 ? kernel_by_state<Rule, MasterAndCopy<DType::BF16>, true>(range)
                : kernel_by_state<Rule, MasterAndCopy<DType::F16>, false>(range);
  }
  if (range.residual != nullptr) return kernel_by_state<Rule, SplitWeights, true>(range);
  return bf16 ? kernel_by_state<Rule, HalfWeights<DType::BF16>, true>(range)
              : kernel_by_state<Rule, HalfWeights<DType::F16>, false>(range);
}

// ---- launches
inline Segment segment_of(const UpdateRange& r, Numbers numbers, int settings) {
  const bool has_master = r.master != nullptr;
  const Start weights = has_master ? Start{r.master, DType::F32} : Start{r.weight, r.weight_dtype};
  const Start beside = has_master ? Start{r.weight, r.weight_dtype} : Start{r.residual, DType::BF16};
  const Eights eights =
      eights_of(static_cast<int>(r.n),
                {weights, beside, {r.grad, r.grad_dtype}, {r.state0, r.state_dtype}, {r.state1, r.state_dtype}});
  return {const_cast<void*>(weights.at),
          const_cast<void*>(beside.at),
          r.grad,
          r.state0,
          r.state1,
          eights,
          numbers,
          settings,
          r.adopts};
}

// Calls f(range, numbers) for pieces of a segment.
template <class KernelRule, class F>
void for_pieces(const UpdateSegment<KernelRule>& segment, const F& f) {
  constexpr int64_t kMostStride = std::numeric_limits<int>::max();
  const UpdateRange& range = segment.range;
  const bool has_runs = segment.run > 0 && segment.run < range.n;
  if (has_runs && range.n <= kMostElements && segment.stride <= kMostStride)
    return f(range, Numbers{range.random.first, static_cast<int>(segment.run), static_cast<int>(segment.stride)});
  const int64_t run = has_runs ? segment.run : range.n;
  for (int64_t begin = 0; begin < range.n; begin += run) {
    const uint64_t first = range.random.first + static_cast<uint64_t>(begin / run * segment.stride);
    for_pieces(std::min(run, range.n - begin), [&](int64_t at, int count) {
      f(part(range, begin + at, begin + at + count), Numbers::one_run(first + static_cast<uint64_t>(at)));
    });
  }
}

// Updates of one rule, gathered into as few launches as there is room for. Segments share nothing that is written, so their
// order does not matter.
template <class Rule>
class Updates {
 public:
  static_assert(sizeof(Table<Rule>) <= kMostArguments);
  explicit Updates(void* stream) : stream_(stream) {}

  template <class KernelRule>
  void add(const UpdateSegment<KernelRule>& segment) {
    const Settings<Rule> settings{Rule(segment.rule), segment.grad_scale, step_key(segment.range.random)};
    for_pieces(segment, [&](const UpdateRange& range, const Numbers& numbers) {
      const Kernel<Rule> kernel = kernel_of<Rule>(range);
      if (kernel != kernel_ || table_.shares.full() || !find(settings)) {
        go();
        kernel_ = kernel;
        find(settings);
      }
      const Segment added = segment_of(range, numbers, found_);
      table_.segments[table_.shares.add(added.eights.blocks())] = added;
    });
  }

  // Launches what was added since the last launch.
  void go() {
    launch(kernel_, table_.shares.blocks, kThreads, stream_, table_);
    table_.shares = {};
    settings_count_ = 0;
  }

 private:
  // Finds the place of settings in the table, as found_. False where there is no room.
  bool find(const Settings<Rule>& settings) {
    for (found_ = 0; found_ < settings_count_; ++found_)
      if (table_.settings[found_] == settings) return true;
    if (settings_count_ == kSettings) return false;
    table_.settings[settings_count_++] = settings;
    return true;
  }

  void* stream_;
  Kernel<Rule> kernel_ = nullptr;
  Table<Rule> table_;
  int settings_count_ = 0, found_ = 0;
};

template <class Rule, class KernelRule>
void update_all(const UpdateSegment<KernelRule>* segments, int64_t count, void* stream) {
  Updates<Rule> updates(stream);
  for (int64_t i = 0; i < count; ++i)
    updates.add(segments[i]);
  updates.go();
}

}  // namespace tessera::kernels::cuda
