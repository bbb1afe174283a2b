// What is behind Engine: for engine.cpp and joining.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/checkpoint/node.h"
#include "tessera/engine/agreement.h"
#include "tessera/engine/checkpoint.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/last_norm.h"
#include "tessera/engine/notices.h"
#include "tessera/engine/one_thread.h"

namespace tessera::engine {

// On the host, of a device once `came` is over.
struct KeptLoss {
  at::Tensor value;
  std::shared_ptr<c10::Event> came = {};
};

struct Engine::Impl {
  explicit Impl(const Options& o) : options(o), scaling(o.scaler) {}

  Options options;
  comm::Mesh mesh;
  std::vector<ParamSpec> params;
  std::unique_ptr<zero::ShardedModel> model;
  std::optional<offload::Rates> rates;         // where rates were measured
  std::optional<zero::Ranks> savers;           // of the checkpointer
  std::unique_ptr<Checkpointer> checkpointer;  // last to come, first to go: it reads the model

  int64_t micro_steps = 0, global_steps = 0, skipped_steps = 0, global_samples = 0;
  int64_t begun = 0;              // micro-steps since the last boundary
  int64_t counted_backwards = 0;  // backwards that earlier updates counted
  int64_t stepped_backwards = 0;  // backwards that earlier calls of step() have seen
  int64_t empty_steps = 0;        // calls of step() since the last boundary without a backward of their own
  std::string fault;              // why a backward may not update; Engine::set_fault()
  std::vector<std::string> client_terms;
  std::vector<DeviceTerm> device_terms;
  std::optional<bool> boundary_override;
  bool counts_empty = false;  // Engine::count_empty_steps()
  bool in_step = false, no_sync = false, coalesce = false, applied = false;
  LastNorm norm;           // of the last step
  LastNorm previous_norm;  // the last update's: Note [Clipping by the step before]
  std::vector<int> joined;
  size_t group_count = 0;             // of the param groups that the engine knows
  int state_count = 0;                // of the states that memory is for
  bool scale_by_accumulation = true;  // for the engine.backward() in progress
  Scaling scaling;
  c10::DeviceType device = at::kCPU;
  std::vector<amp::AutocastRegion> regions;  // of the forwards under way
  bool warned_of_region = false;
  bool keeps_losses = false;
  std::vector<KeptLoss> losses;
  OneThread thread;
  Notices notices;
  std::map<std::pair<shard::Residence, bool>, zero::HomeMaker> homes;  // of offload_states(), by where and pinned

  zero::ShardedModel& live(const char* call) const {
    TESSERA_CHECK(model != nullptr, "engine", call, ": the engine was destroyed; build a new one");
    return *model;
  }

  // The model, with all of it on the device.
  zero::ShardedModel& here(const char* call) const {
    zero::ShardedModel& found = live(call);
    found.units.check_here(call);
    return found;
  }

  // Whether a forward does more than a graph of the device could repeat.
  bool needs_the_host() const {
    return c10::GradMode::is_enabled() || model->units.placements().params == shard::Placement::Shard;
  }

  void check_accumulates(const char* call, int64_t steps = 2) const {
    TESSERA_CHECK(!live(call).early.on() || steps == 1, "engine", call,
                  ": with tessera.update_in_backward every backward is a step; switch it off to accumulate gradients");
  }

  void check_keeps_gradients(const char* call) const {
    TESSERA_CHECK(
        !live(call).early.on(), "engine", call,
        ": with tessera.update_in_backward the model is updated before several engines know their norm; switch "
        "it off");
  }

  void check_clips(const char* call) const {
    if (live(call).early.on())
      TESSERA_FAIL(UsageError, "[engine.", call,
                   "] tessera.update_in_backward has used the gradients when it is called; set gradient_clipping and "
                   "tessera.clip, or switch update_in_backward off");
  }

  // Value error for a batch whose samples nobody could count.
  void check_batch(int64_t steps, int64_t samples) const {
    int64_t batch = 0;
    const bool fits = !__builtin_mul_overflow(steps, samples, &batch) &&
                      !__builtin_mul_overflow(batch, static_cast<int64_t>(mesh.size(comm::kBatchAxes)), &batch);
    TESSERA_CHECK_VALUE(fits && batch <= checkpoint::Node::kLargestCount, "engine", "the batch is too large: ", steps,
                        " micro-batches of ", samples, " samples on ", mesh.size(comm::kBatchAxes),
                        " ranks are more than 2^52, up to which samples are counted");
  }

  bool boundary() const {
    if (!options.managed_accumulation) return in_step;
    if (boundary_override) return *boundary_override;
    return begun + 1 >= options.gradient_accumulation_steps;
  }

  // A call that ranks make together begins on this thread. UsageError where another one is in a call; the other ranks, which would
  // wait for this one, get it, too.
  OneThread::Call enter_all(const char* call);
  // A part of a forward or a backward, which a thread of autograd's own may run. check_alone(): where no other rank waits.
  void check_beside(const char* call);
  void check_alone(const char* call);
  void end_ranks(const UsageError& error) const;

  zero::StepState step_state() {
    check_beside("backward");
    const double mean = scale_by_accumulation ? 1.0 / static_cast<double>(options.gradient_accumulation_steps) : 1.0;
    return {boundary(), no_sync || coalesce, mean, scaling.gradient_scale()};
  }

  // Why a step() may not be. `own`: the engine's own error, which is thrown where all ranks have it.
  struct Fault {
    std::string text;
    std::exception_ptr own;
  };
  bool apply(const std::function<void()>& external, std::optional<double> global_norm, int64_t empty, Fault& fault);
  // Runs `check`; at a boundary its error is announced to all ranks.
  void check_for_all(bool boundary, Fault& fault, const std::function<void()>& check) const;
  void check_step(bool boundary, std::optional<double> global_norm, Fault& fault) const;
  void check_may_step() const;
  // What is wrong with the hyper-parameters that the program has set. Local.
  std::string group_fault() const;
  // `present`: which parameters have a gradient, on any rank, so that all ranks find the same; empty: none.
  void check_all_used() const;  // no trained parameter without a gradient on this rank
  void check_trains(int64_t empty, const std::vector<bool>& present) const;
  // empty_with_this(): calls of step() for this update that no backward preceded, if the next one came now.
  // gradients_given(): no backward came, and the user has put gradients into p.grad, or left them there before the first one.
  bool gradients_given() const;
  int64_t empty_with_this() const { return empty_steps + (model->driver.backwards() != stepped_backwards ? 0 : 1); }
  void reduce_for_norm(const char* call, Fault& fault);
  double norm_of(const std::string& call, const Fault& fault);

  // The terms that an update goes by, or, where the backward has updated, the calls only.
  StepTerms terms(const std::string& call, int64_t empty, const std::string& why, const std::vector<int>& waiting,
                  bool updated) const;
  // Note [Update in the backward]
  void compare_in_backward();
  bool clips_by_previous() const { return options.zero.previous_clipping > 0; }
  // Why a backward may not update: this rank's fault, or that there is no norm to clip by.
  std::string why_not_update() const;

  // Returns the summary of the gradients as they are, and of those that join (joining.cpp). Error where ranks differ in what they
  // step by, or one cannot step. `updated`: the backward has updated.
  zero::GradientSummary summarize(const std::string& call, int64_t empty, std::optional<double> norm = {},
                                  const Fault& fault = {}, bool updated = false);
  std::vector<std::string> joining_lines(const std::vector<int>& waiting) const;
  void join(const std::vector<int>& waiting);

  void count_samples() {
    const int64_t before = std::exchange(counted_backwards, model->driver.backwards());
    const int64_t batches =
        options.managed_accumulation ? options.gradient_accumulation_steps : counted_backwards - before;
    global_samples += options.micro_batch_size * mesh.size(comm::kBatchAxes) * batches;
  }

  void leave_region() {
    if (regions.empty()) return;
    regions.back().leave();
    regions.pop_back();
  }
};

}  // namespace tessera::engine
