#include "tessera/nn/pipeline.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/config/resolve.h"
#include "tessera/nn/pipeline_run.h"
#include "tessera/nn/together.h"

namespace tessera::nn {
namespace {

std::string own_name(const comm::Parts& parts) {
  return stage_name(parts, parts.everyone->rank());
}

std::string text_of(const std::exception& error) {
  const auto* known = dynamic_cast<const c10::Error*>(&error);
  return known != nullptr ? known->what_without_backtrace() : error.what();
}

struct Named {
  std::string name;
  double value;
};

// What every rank must have been told the same.
void check_alike(const comm::Parts& parts, const std::vector<Named>& values) {
  std::vector<double> own;
  for (const Named& each : values)
    own.push_back(each.value);
  const auto rows = rows_of(parts, own, "what stages must have alike");
  for (size_t rank = 0; rank < rows.size(); ++rank)
    for (size_t i = 0; i < own.size(); ++i)
      TESSERA_CHECK_VALUE(rows[rank][i] == own[i], "pipeline", values[i].name, " is ", own[i], " on rank ",
                          parts.everyone->rank(), " and ", rows[rank][i], " on rank ", rank);
}

void check(const Config& config, const comm::Parts& parts) {
  const int size = parts.shapes[0].size(comm::kAxes);
  for (const comm::MeshShape& shape : parts.shapes)
    TESSERA_CHECK_VALUE(shape.size(comm::kAxes) == size, "pipeline", "stages have ", size, " and ",
                        shape.size(comm::kAxes), " ranks; they must have equally many");
  TESSERA_CHECK_BUILT(parts.shapes.size() == 1 || !config::placements(config).shards_params(), "pipeline",
                      "zero_optimization.stage 3 is not served inside pipeline stages: every micro-batch would gather "
                      "the stage's parameters again; use stage 1 or 2, and more pipeline stages");
  TESSERA_CHECK_VALUE(config.managed_gradient_accumulation, "pipeline",
                      "managed_gradient_accumulation must be true: train_batch() counts its micro-batches");
}

std::shared_ptr<StageLayers> build(const Layers& layers, const Config& config, const comm::Parts& parts,
                                   const PipelineOptions& options) {
  check(config, parts);
  const int stages = static_cast<int>(parts.shapes.size()), chunks = options.chunks;
  TESSERA_CHECK_VALUE(chunks >= 1 && (chunks == 1 || stages > 1), "pipeline", "chunks ", chunks, " with ", stages,
                      " stages; it needs 2 stages");
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
  // Layers are of this rank's program: what goes wrong in one of them, the others hear of.
  std::shared_ptr<StageLayers> module;
  std::vector<int> bounds;
  std::exception_ptr problem;
  try {
    bounds = bounds_of(options.partition, stages * chunks, layers);
    module = std::make_shared<StageLayers>(layers, bounds, stages, parts.part, options.seed);
  } catch (...) {
    problem = std::current_exception();
  }
  const auto rows = rows_of(parts, {problem ? 1.0 : 0.0}, "whether layers are built");
  if (problem) std::rethrow_exception(problem);
  for (int rank = 0; rank < static_cast<int>(rows.size()); ++rank)
    TESSERA_CHECK(rows[rank][0] == 0, "pipeline", stage_name(parts, rank),
                  " could not build its layers; see its error");
  std::vector<Named> same;
  for (const int bound : bounds)
    same.push_back({"a boundary of the parts", static_cast<double>(bound)});
  check_alike(parts, same);
  const bool low = config.bf16.bf16_master_weights_and_grads || config.bf16.bf16_optimizer_states;
  TESSERA_CHECK_BUILT(
      module->ties().empty() || !low || config.tessera.rounding == "nearest", "pipeline",
      "tied weights on several stages do not stay equal where updates round at random: set \"tessera\": "
      "{\"rounding\": \"nearest\"}, or leave bf16_master_weights_and_grads and bf16_optimizer_states");
  return module;
}

// Stages are built each for themselves: an error of one is one of all. Collective.
void tell_built(const comm::Parts& parts, bool built) {
  const auto rows = rows_of(parts, {built ? 0.0 : 1.0}, "whether engines are built");
  for (int rank = 0; rank < static_cast<int>(rows.size()) && built; ++rank)
    TESSERA_CHECK(rows[rank][0] == 0, "pipeline", stage_name(parts, rank),
                  " could not build its engine; see its error");
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
                   std::shared_ptr<StageLayers> module)
    : Pipeline(config, parts, options, module, Ties(parts, *module)) {}

Pipeline::Pipeline(const Config& config, const comm::Parts& parts, const PipelineOptions& options,
                   std::shared_ptr<StageLayers> module, Ties ties, bool told) try
    : Session(module, config, parts.mesh, nullptr, units_of_layers, parts.part == 0),
      parts_(parts),
      options_(options),
      module_(std::move(module)),
      schedule_(config.pipeline.schedule),
      recompute_interval_(config.pipeline.activation_checkpoint_interval),
      ties_(std::move(ties)) {
  told = true;
  tell_built(parts, true);
  connect();
} catch (const c10::DistBackendError&) {
  throw;
} catch (const std::exception&) {
  if (!told) tell_built(parts, false);
  throw;
}

// Wires by the boundary between two parts of the model: one tag for the way there, one for the way back.
void Pipeline::connect() {
  const pipeline::Shape shape{stages(), 1, options_.chunks};
  const at::Device device = core().params().empty() ? at::Device(at::kCPU) : core().params().front().tensor.device();
  const auto wire = [&](int chunk, bool ahead, bool gradients) -> std::unique_ptr<pipeline::Wire> {
    if (ahead ? shape.is_last(stage(), chunk) : shape.is_first(stage(), chunk)) return nullptr;
    const int peer = parts_.rank_of((stage() + (ahead ? 1 : stages() - 1)) % stages(), parts_.place());
    const int boundary = shape.part(stage(), chunk) - (ahead ? 0 : 1);
    return std::make_unique<pipeline::Wire>(parts_.p2p, pipeline::Peer{peer, stage_name(parts_, peer)},
                                            2 * boundary + (gradients ? 1 : 0), device,
                                            gradients ? "gradients" : "activations");
  };
  for (int chunk = 0; chunk < options_.chunks; ++chunk) {
    wires_.activations_in.push_back(wire(chunk, false, false));
    wires_.activations_out.push_back(wire(chunk, true, false));
    wires_.gradients_in.push_back(wire(chunk, true, true));
    wires_.gradients_out.push_back(wire(chunk, false, true));
  }
  ties_.attach(core());
  if (parts_.everyone->size() > 1) core().checkpoints().span(parts_.everyone, ties_.copies());
}

std::vector<pipeline::Wire*> Pipeline::Wires::outgoing() const {
  std::vector<pipeline::Wire*> wires;
  for (const auto* kind : {&activations_out, &gradients_out})
    for (const auto& wire : *kind)
      if (wire) wires.push_back(wire.get());
  return wires;
}

// ---------------------------------------------------------------- failures

void Pipeline::check_usable(const char* call) const {
  TESSERA_CHECK(broken_.empty(), "engine", call, ": a batch has failed before (", broken_,
                "): stages are not at the same place any more; build a new engine and load a checkpoint");
}

template <class F>
auto Pipeline::in_batch(const F& body) {
  under_way_ = true;
  try {
    return body();
  } catch (const c10::DistBackendError& error) {
    fail(text_of(error));
    throw;
  } catch (const std::exception& error) {
    // Later all stages are at the same place.
    if (under_way_) fail(c10::str("[pipeline] ", own_name(parts_), " failed in this batch: ", text_of(error)));
    throw;
  }
}

// Tells everybody who may wait for this rank, now or later.
void Pipeline::fail(const std::string& text) {
  broken_ = text.substr(0, text.find('\n'));
  auto wires = wires_.outgoing();
  for (pipeline::Wire* wire : ties_.outgoing())
    wires.push_back(wire);
  for (pipeline::Wire* wire : wires) {
    try {
      wire->send_failure(text);
    } catch (const c10::DistBackendError&) {
      // It is lost: nobody waits there.
    }
  }
  parts_.everyone->abort(text);
  for (const comm::Axes axes : parts_.shapes[stage()].groups())
    parts_.mesh.group(axes)->abort(text);
}

// ---------------------------------------------------------------- batches

double Pipeline::train_batch(const BatchSource& data) {
  check_usable("train_batch");
  const auto micro_batches = static_cast<int>(core().options().gradient_accumulation_steps);
  const pipeline::Shape shape{stages(), micro_batches, options_.chunks};
  const pipeline::Table table = pipeline::training(schedule_, shape, stage());
  ties_.follow();
  PipelineRun run(*this, shape, read(data, micro_batches), /*trains=*/true);
  module_->train();
  return in_batch([&] {
    run.execute(table);
    most_live_ = std::max(most_live_, run.most_live);
    const double loss = mean_of(run.losses);
    try {
      ties_.sum_gradients();
      step_together(*this, parts_, ties_.copies());
    } catch (...) {
      core().zero_grad();  // the next batch is not added to this one
      throw;
    }
    return loss;
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
  check_usable("eval_batch");
  if (micro_batches <= 0) micro_batches = core().options().gradient_accumulation_steps;
  const pipeline::Shape shape{stages(), static_cast<int>(micro_batches), options_.chunks};
  PipelineRun run(*this, shape, read(data, micro_batches), /*trains=*/false);
  const EvalMode evaluates(*module_);
  Evaluation result = in_batch([&] {
    const at::NoGradGuard no_grad;
    run.execute(pipeline::forward_only(shape, stage()));
    return Evaluation{mean_of(run.losses), {}};
  });
  result.outputs = std::move(run.outputs);
  return result;
}

// The micro-batches where they are needed, once all ranks have theirs.
std::vector<MicroBatch> Pipeline::read(const BatchSource& data, int64_t micro_batches) {
  std::vector<MicroBatch> batches;
  std::exception_ptr problem;
  try {
    TESSERA_CHECK_VALUE(data || !(is_first_stage() || is_last_stage()), "pipeline", own_name(parts_),
                        " reads data and has none");
    for (int64_t micro = 0; micro < micro_batches && (is_first_stage() || is_last_stage()); ++micro)
      batches.push_back(data(micro));
  } catch (...) {
    problem = std::current_exception();
  }
  const auto rows = rows_of(parts_, {static_cast<double>(micro_batches), problem ? 1.0 : 0.0}, "the data of a batch");
  if (problem) std::rethrow_exception(problem);
  for (int rank = 0; rank < static_cast<int>(rows.size()); ++rank) {
    TESSERA_CHECK(rows[rank][1] == 0, "pipeline", stage_name(parts_, rank), " could not read its data; see its error");
    TESSERA_CHECK(static_cast<int64_t>(rows[rank][0]) == micro_batches, "pipeline", stage_name(parts_, rank), " has ",
                  rows[rank][0], " micro-batches for this batch, ", own_name(parts_), " has ", micro_batches,
                  "; they must be the same on all stages");
  }
  return batches;
}

Tensors Pipeline::forward(int chunk, const Tensors& inputs) {
  if (core().pre_forward()) warn_of_region();
  Tensors made;
  try {
    made = module_->run(chunk, inputs, recompute_interval_);
  } catch (...) {
    core().abort_forward();
    throw;
  }
  core().post_forward(made);
  return made;
}

// Over all ranks of the last stage; NaN where they compute none. From here on all ranks have come to the end of their tables.
double Pipeline::mean_of(const std::vector<at::Tensor>& losses) {
  at::Tensor total = at::zeros({}, at::kFloat);
  for (const at::Tensor& loss : losses)
    total = total + loss.reshape({}).cpu();
  const double count = static_cast<double>(std::max<size_t>(1, losses.size()));
  const double mean = (total / count).item<double>();
  double sum = 0, ranks = 0;
  for (const auto& row : rows_of(parts_, {losses.empty() ? 0.0 : 1.0, mean}, "the loss of a batch")) {
    sum += row[0] != 0 ? row[1] : 0;
    ranks += row[0];
  }
  if (parts_.p2p) parts_.p2p->flush();
  under_way_ = false;
  return ranks > 0 ? sum / ranks : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace tessera::nn
