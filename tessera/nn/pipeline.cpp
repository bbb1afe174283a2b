#include "tessera/nn/pipeline.h"

#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <limits>
#include <type_traits>

#include "tessera/base/error.h"
#include "tessera/engine/agreement.h"
#include "tessera/nn/together.h"
#include "tessera/optim/types.h"
#include "tessera/pipeline/alike.h"
#include "tessera/pipeline/partition.h"

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

pipeline::Building building_of(const comm::Parts& parts) {
  return {parts.everyone, c10::str("stage ", parts.part, " (rank ", parts.everyone->rank(), ")")};
}

// Makes the error of a construction, in whose handler it is called, one of all ranks, and throws it. Collective, but where a
// connection broke.
[[noreturn]] void end_building(const comm::Parts& parts) {
  building_of(parts).fail(pipeline::failure_of(std::current_exception()));
  throw;
}

void check(const Config& config, const comm::Parts& parts, int chunks) {
  const int size = parts.shapes[0].size(comm::kAxes);
  for (const comm::MeshShape& shape : parts.shapes)
    TESSERA_CHECK_VALUE(shape.size(comm::kAxes) == size, "pipeline", "stages have ", size, " and ",
                        shape.size(comm::kAxes), " ranks; they must have equally many");
  pipeline::check_served(config, static_cast<int>(parts.shapes.size()));
  pipeline::check_chunks(chunks, static_cast<int>(parts.shapes.size()));
}

// Where the ranks of a stage wait for each other, the batch of an engine that failed has ended their groups. Collective.
void check_usable(const comm::Parts& parts) {
  for (const comm::Axes axes : parts.shapes[parts.part].groups()) {
    std::string ended;
    try {
      parts.mesh.group(axes)->barrier("whether the ranks of a stage can be used");
    } catch (const c10::DistBackendError& error) {
      ended = pipeline::first_line(error.what_without_backtrace());
    }
    TESSERA_CHECK(
        ended.empty(), "pipeline", "the groups of this stage's ranks have ended (", ended,
        "); where an earlier engine over the same comm::Parts has failed, a stage of several ranks needs them "
        "made anew, as nn::environment_stages() gives them");
  }
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
  comm::Parts parts;  // with messages of this pipeline's own
  std::shared_ptr<StageLayers> module;
  std::shared_ptr<pipeline::Ties> ties;
};

// Before an exchange a rank's errors are its own: all ranks agree on them first.
Pipeline::Built Pipeline::build(const Layers& layers, const Config& config, const comm::Parts& parts,
                                const PipelineOptions& options) try {
  const int stages = static_cast<int>(parts.shapes.size()), chunks = options.chunks;
  const pipeline::Building building = building_of(parts);
  check(config, parts, chunks);
  building.agree();
  check_usable(parts);
  building.agree();
  comm::Parts own = parts;
  own.p2p = pipeline::own_messages(*parts.everyone, parts.p2p);
  auto alike = pipeline::alike_of(config);
  alike.emplace_back("the number of layers", std::to_string(layers.size()));
  alike.emplace_back("chunks", std::to_string(chunks));
  pipeline::check_alike(*parts.everyone, alike);
  const std::vector<int> bounds = bounds_of(options.partition, stages * chunks, layers);
  const auto module = std::make_shared<StageLayers>(layers, bounds, stages, parts.part, options.seed);
  building.agree();
  pipeline::check_alike(*parts.everyone, {{"bounds of the parts", c10::str(c10::ArrayRef<int>(bounds))}});
  pipeline::check_ties(config, !module->ties().empty());
  return {own, module, std::make_shared<pipeline::Ties>(ranks_of(own), tied_of(*module), building)};
} catch (...) {
  end_building(parts);
}

namespace {

Recipe recipe_of(const PipelineOptions& options, const StageLayers& module) {
  Recipe recipe{.units = options.units ? options.units : units_of_layers,
                .leaf = options.leaf,
                .groups = options.groups,
                .schedule = options.schedule,
                .facts = options.facts};
  if (options.optimizer) {
    recipe.optimizer = options.optimizer(module);
    TESSERA_CHECK_VALUE(recipe.optimizer != nullptr, "pipeline", "PipelineOptions::optimizer has made none");
  }
  return recipe;
}

}  // namespace

comm::Parts environment_stages(const Config& config, int stages) {
  const auto world = comm::environment_size();
  pipeline::check_stages(world, stages);
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
      parts_(built.parts),
      options_(options),
      module_(built.module),
      schedule_(config.pipeline.schedule),
      writes_deepspeed_(config.checkpoint.format == config::CheckpointFormat::DeepSpeed),
      recompute_interval_(config.pipeline.activation_checkpoint_interval),
      recompute_options_(recompute_options(config, parts.mesh)) {
  connect(built.ties);
} catch (...) {
  end_building(parts);
}

// A batch of this stage, as the interpreter sees it.
class Pipeline::Batch final : public pipeline::EngineStage<engine::Engine> {
 public:
  explicit Batch(Pipeline& pipeline, BatchSource data = {})
      : EngineStage(pipeline.core()), pipeline_(pipeline), data_(std::move(data)) {}

  Made forward(int chunk, int micro, pipeline::Message inputs) override {
    const pipeline::Shape shape{pipeline_.stages(), 1, pipeline_.options_.chunks};
    const bool first = shape.is_first(pipeline_.stage(), chunk), last = shape.is_last(pipeline_.stage(), chunk);
    const Tensors& given = first ? batches_[micro].inputs : inputs.tensors;
    Tensors made = pipeline_.forward(chunk, first && pipeline_.casts_inputs() ? pipeline_.cast_input(given) : given);
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
  int64_t read(int64_t wanted) override {
    if (!pipeline_.is_first_stage() && !pipeline_.is_last_stage()) return -1;
    TESSERA_CHECK_VALUE(data_, "pipeline", pipeline_.runner_->ranks().name(), " reads data and has none");
    for (int64_t micro = 0; micro < wanted; ++micro)
      batches_.push_back(data_(micro));
    return wanted;
  }
  void end_of_data() override { TESSERA_ASSERT(false, "a source of batches has no end"); }
  void step(const std::vector<int>& copies) override { step_together(pipeline_, pipeline_.parts_, copies); }
  void forget_gradients() override { engine_.zero_grad(); }

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
  const BatchSource data_;
  std::vector<MicroBatch> batches_;  // on the first and the last stage
};

void Pipeline::connect(std::shared_ptr<pipeline::Ties> ties) {
  std::vector<comm::GroupPtr> beside;
  for (const comm::Axes axes : parts_.shapes[stage()].groups())
    beside.push_back(parts_.mesh.group(axes));
  runner_ = std::make_unique<pipeline::Runner>(ranks_of(parts_), std::move(ties), options_.chunks, device(), beside);
  Batch none(*this);
  building_of(parts_).agree();
  pipeline::check_optimizers(runner_->ranks(), optimizer_form());
  pipeline::check_groups_take(runner_->ranks(), taken());
  if (parts_.mesh.size(comm::Axis::Tp) > 1) {
    const auto rows = runner_->ranks().rows({is_cut() ? 1.0 : 0.0}, "whether layers are cut along tp");
    if (std::ranges::none_of(rows, [](const auto& row) { return row[0] != 0; })) warn_of_cuts();
  }
  runner_->ties().attach(none);
  if (parts_.everyone->size() > 1) core().checkpoints().span(parts_.everyone, runner_->ties().copies(none));
}

// Describes an optimizer by what all stages must have alike: its hyper-parameters by group, and the description of a client's class.
pipeline::OptimizerForm Pipeline::optimizer_form() {
  const engine::Options& options = core().options();
  const bool is_own = options.rule == optim::Rule::External;
  pipeline::OptimizerForm form{is_own ? options.client_optimizer : optim::type_of(options.rule).name, {}};
  for (const optim::GroupOptions& group : core().groups()) {
    auto& values = form.groups.emplace_back();
    engine::each_field(group, [&]<class T>(const char* name, T value) {
      values.emplace_back(name, std::is_same_v<T, bool> ? (value ? "true" : "false") : engine::text_of(value));
    });
  }
  return form;
}

// Counts, for each group of the options, the parameters of this stage that it has, trained or frozen.
std::vector<int64_t> Pipeline::taken() {
  std::vector<int64_t> taken(options_.groups.size() + 1);
  const size_t of_each = core().groups().size() / taken.size();  // two with Muon
  for (const zero::ParamSpec& param : core().params())
    if (const int group = std::max(param.group, param.joins); group >= 0) ++taken[group / of_each];
  taken.pop_back();  // of parameters that no group takes
  return taken;
}

// ---------------------------------------------------------------- batches

double Pipeline::train_batch(const BatchSource& data) {
  const auto micro_batches = static_cast<int>(core().options().gradient_accumulation_steps);
  const pipeline::Shape shape{stages(), micro_batches, options_.chunks};
  Batch batch(*this, data);
  running().check("train_batch");
  follow_groups();
  module_->train();
  return runner_->train_batch(batch, pipeline::training(schedule_, shape, stage()), shape)
      .value_or(std::numeric_limits<double>::quiet_NaN());
}

namespace {

// While an object lives all parts of a module evaluate; then each part does what it did before.
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
  pipeline::Runner& runner = running();
  if (micro_batches <= 0) micro_batches = core().options().gradient_accumulation_steps;
  const pipeline::Shape shape{stages(), static_cast<int>(micro_batches), options_.chunks};
  Batch batch(*this, data);
  runner.check("eval_batch");
  const EvalMode evaluates(*module_);
  const at::NoGradGuard no_grad;
  const auto loss = runner_->eval_batch(batch, pipeline::forward_only(shape, stage()), shape);
  return {loss.value_or(std::numeric_limits<double>::quiet_NaN()), std::move(batch.outputs)};
}

std::string Pipeline::save_checkpoint(const std::string& dir, std::optional<engine::SaveOptions> options,
                                      const ClientValues& client) {
  running().check("save_checkpoint");
  if (writes_deepspeed_ || (options && options->deepspeed))
    pipeline::check_one_stage(R"(save_checkpoint with checkpoint.format "deepspeed")", stages());
  return Session::save_checkpoint(dir, std::move(options), client);
}

Loaded Pipeline::load_checkpoint(const std::string& dir, const std::string& tag,
                                 const engine::Restore::Options& options) {
  running().check("load_checkpoint");
  return Session::load_checkpoint(dir, tag, options);
}

bool Pipeline::save_16bit_model(const std::string& dir, const std::string& name,
                                const Session::ExportOptions& options) {
  running().check("save_16bit_model");
  pipeline::check_one_stage("save_16bit_model", stages());
  return Session::save_16bit_model(dir, name, options);
}

int Pipeline::add_param_group(const std::vector<at::Tensor>& params, const optim::GroupOptions& options) {
  const auto call = core().enter("add_param_group");
  return Session::add_group(params, options);
}

Tensors Pipeline::forward(int chunk, const Tensors& inputs) {
  if (core().pre_forward()) warn_of_region();
  const Forward watched(*this);
  Tensors made;
  try {
    made = module_->run(chunk, inputs, recompute_interval_, recompute_options_, options_.checkpointable_layers);
  } catch (...) {
    core().abort_forward();
    throw;
  }
  core().post_forward(made);
  return made;
}

}  // namespace tessera::nn
