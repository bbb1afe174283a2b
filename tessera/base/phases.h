// Phases: how long a rank spends in the parts of its steps, and their names in torch.profiler.
//
//   Forward    from pre_forward to post_forward
//   Backward   from the first of the engine's hooks in a backward to its end, whoever started it
//   Step       step(), at a boundary or not
//   Gather     partitioned parameters on their way, as far as this rank launched or waited
//   Reduce     gradients on their way, likewise
//
// Gather and Reduce lie inside the others: what of the communication was not hidden. Times are of the host's clock; on a
// device kernels may still run, unless wait_for() makes phases wait for them.
#pragma once

#include <ATen/record_function.h>
#include <c10/core/Device.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string_view>

namespace tessera {

enum class Phase : uint8_t { Forward, Backward, Step, Gather, Reduce };
inline constexpr std::array kPhases{Phase::Forward, Phase::Backward, Phase::Step, Phase::Gather, Phase::Reduce};
const char* phase_name(Phase phase);  // "forward", ...

// Sums of one engine. A phase inside itself counts once. One thread at a time.
class Phases {
 public:
  struct Total {
    std::chrono::nanoseconds time{0};
    int64_t times = 0;  // how often the phase began
  };

  const Total& total(Phase phase) const { return at(phase).total; }
  // Makes every phase begin and end when `device` has done all that was launched. Costs the overlap.
  void wait_for(c10::Device device);
  void begin(Phase phase);
  void end(Phase phase);                           // does nothing where the phase was not begun
  void drop(Phase phase) { at(phase).depth = 0; }  // what an exception left begun counts for nothing

 private:
  using Clock = std::chrono::steady_clock;
  struct Entry {
    Total total;
    int depth = 0;
    Clock::time_point began;
  };
  Entry& at(Phase phase) { return entries_[static_cast<size_t>(phase)]; }
  const Entry& at(Phase phase) const { return entries_[static_cast<size_t>(phase)]; }
  void settle() const;

  std::array<Entry, kPhases.size()> entries_;
  std::optional<c10::Device> device_;
};

// A range "tessera::WHAT OF" in torch.profiler. Where no profiler runs it costs a look.
class NamedRange {
 public:
  NamedRange(std::string_view what, std::string_view of);

 private:
  at::RecordFunction range_;
};

// A phase that lasts as long as this object, and its range.
class PhaseScope {
 public:
  PhaseScope(Phases& phases, Phase phase, std::string_view of = {})
      : phases_(phases), phase_(phase), range_(phase_name(phase), of) {
    phases_.begin(phase_);
  }
  ~PhaseScope();
  PhaseScope(const PhaseScope&) = delete;
  PhaseScope& operator=(const PhaseScope&) = delete;

 private:
  Phases& phases_;
  Phase phase_;
  NamedRange range_;
};

}  // namespace tessera
