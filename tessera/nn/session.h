// Session: what nn::Engine does that does not depend on the module's type. Owns the core engine and the schedule.
#pragma once

#include <ATen/core/Generator.h>
#include <torch/nn/module.h>

#include <exception>
#include <functional>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/caught_warnings.h"
#include "tessera/base/error.h"
#include "tessera/comm/backends.h"
#include "tessera/comm/mesh.h"
#include "tessera/comm/timed_group.h"
#include "tessera/config/config.h"
#include "tessera/engine/checkpoint.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/watch.h"
#include "tessera/io/metrics.h"
#include "tessera/nn/client_optimizer.h"
#include "tessera/nn/construction.h"
#include "tessera/nn/contents.h"
#include "tessera/nn/cut_layers.h"
#include "tessera/nn/flops_profiler.h"
#include "tessera/nn/own_groups.h"
#include "tessera/nn/recipe.h"
#include "tessera/nn/scope.h"
#include "tessera/nn/sizes.h"
#include "tessera/nn/state_dict.h"
#include "tessera/nn/states.h"
#include "tessera/nn/units.h"
#include "tessera/offload/states.h"
#include "tessera/optim/optimizer.h"
#include "tessera/optim/schedule.h"
#include "tessera/parallel/attention.h"
#include "tessera/parallel/cost.h"
#include "tessera/parallel/functions.h"
#include "tessera/parallel/layers.h"
#include "tessera/parallel/plan.h"
#include "tessera/parallel/vocabulary.h"

namespace tessera::nn {

// The ranks of the environment on the axes that a configuration asks for (comm::environment_mesh). Collective.
comm::Mesh environment_mesh(const Config& config);

// Values of the program's own in a checkpoint: numbers, texts, lists and dicts of such (c10::impl::GenericDict), tensors. Python's
// engines read them as client_state, and C++ reads theirs.
using checkpoint::ClientValues;

class GatheredSequences;

// What a load has found; false where there was no checkpoint.
struct Loaded {
  std::string folder = {}, tag = {};
  std::vector<std::string> missing = {}, unexpected = {};  // names, for a load that is not strict
  ClientValues client = {};
  explicit operator bool() const { return !folder.empty(); }
};

class Session {
 public:
  // Collective: the parameters of rank 0 are broadcast. Without an optimizer, in the configuration and the recipe, the engine only
  // evaluates, at stages 0 and 3. Value error when the configuration names none of C++, at stages 1 and 2 none at all, when it is
  // wrong, or asks for other ranks along sp or tp than `mesh` has; not-implemented error for keys that are not served. `building`: who
  // partitioned parameters of the module before, or null.
  enum class Part : uint8_t { Whole, First, Other };
  // `part`: of a model that several engines share. The first rank of the first, or only, one warns and writes progress lines
  // (steps_per_print) to standard error, for all ranks.
  Session(std::shared_ptr<torch::nn::Module> module, const Config& config, comm::Mesh mesh,
          const Construction* building = nullptr, const Recipe& recipe = {}, Part part = Part::Whole);
  // One schedule moves the rates of a core: there are no copies.
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  Session(Session&&) = default;
  Session& operator=(Session&&) = default;

  // The backward of loss, with the loss scale where the mode has one; `loss.backward()` is as good in fp32 and bf16.
  // Returns loss / gradient_accumulation_steps, or the loss for scale_wrt_gas = false.
  at::Tensor backward(const at::Tensor& loss, bool retain_graph = false, bool scale_wrt_gas = true);

  // Scales for a direct backward where the mode scales losses (fp16): engine.scale(loss).backward(), once for each backward;
  // also outputs: engine.scale(output).backward(gradient). Returns the tensor itself in other modes.
  at::Tensor scale(const at::Tensor& loss) { return trained_by("scale").scaling().scale(loss); }
  // What step() divides gradients by; 1 in modes without loss scaling.
  double loss_scale() const { return live().scaling().scaler().scale(); }
  // On all ranks alike, between steps: engine::Scaling::set_scale(). Value error for what is no scale.
  void set_loss_scale(double scale) { live().scaling().set_scale(scale); }

  // Collective. Counts a micro-step; at a boundary: clip, update, next learning rate. True when weights were updated, which a loop
  // need not look at: what goes wrong is an error.
  // `global_norm`: see engine::Engine::step. Error, on all ranks and with nothing updated, for a module whose
  // parameters were replaced, on some of them or all; with tessera.update_in_backward it is the backward's.
  bool step(std::optional<double> global_norm = {});

  // Checkpoints (engine/checkpoint.h), the same files as Python's; options that are not given are those of the
  // configuration's section `checkpoint`, and weights come from masters only where load_from_fp32_weights does not say no.
  // Collective. save returns the tag; of `client` rank 0's is kept. load: false when there is no `latest`. With
  // checkpoint.random_state torch's generators of each rank go along, and come back on as many ranks.
  std::string save_checkpoint(const std::string& dir, std::optional<engine::SaveOptions> options = {},
                              const ClientValues& client = {});
  [[nodiscard]] Loaded load_checkpoint(const std::string& dir, const std::string& tag = "",
                                       const engine::Restore::Options& options = {});
  // Exports weights and buffers in the compute dtype for other tools to `dir`: ".bin" for torch.load(), ".safetensors"; several
  // files with an index where one would have more than max_shard_bytes. Complete or not at all. False, and nothing is
  // written, for partitioned parameters without zero_optimization.stage3_gather_16bit_weights_on_model_save. Collective.
  struct ExportOptions {
    bool frozen = true;
    int64_t max_shard_bytes = std::numeric_limits<int64_t>::max();
  };
  [[nodiscard]] bool save_16bit_model(const std::string& dir, const std::string& name, const ExportOptions& options);
  [[nodiscard]] bool save_16bit_model(const std::string& dir, const std::string& name = "pytorch_model.bin") {
    return save_16bit_model(dir, name, {});
  }
  // Ends an update that runs on behind the forward (engine::Engine::finish_update). Collective.
  void finish_update() { live().finish_update(); }
  void wait_for_checkpoint() {
    live().check_live("wait_for_checkpoint");
    live().checkpoints().wait();
  }
  // The module's parameters and buffers by name, detached: the tensors themselves, or copies of the whole of what is partitioned
  // or cut along tp, on every rank. Collective where a tensor is, and where an update runs on. `frozen` false: no frozen ones.
  [[nodiscard]] NamedTensors module_state_dict(bool frozen = true) const {
    const auto call = live().enter("module_state_dict");
    return nn::module_state_dict(*module_, live(), frozen);
  }
  // Loads values of a dict or of safetensors (checkpoint::WeightReader) into the module; masters follow: values of another dtype
  // than the parameter's come to its master as they are; of its own, elements that do not change keep the bits of theirs. Values
  // for cut ones are whole, or this rank's slice; of files nothing else is read, and no rank has more than one unit of
  // partitioned parameters whole. All ranks pass the same. Value error, on all and with nothing changed, for shapes that differ,
  // and where the load is strict for names. IoError, with a part loaded, for a disk that fails meanwhile. Collective.
  LoadedNames load_module_state_dict(const NamedTensors& state, const LoadOptions& options = {}) {
    const auto call = live().enter("load_module_state_dict");
    return nn::load_state_dict(*module_, live(), state, options);
  }
  LoadedNames load_module_state_dict(const checkpoint::WeightReader& files, const LoadOptions& options = {}) {
    const auto call = live().enter("load_module_state_dict");
    return nn::load_state_dict(*module_, live(), files, options);
  }

  // Hyper-parameters by param group, which may be changed between steps, on all ranks alike. With an optimizer of one's own its
  // groups are in the optimizer, too, and what is written here goes there with the next step: of torch's classes the rate alone.
  std::vector<optim::GroupOptions>& groups() { return live().groups(); }
  const std::vector<optim::GroupOptions>& groups() const { return live().groups(); }
  // Adds a param group of parameters of modules that came after the engine was built. (Frozen ones that require gradients again
  // join their group.) They join with the next step, save or load; a schedule leaves their rate. Returns its number. Value
  // error, with nothing changed, for what the module does not have, what is in another group and what cannot be trained with the
  // others. An optimizer of one's own is added to by its own add_param_group(), at the same times: the next forward, step, save or
  // load follows, and takes out again what it refuses; one of make_optimizer() also by this call, others not: state error. On all
  // ranks alike; local.
  int add_param_group(const std::vector<at::Tensor>& params, const optim::GroupOptions& options);
  // Learning rates that the next update uses, one per param group.
  std::vector<double> lr() const;
  // Ends the engine: parameters keep their values, inside a GatheredParameters partitioned ones, too (engine::Engine::destroy()); an
  // optimizer of one's own gets them back.
  void destroy();

  // Where the parameters are, and inputs belong.
  c10::Device device() const {
    return live().params().empty() ? c10::Device(c10::kCPU) : live().params().front().tensor.device();
  }
  // The dtype of the parameters: that of inputs of floating point, but for autocast.
  at::ScalarType dtype() const;
  // Inputs of a forward as the engine has them: on device(), those of floating point in dtype().
  at::Tensor cast_inputs(const at::Tensor& input) const;
  std::vector<at::Tensor> cast_inputs(std::vector<at::Tensor> inputs) const;
  // Whether every forward from here on does so with tensors, and vectors of them, among its arguments. With fp16.auto_cast forwards
  // cast to float16 in any case, and move nothing.
  void cast_forward_inputs(bool on) {
    live();
    casts_and_moves_ = on;
  }
  const comm::Mesh& mesh() const { return live().mesh(); }
  int rank() const { return live().mesh().rank(comm::kBatchAxes); }
  int size() const { return live().mesh().size(comm::kBatchAxes); }

  // Gathers `param`, which another module owns, while `reader` runs, too, from here on: for stage 3, where a forward reads a
  // parameter past its module. For a reader that does not say when it runs (hooked.h), while the module around it that does runs,
  // or for the whole forward. Value error for what is not of this engine. On all ranks alike; local.
  void register_external_parameter(const torch::nn::Module& reader, const ParamKey& param);
  // What lasts as long as an object of this class.
  class [[nodiscard]] Held {
   public:
    using Call = void (engine::Engine::*)();
    // `begin` null: it has begun. `leave`: in place of `end` where an exception passes.
    Held(std::shared_ptr<engine::Engine> core, Call begin, Call end, Call leave);
    // Where end() was not called: its error is that of the next forward or step(). Where an exception passes nothing is reduced,
    // since other ranks may not come here: gradients stay this rank's own until the next reduction.
    ~Held();
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    // Ends the hold before the object goes. Throws what the reduction throws.
    void end();

   private:
    const std::shared_ptr<engine::Engine> core_;  // lives as long as the hold
    Call end_;                                    // null: it was ended
    const Call leave_;
    const int passing_ = std::uncaught_exceptions();
  };
  // Room for other engines: what this one has on its device goes elsewhere until reload_states() (engine::Engine::offload_states).
  void offload_states(const std::vector<zero::StateKind>& kinds = zero::all_state_kinds(),
                      shard::Residence to = shard::Residence::Host, bool pin_memory = true) {
    live().offload_states(kinds, to, pin_memory);
  }
  void reload_states() { live().reload_states(); }
  // The same while the object lives; its end(), or where it goes the next forward or step(), throws what reload_states() does.
  Held states_away(const std::vector<zero::StateKind>& kinds = zero::all_state_kinds(),
                   shard::Residence to = shard::Residence::Host, bool pin_memory = true);
  bool states_are_away() const { return live().states_are_away(); }
  // What of offloaded states an update moves, by which threads it is computed, and how long that is to take: with `measure`, which
  // is collective, by speeds of this machine (engine::Engine::offload_plan, measure_offload).
  engine::OffloadPlan offload_plan() const { return live().offload_plan(); }
  engine::OffloadPlan offload_plan(bool measure) {
    if (measure) live().measure_offload();
    return live().offload_plan();
  }

  // How tensor_parallel has cut the module; empty where it did not, or it came cut. For reading: parallel_plan()->text().
  const std::optional<parallel::Plan>& parallel_plan() const {
    live();
    return plan_;
  }

  // What stage 3 gathers together, and why: nn::units_text(). Local.
  std::string units_text() const { return nn::units_text(*module_, live()); }

  // ---- accumulation
  // Until the object goes, backwards accumulate without a collective; or with one, at its end, for all of them. One at a time.
  Held no_sync() {
    return {owned(), &engine::Engine::begin_no_sync, &engine::Engine::end_no_sync, &engine::Engine::end_no_sync};
  }
  Held coalesce() {
    return {owned(), &engine::Engine::begin_coalesce, &engine::Engine::end_coalesce, &engine::Engine::leave_coalesce};
  }
  void zero_grad() { live().zero_grad(); }
  int64_t micro_batch_size() const { return live().options().micro_batch_size; }  // samples of this rank
  // dataloader_drop_last, for loaders.
  bool drops_last_batch() const {
    live();
    return drops_last_;
  }
  // Samples of all ranks in one update.
  int64_t train_batch_size() const { return micro_batch_size() * gradient_accumulation_steps() * size(); }
  int64_t gradient_accumulation_steps() const { return live().options().gradient_accumulation_steps; }
  // An update without any gradient, which is an error else, counts as any other from here on. On all ranks alike.
  void count_empty_steps() { live().count_empty_steps(); }
  // Whether the next backward completes an update.
  bool is_gradient_accumulation_boundary() const { return live().is_gradient_accumulation_boundary(); }
  // The calls below do what those of engine::Engine do.
  void set_gradient_accumulation_boundary(bool boundary) { live().set_gradient_accumulation_boundary(boundary); }
  void set_gradient_accumulation_steps(int64_t steps) { live().set_gradient_accumulation_steps(steps); }
  void set_micro_batch_size(int64_t samples) { live().set_micro_batch_size(samples); }

  // ---- between a backward and its step. Collective; errors on all ranks where step() would be one (engine::Engine).
  // The norm of the gradients as they are now.
  double grad_norm() const { return trained_by("grad_norm").grad_norm(fault_of(contents_->report(live().params()))); }
  // Returns that norm; gradients are scaled so that it is `max_norm` at most.
  double clip_grad_norm(double max_norm) { return trained_by("clip_grad_norm").clip_grad_norm(max_norm, fault()); }

  // ---- what happened
  int64_t micro_steps() const { return live().micro_steps(); }
  int64_t global_steps() const { return live().global_steps(); }
  int64_t global_samples() const { return live().global_samples(); }  // of all ranks
  int64_t skipped_steps() const { return live().skipped_steps(); }
  bool was_step_applied() const { return live().was_step_applied(); }  // by the last step()
  // The norm of the last step that was not skipped, before clipping, over all parameters and ranks.
  std::optional<double> global_grad_norm() const { return live().global_grad_norm(); }
  // What the steps so far spent where (engine::Engine::phases()).
  const Phases& phases() const { return live().phases(); }

  // ---- what the engine says while it trains; its first rank says it
  // After every optimizer step, numbers go to the writers of the configuration (tensorboard, csv_monitor, tessera.json_lines) and to
  // these; warnings go to writers. `step` counts samples. An error of one is that of step(), after the update; only a file that
  // cannot be written (IoError) is warned of once, and the run goes on.
  using OnMetric = std::function<void(const std::string& name, double value, int64_t step)>;
  void on_metric(OnMetric call);
  void add_writer(std::unique_ptr<io::MetricWriter> writer);
  // Gives numbers of the program's own to all of these. Does nothing on other ranks. Local.
  void write_metrics(const std::vector<io::Metric>& metrics);
  // Among the numbers are tflops and, with the `peak` of a device, mfu: engine::Watch::count_flops(). `per_sample` in forward and
  // backward, as linear_flops(module) times the tokens of a sample; not given: as Watch::count_flops_of_step() finds it.
  void count_flops(std::optional<double> per_sample = {}, std::optional<double> peak = {}) {
    if (per_sample)
      watch_.count_flops(live(), *per_sample, peak);
    else
      watch_.count_flops_of_step(live(), peak);
  }
  // The profile of the forward that the section flops_profiler asks for, the first one of its step; null until it was taken. The
  // engine's first rank has shown it, on standard output or at the end of output_file.
  const FlopsProfiler* flops_profiler() const {
    live();
    return profiler_.get();
  }
  // For the progress line (steps_per_print) and metrics: Watch::expect().
  void expect(int64_t steps, double tokens_per_sample = 0) {
    live();
    watch_.expect(steps, tokens_per_sample);
  }
  // What the engine holds on this rank, beside the formula: std::cout << engine.memory(). Local.
  engine::MemoryUse memory() const { return watch_.memory(live()); }
  // Seconds of the last optimizer step, by phase; empty without wall_clock_breakdown.
  const std::optional<engine::Watch::Seconds>& step_seconds() const {
    live();
    return watch_.step_seconds();
  }
  // What this engine's collectives took on this rank, by operation and size: print engine::text_of(rows). State error without
  // comms_logger.enabled. Collective with `stragglers`.
  std::vector<engine::CallRow> comm_summary(bool stragglers = false) const;

  // Returns once all ranks of the engine, on every axis, have called it. Collective.
  void barrier() const;
  // ---- over the ranks that gradients are averaged over: those of other batches (rank(), size()) and of other parts of a sequence.
  // Collective.
  at::Tensor mean(const at::Tensor& value) const;
  at::Tensor sum(const at::Tensor& value) const;
  // The loss of masked tokens whose averaged gradient is that of the mean over all tokens of all ranks: comm::token_mean().
  at::Tensor token_mean(const at::Tensor& sum, const at::Tensor& count) const;

  // Masters, gradients and optimizer states, by parameter or name.
  States states() { return {live(), *module_, client_.get()}; }
  ReadStates states() const { return {live(), *module_, client_.get()}; }

  // Generators (of the CPU) that the program draws from beside torch's default ones, as a dataset does while it reads: with
  // checkpoint.random_state a save has their states, on every rank its own, and a load puts them back. In the same number and order
  // in the run that loads; value error for those of a device. Local.
  void keep_generators(std::vector<at::Generator> generators);

  // Everything else an engine can do: norms before a step, phases, memory.
  engine::Engine& core() { return live(); }
  const engine::Engine& core() const { return live(); }

  // What is wrong with the module's parameters, without an origin (nn::Contents); empty where nothing is. Local.
  std::string fault();

 protected:
  // Around the module's forward: operations are counted, and the profile is taken, where that is wanted.
  class [[nodiscard]] Forward {
   public:
    explicit Forward(Session& session);
    ~Forward();
    Forward(const Forward&) = delete;
    Forward& operator=(const Forward&) = delete;

   private:
    Session& session_;
    std::optional<FlopsProfiler::Counting> profiled_;
    std::optional<engine::Watch::Forward> counted_;
  };
  // What a forward makes of the program's own inputs, if it does.
  bool casts_inputs() const { return casts_inputs_ || casts_and_moves_; }
  at::Tensor cast_input(const at::Tensor& input) const;
  std::vector<at::Tensor> cast_input(std::vector<at::Tensor> inputs) const;
  // A tensor among the arguments of a forward.
  struct SeenInput {
    int argument, element;  // -1: no vector's
    at::ScalarType dtype;
    at::Device device;
  };
  // Adds to an error of the module's which of the forward's inputs are not what the engine has.
  void explain(c10::Error& error, const std::vector<SeenInput>& inputs) const;
  // Before a forward: what the core has noticed is said, and with tessera.update_in_backward the backward refuses what step() would.
  // Local.
  void look_before_update();
  // What the program has added to the param groups of its optimizer joins as by add_param_group(). c10::Error, with all as before,
  // where that is refused. Local.
  void follow_groups();
  // add_param_group(), also without parameters.
  int add_group(const std::vector<at::Tensor>& params, const optim::GroupOptions& options);
  // Warns, on one rank, that a forward has switched an autocast region of the caller's off.
  void warn_of_region();
  // Warns that nothing is cut along tp. (One stage of a pipeline may be so, not all.)
  void warn_of_cuts();
  bool is_cut() const;  // any parameter, along tp
  // Warns that nothing is trained. (A stage of a pipeline may be so.)
  void warn_of_frozen();
  // The scope of parameters that belong to no Hooked module.
  const ScopeHandle& rest() const { return rest_; }

 private:
  engine::Engine& live() const {
    TESSERA_CHECK(core_ != nullptr, "engine", "this object was moved from; use the one that it was moved to");
    return *core_;
  }
  std::shared_ptr<engine::Engine> owned() const {
    live();
    return core_;
  }
  // live(), which has an optimizer; usage error of that name else.
  engine::Engine& trained_by(const char* call) const;
  void prepare_optimizer(const Config& config, const Recipe& recipe, bool whole, std::vector<engine::ParamSpec>& specs,
                         engine::Options& options);
  void take_optimizer(const std::shared_ptr<torch::optim::Optimizer>& optimizer, std::vector<engine::ParamSpec>& specs,
                      engine::Options& options);
  // Adds groups with these options, and parameters to groups.
  void grow(const std::vector<optim::GroupOptions>& options, const std::vector<OwnGroups::Added>& groups);
  // client_ has what has joined the core.
  void take_joined();
  void put_rates(const std::vector<double>& rates);
  // The hyper-parameters of made_ become those of the core, or the other way round.
  void take_options();
  void give_options();
  // What the program has changed in the core's groups since these were given last holds for an optimizer of its own, too; returns what
  // that optimizer has of its own.
  std::string pass_on_options();
  void apply_schedule();
  void warn_of_betas();  // which the configuration's schedule would move, and the optimizer does not have
  engine::ClientPart client_part(const ClientValues& client) const;
  void check_contents(const char* call);
  void read_checkpoint_section(const Config& config);
  std::vector<std::vector<std::string>> trained_names() const;
  // Shows a warning, which writers get.
  void warn(const std::vector<std::string>& warnings);
  // Writers get it, whoever has shown it.
  void note(const std::vector<std::string>& warnings);
  // Calls f(), which writes. Where a file cannot be written that is warned of once, until it can be again, and is no error.
  template <class F>
  void give(io::MetricWriter& writer, const F& f);
  // What `call` returns; writers get what the core warned of meanwhile.
  template <class F>
  auto noting(const F& call) {
    const CaughtWarnings caught;
    auto result = call();
    note(caught.texts());
    return result;
  }
  void report_step();
  void show_profile();
  void warn_of_step();
  std::string fault_of(const engine::ContentsReport& report) const;
  std::map<std::string, std::vector<std::string>> aliases() const;

  std::shared_ptr<torch::nn::Module> module_;

  std::optional<parallel::Plan> plan_;
  std::vector<std::pair<at::Tensor, CutParamPtr>> cuts_;  // of torch's layers
  std::shared_ptr<engine::Engine> core_;
  std::unique_ptr<Contents> contents_;
  bool warned_of_frozen_ = false;  // that came later
  ScopeHandle rest_;
  std::vector<std::string> leaves_;               // paths of modules that run as one
  std::shared_ptr<GatheredSequences> sequences_;  // null where nothing is partitioned
  std::unique_ptr<ClientOptimizer> client_;       // in place of the core's
  std::shared_ptr<torch::optim::Optimizer>
      made_;                                 // the program's, of make_optimizer(), whose rule the core or client_ runs
  std::unique_ptr<OwnGroups> own_;           // of the program's optimizer; null: there is none
  bool evaluates_ = false;                   // there is no optimizer
  std::vector<optim::GroupOptions> groups_;  // at the start
  std::optional<optim::ScheduleOptions> schedule_;
  std::shared_ptr<Schedule> own_schedule_;  // in the place of the configuration's
  std::vector<optim::GroupOptions> given_;  // the core's groups, as they were taken or given last
  std::vector<double> base_lrs_;
  int64_t schedule_steps_ = 0;
  optim::ScheduleCursor schedule_at_;
  engine::SaveOptions save_options_;
  std::string config_text_;  // for DeepSpeed's files, which have the text
  engine::Foreign load_from_;
  bool loads_masters_ = true;
  bool keeps_random_ = false;
  bool drops_last_ = false;
  std::vector<at::Generator> generators_;  // of the program
  bool gathers_for_export_ = true;
  bool casts_inputs_ = false;     // fp16.auto_cast
  bool casts_and_moves_ = false;  // cast_forward_inputs()
  engine::Watch watch_;
  std::unique_ptr<FlopsProfiler> profiler_;
  std::vector<std::unique_ptr<io::MetricWriter>> writers_;
  std::vector<std::pair<std::string, int64_t>> warnings_;  // and after how many samples; every writer has all
  std::set<const io::MetricWriter*> failing_;              // could not write the last time
  std::list<OnMetric> calls_;                              // which move without an exception
  bool logs_ = false;
  // Until the first update: whether anything exchanges parts of the sequence, as ranks that the configuration asked for have to.
  enum class SequenceCheck : uint8_t { Off, Warning, Error };
  SequenceCheck checks_sequence_ = SequenceCheck::Off;
};

}  // namespace tessera::nn
