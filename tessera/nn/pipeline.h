// A pipeline: a list of layers cut into stages, each of which is an engine over its ranks, and the batches that they train
// together. The schedules, names in checkpoints and results are those of Python's tessera.pipeline (docs/pipeline_cpp.md).
//
//   const auto parts = tessera::nn::environment_stages(config, 2);  // half of the ranks each
//   tessera::nn::Pipeline engine(layers, config, parts, {.loss = &loss_of});
//   const double loss = engine.train_batch([&](int64_t micro) { return batch_of(step, micro); });
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/parts.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/session.h"
#include "tessera/pipeline/alike.h"
#include "tessera/pipeline/runner.h"
#include "tessera/pipeline/schedule.h"

namespace tessera::nn {

// The ranks of the environment as `stages` runs of neighbours, each on the axes that the configuration asks for. Collective.
comm::Parts environment_stages(const Config& config, int stages);

// The first stage uses the inputs, the last one the labels; others need neither.
struct MicroBatch {
  Tensors inputs, labels;
};
// Micro-batch `micro` of this rank's batch, from 0. Called on the first and the last stage, for all of them before anything is
// computed.
using BatchSource = std::function<MicroBatch(int64_t micro)>;

struct PipelineOptions {
  // Makes a tensor of one element from what the last layer returned and the labels. None: the last layer returns the loss.
  std::function<at::Tensor(const Tensors& outputs, const Tensors& labels)> loss = {};
  std::string partition = "parameters";  // see bounds_of()
  int chunks = 1;                        // parts of the model on each stage, for the interleaved schedule
  std::optional<uint64_t> seed = {};     // see StageLayers: the same weights for any number of stages
  std::vector<ParamGroup> groups =
      {};  // as Recipe has them, by the names of the whole list; a stage may have none of one
  std::shared_ptr<Schedule> schedule = nullptr;
  // An optimizer of one's own over the parameters of this stage, which may have none: Recipe::optimizer. Then `groups` is empty.
  std::function<std::shared_ptr<torch::optim::Optimizer>(const StageLayers& stage)> optimizer = {};
  UnitPolicy units = {};            // empty: a layer of the list is a unit
  LeafRule leaf = {};               // as Recipe has it
  parallel::ModelFacts facts = {};  // as Recipe has them, by the names of the whole list
  // With pipeline.activation_checkpoint_interval: classes of layers (Layer::name) that may be computed again; none: see StageLayers::run().
  std::optional<std::vector<std::string>> checkpointable_layers = {};
};

struct Evaluation {
  double loss = 0;               // NaN where there is no loss function and the last layer returns none
  std::vector<Tensors> outputs;  // of the last layer, by micro-batch; on the last stage
};

// All calls are collective over all ranks of all stages. An error of one rank in a batch ends the batch on all: there it is
// thrown as it is, elsewhere as pipeline::StageFailed, a DistBackendError, with its text; after that the engine is refused
// (UsageError).
class Pipeline : private Session {
 public:
  // Value error for a configuration, or groups with hyper-parameters, that are not the same on all ranks, a group that takes nothing
  // on any stage, a schedule that cannot do it, and tied layers of two stages that have other parameters; not-implemented error for
  // stage 3, weights of two stages that are not Layers::tied(), and tied ones where updates round at random.
  // What fails on one rank is pipeline::StageFailed on the others.
  Pipeline(const Layers& layers, const Config& config, const comm::Parts& parts, const PipelineOptions& options);

  // One optimizer step: gradient_accumulation_steps micro-batches forward and backward, one norm of all stages that clips, and
  // one decision to skip. Returns the mean loss of all micro-batches and data-parallel ranks, on every rank.
  double train_batch(const BatchSource& data);
  // The mean loss of so many micro-batches (0: as many as a training batch has), in eval mode and without gradients.
  Evaluation eval_batch(const BatchSource& data, int64_t micro_batches = 0);
  // Whether train_batch() has updated the weights, the last time.
  bool was_step_applied() const { return core().was_step_applied(); }

  int stage() const {
    core();
    return parts_.part;
  }
  int stages() const {
    core();
    return static_cast<int>(parts_.shapes.size());
  }
  bool is_first_stage() const { return stage() == 0; }
  bool is_last_stage() const { return stage() == stages() - 1; }
  // The most micro-batches (times chunks) whose activations this stage has held.
  int max_live_activations() const { return running().most_live(); }
  StageLayers& module() {
    core();
    return *module_;
  }

  // One folder for all stages, with the names of the whole list: it loads with any number of stages and chunks, also in Python.
  // UsageError after a batch that has failed, as of the others. Not-implemented error for DeepSpeed's files of several stages.
  std::string save_checkpoint(const std::string& dir, std::optional<engine::SaveOptions> options = {},
                              const ClientValues& client = {});
  [[nodiscard]] Loaded load_checkpoint(const std::string& dir, const std::string& tag = "",
                                       const engine::Restore::Options& options = {});
  using Session::wait_for_checkpoint;
  // Not-implemented error over several stages, none of which has the whole model.
  [[nodiscard]] bool save_16bit_model(const std::string& dir, const std::string& name = "pytorch_model.bin",
                                      const Session::ExportOptions& options = {});
  // A stage that adds nothing passes no parameters, since a group has one number on all stages; the options are the same on all.
  // Returns the number. Errors as of Session's. Local.
  int add_param_group(const std::vector<at::Tensor>& params, const optim::GroupOptions& options);
  // Of the next batches, on all stages alike.
  using Session::gradient_accumulation_steps;
  using Session::micro_batch_size;
  using Session::set_gradient_accumulation_steps;
  using Session::set_micro_batch_size;
  // The first rank of the first stage says these, with the loss and the norm of all stages.
  using Session::add_writer;
  using Session::cast_forward_inputs;
  using Session::cast_inputs;
  using Session::count_flops;
  using Session::dtype;
  using Session::expect;
  using Session::flops_profiler;  // of a forward of this stage; it shows the first stage's
  using Session::on_metric;
  using Session::train_batch_size;
  using Session::write_metrics;
  // The members below concern this stage alone.
  using Session::comm_summary;
  using Session::core;
  using Session::destroy;
  using Session::device;
  using Session::drops_last_batch;
  using Session::finish_update;
  using Session::global_grad_norm;
  using Session::global_samples;
  using Session::global_steps;
  using Session::groups;
  using Session::keep_generators;
  using Session::load_module_state_dict;
  using Session::loss_scale;
  using Session::lr;
  using Session::mean;
  using Session::memory;
  using Session::mesh;
  using Session::micro_steps;
  using Session::module_state_dict;
  using Session::offload_plan;
  using Session::offload_states;
  using Session::parallel_plan;
  using Session::phases;
  using Session::rank;
  using Session::reload_states;
  using Session::size;
  using Session::skipped_steps;
  using Session::states;
  using Session::states_are_away;
  using Session::states_away;
  using Session::step_seconds;
  using Session::sum;
  using Session::token_mean;  // on the last stage also in the loss function

 private:
  class Batch;  // a batch of this stage

  struct Built;  // the layers of this stage, and the weights that it shares with other stages
  static Built build(const Layers& layers, const Config& config, const comm::Parts& parts,
                     const PipelineOptions& options);
  Pipeline(const Config& config, const comm::Parts& parts, const PipelineOptions& options, const Built& built);
  void connect(std::shared_ptr<pipeline::Ties> ties);
  // Usage error of an object that was moved from.
  pipeline::Runner& running() const {
    core();
    return *runner_;
  }
  pipeline::OptimizerForm optimizer_form();
  std::vector<int64_t> taken();
  Tensors forward(int chunk, const Tensors& inputs);

  comm::Parts parts_;
  PipelineOptions options_;
  std::shared_ptr<StageLayers> module_;
  std::string schedule_;
  bool writes_deepspeed_;
  int64_t recompute_interval_;
  RecomputeOptions recompute_options_;
  std::unique_ptr<pipeline::Runner> runner_;
};

}  // namespace tessera::nn
