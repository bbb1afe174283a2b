// What all ranks of an engine must have alike: compared by a number, and named where it differs.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/amp/grad_scaler.h"
#include "tessera/engine/group_fields.h"
#include "tessera/optim/optimizer.h"
#include "tessera/zero/ranks.h"

namespace tessera::engine {

// FNV-1a, cut to what a double holds exactly.
class Digest {
 public:
  void add(std::string_view bytes);
  void add(double number);
  double value() const { return static_cast<double>(hash_ >> 12); }

 private:
  uint64_t hash_ = 14695981039346656037ULL;
};

// Returns the shortest text that no other number has.
std::string text_of(double number);

// Throws a value error on all ranks, "[origin] what: rank 0 has X, rank 1 has Y; advice", where their lines differ, with the
// first line that does. Collective.
void check_same(const zero::Ranks& ranks, const std::vector<std::string>& mine, const char* origin, const char* what,
                const char* advice);

// Note [What ranks step by]
//   A rank that differs in a rate, a loss scale, the number of micro-batches, or a call would follow its own course, silently:
//   updates are of slices, and collectives that mean different steps still match. So the digest of these goes with the norm, which
//   all ranks exchange at every update anyway, and costs no collective. Where it differs, all of them know, before anything is
//   updated or counted, and find out what it is. Update in the backward: ranks compare what it updates by with its first
//   gradient (Note [Update in the backward]), and step() only the calls.
//   Numbers of backwards may differ where that is meant: several losses of one forward, and all inside no_sync().
struct StepTerms {
  std::string call;
  int64_t accumulation_steps = 1;
  int64_t empty_steps = 0;  // calls of step() for this update that no backward preceded
  int64_t begun = 0;        // all calls of step() for this update, without this one
  int64_t unstepped = 0;    // micro-batches for this update without a step() of their own (BackwardDriver::unstepped())
  std::span<const optim::GroupOptions> groups{};
  std::span<const std::string> client{};  // what else a client's optimizer updates by, as "name value in ..."
  std::string_view fault{};               // why this rank cannot step
  double gradient_scale = 1;              // Scaling::gradient_scale()
  std::optional<double> previous_norm{};  // what gradients are clipped by
  amp::GradScaler::State scaler{};
  std::span<const DeviceTerm> on_device{};
  std::vector<std::string> params{};  // lines of parameters that begin or cease to be trained

  double digest() const;
  // The digest with on_device, on the device: a number that a double holds exactly; undefined where on_device is empty.
  at::Tensor shown() const;
  // Throws where digests differ, or all have the same fault: value error, or a state error with the fault. Collective.
  [[noreturn]] void refuse(const zero::Ranks& ranks) const;
};

}  // namespace tessera::engine
