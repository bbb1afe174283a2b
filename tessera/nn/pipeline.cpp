#include "tessera/nn/pipeline.h"

#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/config/resolve.h"
#include "tessera/nn/together.h"

namespace tessera::nn {
namespace {

pipeline::Ranks ranks_of(const comm::Parts& parts) {
  const int stages = static_cast<int>(parts.shapes.size()), size = parts.shapes[0].size(comm::kAxes);
  pipeline::Ranks ranks{stages, size, parts.everyone->rank(), parts.everyone};
  ranks.forwards = ranks.backwards = parts.p2p;
  for (int stage = 0; stage < stages; ++stage)
    ranks.peers.push_back(parts.rank_of(stage, parts.place()));
  return ranks;
}

struct Named {
  std::string name;
  double value;
};

// What all ranks must agree on.
void check_alike(const comm::Parts& parts, const std::vector<Named>& values) {
  std::vector<double> own;
  for (const Named& each : values)
    own.push_back(each.value);
  const auto rows = pipeline::rows_of(*parts.everyone, own, "what stages must have alike");
  for (size_t rank = 0; rank < rows.size(); ++rank)
    for (size_t i = 0; i < own.size(); ++i)
      TESSERA_CHECK_VALUE(rows[rank][i] == own[i], "pipeline", values[i].name, " is ", own[i], " on rank ",
                          parts.everyone->rank(), " and ", rows[rank][i], " on rank ", rank);
}

// In a handler of the construction, whose error it throws: one of all ranks. Collective, but where a connection broke.
[[noreturn]] void end_building(const comm::Parts& parts) {
  const pipeline::Failure failure = pipeline::failure_of(std::current_exception());
  const std::string text = c10::str("[pipeline] stage ", parts.part, " (rank ", parts.everyone->rank(),
                                    ") failed while it was built: ", failure.text);
  try {
    if (failure.lost) {
      parts.everyone->abort(text);  // this rank has no exchange any more
    } else if (!failure.announced) {
      pipeline::agree(*parts.everyone, text);
    }
  } catch (const c10::DistBackendError&) {
    // Others are lost: this rank's own error says more.
  }
  throw;
}

void check(const Config& config, const comm::Parts& parts, int chunks) {
  const int size = parts.shapes[0].size(comm::kAxes);
  for (const comm::MeshShape& shape : parts.shapes)
    TESSERA_CHECK_VALUE(shape.size(comm::kAxes) == size, "pipeline", "stages have ", size, " and ",
                        shape.size(comm::kAxes), " ranks; they must have equally many");
  TESSERA_CHECK_BUILT(parts.shapes.size() == 1 || !config::placements(config).shards_params(), "pipeline",
                      "zero_optimization.stage 3 is not served inside pipeline stages: every micro-batch would gather "
                      "the stage's parameters again; use stage 1 or 2, and more pipeline stages");
  TESSERA_CHECK_VALUE(config.managed_gradient_accumulation, "pipeline",
                      "managed_gradient_accumulation must be true: train_batch() counts its micro-batches");
  TESSERA_CHECK_VALUE(chunks >= 1 && (chunks == 1 || parts.shapes.size() > 1), "pipeline", "chunks ", chunks, " with ",
                      parts.shapes.size(), " stages; it needs 2 stages");
}

std::vector<pipeline::Tied> tied_of(const StageLayers& module) {
  std::vector<pipeline::Tied> tied;
  for (const auto& [key, stages] : module.ties()) {
    pipeline::Tied each{key, stages};
    for (const auto& param : module.named_parameters())
      if (param.key().starts_with(pipeline::tied_prefix(key))) each.params.emplace_back(param.key(), param.value());
    tied.push_back(std::move(each));
  }
  return tied;
}

}  // namespace

struct Pipeline::Built {
  std::shared_ptr<StageLayers> module;
  std::shared_ptr<pipeline::Ties> ties;
};

// Up to an exchange a rank's errors are its own: all ranks agree on them before it.
Pipeline::Built Pipeline::build(const Layers& layers, const Config& config, const comm::Parts& parts,
                                const PipelineOptions& options) try {
  const int stages = static_cast<int>(parts.shapes.size()), chunks = options.chunks;
  check(config, parts, chunks);
  pipeline::agree(*parts.everyone, "");
  const auto& names = pipeline::schedules();
  const auto schedule = std::find(names.begin(), names.end(), config.pipeline.schedule) - names.begin();
  check_alike(
      parts,
      {{"the number of layers", static_cast<double>(layers.size())},
       {"chunks", static_cast<double>(chunks)},
       {"gradient_accumulation_steps", static_cast<double>(config.gradient_accumulation_steps.value_or(0))},
       {"train_batch_size", static_cast<double>(config.train_batch_size.value_or(0))},
       {"train_micro_batch_size_per_gpu", static_cast<double>(config.train_micro_batch_size_per_gpu.value_or(0))},
       {"the number of pipeline.schedule", static_cast<double>(schedule)},
       {"gradient_clipping", config.gradient_clipping}});
  const std::vector<int> bounds = bounds_of(options.partition, stages * chunks, layers);
  const auto module = std::make_shared<StageLayers>(layers, bounds, stages, parts.part, options.seed);
  pipeline::agree(*parts.everyone, "");
  std::vector<Named> same;
  for (const int bound : bounds)
    same.push_back({"a boundary of the parts", static_cast<double>(bound)});
  check_alike(parts, same);
  const bool low = config.bf16.bf16_master_weights_and_grads || config.bf16.bf16_optimizer_states;
  TESSERA_CHECK_BUILT(
      module->ties().empty() || !low || config.tessera.rounding == "nearest", "pipeline",
      "tied weights on several stages do not stay equal where updates round at random: set \"tessera\": "
      "{\"rounding\": \"nearest\"}, or leave bf16_master_weights_and_grads and bf16_optimizer_states");
  const std::vector<pipeline::Tied> tied = tied_of(*module);
  pipeline::agree(*parts.everyone, "");
  return {module, std::make_shared<pipeline::Ties>(ranks_of(parts), tied)};
} catch (...) {
  end_building(parts);
}

namespace {

Recipe recipe_of(const PipelineOptions& options, const StageLayers& module) {
  Recipe recipe{
      .units = options.units ? options.units : units_of_layers, .groups = options.groups, .schedule = options.schedule};
  if (options.optimizer) {
    recipe.optimizer = options.optimizer(module);
    TESSERA_CHECK_VALUE(recipe.optimizer != nullptr, "pipeline", "PipelineOptions::optimizer has made none");
  }
  return recipe;
}

}  // namespace

comm::Parts environment_stages(const Config& config, int stages) {
  const auto world = comm::environment_size();
  TESSERA_CHECK_VALUE(stages >= 1 && world % stages == 0, "pipeline", world, " ranks cannot be ", stages,
                      " stages of equal size");
  const auto shape = comm::mesh_shape(world / stages, static_cast<int>(config.zero_optimization.mics_shard_size),
                                      static_cast<int>(config.sequence_parallel_size),
                                      static_cast<int>(std::max<int64_t>(1, config.tensor_parallel.autotp_size)));
  return comm::environment_parts(std::vector(stages, shape));
}

Pipeline::Pipeline(const Layers& layers, const Config& config, const comm::Parts& parts, const PipelineOptions& options)
    : Pipeline(config, parts, options, build(layers, config, parts, options)) {}

Pipeline::Pipeline(const Config& config, const comm::Parts& parts, const PipelineOptions& options,
                   const Built& built) try
    : Session(built.module, config, parts.mesh, nullptr, recipe_of(options, *built.module),
              parts.part == 0 ? Part::First : Part::Other),
      parts_(parts),
      options_(options),
      module_(built.module),
      schedule_(config.pipeline.schedule),
      recompute_interval_(config.pipeline.activation_checkpoint_interval),
      recompute_options_(recompute_options(config, parts.mesh)) {
  connect(built.ties);
} catch (...) {
  end_building(parts);
}

// A batch of this stage, as the interpreter sees it.
class Pipeline::Batch final : public pipeline::EngineStage<engine::Engine> {
 public:
  // `batches`: of every micro-batch, on the first and the last stage.
  explicit Batch(Pipeline& pipeline, std::vector<MicroBatch> batches = {})
      : EngineStage(pipeline.core()), pipeline_(pipeline), batches_(std::move(batches)) {}

  Made forward(int chunk, int micro, pipeline::Message inputs) override {
    const pipeline::Shape shape{pipeline_.stages(), 1, pipeline_.options_.chunks};
    const bool first = shape.is_first(pipeline_.stage(), chunk), last = shape.is_last(pipeline_.stage(), chunk);
    Tensors made = pipeline_.forward(chunk, first ? batches_[micro].inputs : inputs.tensors);
    if (!last) return {{std::move(made)}};
    const bool trains = at::GradMode::is_enabled();
    if (!trains) outputs.push_back(made);
    const bool is_loss = made.size() == 1 && made[0].defined() && made[0].numel() == 1;
    if (!trains && !pipeline_.options_.loss && !is_loss) return {};
    return {{}, loss_of(made, micro)};
  }
  void backward(const at::Tensor& loss) override { engine_.backward(loss); }
  void backward(const Tensors& outputs, const Tensors& gradients) override {
    torch::autograd::backward(outputs, gradients);
  }
  void count_micro_batch() override { engine_.step(); }
  void join() override { engine_.join(); }

  std::vector<Tensors> outputs;  // of the last layer, by micro-batch, of an evaluation

 private:
  at::Tensor loss_of(const Tensors& made, int micro) const {
    const auto& loss_fn = pipeline_.options_.loss;
    TESSERA_CHECK_VALUE(loss_fn || made.size() == 1, "pipeline",
                        "without a loss function the last layer returns the loss; it returned ", made.size(),
                        " tensors");
    at::Tensor loss = loss_fn ? loss_fn(made, batches_[micro].labels) : made[0];
    TESSERA_CHECK_VALUE(loss.defined() && loss.numel() == 1, "pipeline", "the loss must be a tensor of one element, ",
                        loss_fn ? "the loss function" : "the last layer", " returned ",
                        loss.defined() ? "sizes " : "none", loss.defined() ? loss.sizes() : at::IntArrayRef());
    return loss;
  }

  Pipeline& pipeline_;
  const std::vector<MicroBatch> batches_;
};

void Pipeline::connect(std::shared_ptr<pipeline::Ties> ties) {
  std::vector<comm::GroupPtr> beside;
  for (const comm::Axes axes : parts_.shapes[stage()].groups())
    beside.push_back(parts_.mesh.group(axes));
  runner_ = std::make_unique<pipeline::Runner>(ranks_of(parts_), std::move(ties), options_.chunks, device(), beside);
  Batch none(*this);
  pipeline::agree(*parts_.everyone, "");
  runner_->ties().attach(none);
  if (parts_.everyone->size() > 1) core().checkpoints().span(parts_.everyone, runner_->ties().copies(none));
}

// ---------------------------------------------------------------- batches

double Pipeline::train_batch(const BatchSource& data) {
  const auto micro_batches = static_cast<int>(core().options().gradient_accumulation_steps);
  const pipeline::Shape shape{stages(), micro_batches, options_.chunks};
  const pipeline::Table table = pipeline::training(schedule_, shape, stage());
  pipeline::Ties& ties = runner_->ties();
  return runner_->in_call("train_batch", Batch(*this), [&] {
    Batch none(*this);
    ties.follow(none);
    Batch batch(*this, read(data, micro_batches));
    module_->train();
    const auto loss = runner_->run(batch, table, shape, /*trains=*/true).loss;
    if (loss) core().set_loss(*loss);
    try {
      ties.sum_gradients(batch);
      step_together(*this, parts_, ties.copies(batch));
    } catch (...) {
      core().zero_grad();  // the next batch is not added to this one
      throw;
    }
    return loss.value_or(std::numeric_limits<double>::quiet_NaN());
  });
}

namespace {

// While it lives all parts of a module evaluate; then each does what it did before.
class EvalMode {
 public:
  explicit EvalMode(torch::nn::Module& module)
      : module_(module), training_(module.is_training()), parts_(module.modules(/*include_self=*/false)) {
    for (const auto& part : parts_)
      trained_.push_back(part->is_training());
    module.eval();
  }
  ~EvalMode() {
    module_.train(training_);
    for (size_t i = 0; i < parts_.size(); ++i)  // train() goes on to what is inside, which comes later
      parts_[i]->train(trained_[i]);
  }
  EvalMode(const EvalMode&) = delete;
  EvalMode& operator=(const EvalMode&) = delete;

 private:
  torch::nn::Module& module_;
  bool training_;
  std::vector<std::shared_ptr<torch::nn::Module>> parts_;
  std::vector<bool> trained_;
};

}  // namespace

Evaluation Pipeline::eval_batch(const BatchSource& data, int64_t micro_batches) {
  if (micro_batches <= 0) micro_batches = core().options().gradient_accumulation_steps;
  const pipeline::Shape shape{stages(), static_cast<int>(micro_batches), options_.chunks};
  return runner_->in_call("eval_batch", Batch(*this), [&] {
    Batch batch(*this, read(data, micro_batches));
    const EvalMode evaluates(*module_);
    const at::NoGradGuard no_grad;
    const auto result = runner_->run(batch, pipeline::forward_only(shape, stage()), shape, /*trains=*/false);
    return Evaluation{result.loss.value_or(std::numeric_limits<double>::quiet_NaN()), std::move(batch.outputs)};
  });
}

// The micro-batches where they are needed, once all ranks have theirs.
std::vector<MicroBatch> Pipeline::read(const BatchSource& data, int64_t micro_batches) {
  std::vector<MicroBatch> batches;
  std::exception_ptr problem;
  try {
    TESSERA_CHECK_VALUE(data || !(is_first_stage() || is_last_stage()), "pipeline", runner_->ranks().name(),
                        " reads data and has none");
    for (int64_t micro = 0; micro < micro_batches && (is_first_stage() || is_last_stage()); ++micro)
      batches.push_back(data(micro));
  } catch (...) {
    problem = std::current_exception();
  }
  const pipeline::Ranks& ranks = runner_->ranks();
  const auto rows = ranks.rows({static_cast<double>(micro_batches), problem ? 1.0 : 0.0}, "the data of a batch");
  if (std::ranges::any_of(rows, [](const auto& row) { return row[1] != 0; })) {
    std::string text;
    if (problem)
      text = c10::str("[pipeline] ", ranks.name(), " could not read its data: ", pipeline::failure_of(problem).text);
    pipeline::agree(*ranks.everyone, text, ranks.device);
    std::rethrow_exception(problem);
  }
  for (int rank = 0; rank < static_cast<int>(rows.size()); ++rank)
    TESSERA_CHECK(static_cast<int64_t>(rows[rank][0]) == micro_batches, "pipeline", ranks.name(rank), " has ",
                  rows[rank][0], " micro-batches for this batch, ", ranks.name(), " has ", micro_batches,
                  "; they must be the same on all stages");
  return batches;
}

Tensors Pipeline::forward(int chunk, const Tensors& inputs) {
  if (core().pre_forward()) warn_of_region();
  Tensors made;
  try {
    made = module_->run(chunk, inputs, recompute_interval_, recompute_options_);
  } catch (...) {
    core().abort_forward();
    throw;
  }
  core().post_forward(made);
  return made;
}

}  // namespace tessera::nn
