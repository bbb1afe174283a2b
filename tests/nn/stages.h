// Test support: a model as a list of layers, its data, and ranks of a pipeline as threads.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/nn/engine.h"
#include "tessera/nn/parallel.h"
#include "tessera/nn/pipeline.h"
#include "tests/support/ranks.h"

namespace tessera::testing {

using nn::Layers;
using nn::MicroBatch;
using nn::Tensors;
using Weights = std::map<std::string, at::Tensor>;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) : linear(register_module("linear", torch::nn::Linear(width, width))) {}
  at::Tensor forward(const at::Tensor& x) { return x + at::tanh(linear(x)); }
  torch::nn::Linear linear;
};
TORCH_MODULE(Block);

// From here on a mask goes along, of integers.
struct MaskImpl : torch::nn::Module {
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) { return {x, x.detach().gt(0).to(at::kLong)}; }
};
TORCH_MODULE(Mask);
struct MaskedImpl : torch::nn::Module {
  explicit MaskedImpl(int64_t width) : linear(register_module("linear", torch::nn::Linear(width, width))) {}
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& mask) {
    return {x + linear(x) * mask, mask};
  }
  torch::nn::Linear linear;
};
TORCH_MODULE(Masked);

inline constexpr int64_t kWidth = 8;

// Of module M, with weights that depend on `number` only, whoever builds it.
template <class M>
auto fresh(int number, M module) {
  const at::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + number);
  for (at::Tensor& param : module->parameters())
    param.copy_(at::randn(param.sizes(), generator, at::kFloat) * 0.3);
  return module;
}

inline Layers layers() {
  Layers list;
  list.build([] { return fresh(0, torch::nn::Linear(6, kWidth)); });
  list.build([] { return fresh(1, Block(kWidth)); });
  list.add([](const at::Tensor& x) { return x * 0.5; });
  list.add(Mask());
  for (const int number : {4, 5, 6})
    list.build([number] { return fresh(number, Masked(kWidth)); });
  list.add([](const at::Tensor& x, const at::Tensor& mask) { return x + mask; });
  list.build([] { return fresh(8, Block(kWidth)); });
  list.build([] { return fresh(9, torch::nn::Linear(kWidth, 3)); });
  return list;
}

// The same, of which some are frozen.
inline Layers frozen_layers(int first, int last) {
  Layers list = layers();
  for (int number = first; number < last; ++number) {
    if (!list[number].build) continue;
    list[number].build = [make = list[number].build](nn::Layer& layer) {
      make(layer);
      for (at::Tensor& param : layer.module->parameters())
        param.requires_grad_(false);
    };
  }
  return list;
}

// The second of two stages has no parameters, and begins in place.
inline Layers functions_last() {
  Layers list;
  list.build([] { return fresh(0, torch::nn::Linear(6, kWidth)); });
  list.build([] { return fresh(1, Block(kWidth)); });
  list.build([] { return fresh(2, torch::nn::Linear(kWidth, 3)); });
  list.add([](at::Tensor x) { return x.mul_(0.5).tanh_(); });
  list.add([](const at::Tensor& x) { return x + 0.1; });
  list.add([](const at::Tensor& x) { return x * 2; });
  return list;
}

// The first and the last layer share a weight [kWidth, 6], and a bias that the last one does not use; `idle`: nor the weight.
// `frozen`: both are so.
inline Layers tied_layers(bool idle = false, bool frozen = false) {
  const auto make = [frozen] {
    torch::nn::Linear made = fresh(0, torch::nn::Linear(6, kWidth));
    for (at::Tensor& param : made->parameters())
      param.requires_grad_(!frozen);
    return made;
  };
  Layers list;
  list.tied("ends", make);
  for (const int number : {1, 2, 3, 4})
    list.build([number] { return fresh(number, Block(kWidth)); });
  list.tied("ends", make, [idle](torch::nn::Linear& ends, const at::Tensor& x) {
    return (idle ? x : at::matmul(x, ends->weight)).narrow(-1, 0, 3);
  });
  return list;
}

// Two layers whose widths are cut over the ranks of tp.
struct CutImpl : torch::nn::Module {
  CutImpl(int number, const comm::Mesh& mesh) {
    const parallel::Region region{mesh.group(comm::Axis::Tp)};
    up = register_module("up", nn::ColumnLinear(torch::nn::LinearOptions(kWidth, 12), region));
    down = register_module("down", nn::RowLinear(torch::nn::LinearOptions(12, kWidth), region));
    auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + number);
    for (const char* name : {"up.weight", "up.bias", "down.weight", "down.bias"})
      nn::set_whole(*this, name, at::randn(nn::whole_sizes(*this, name), generator, at::kFloat) * 0.3);
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(at::tanh(up(x))); }
  nn::ColumnLinear up{nullptr};
  nn::RowLinear down{nullptr};
};
TORCH_MODULE(Cut);

inline Layers cut_layers(const comm::Mesh& mesh) {
  Layers list;
  list.build([] { return fresh(0, torch::nn::Linear(6, kWidth)); });
  for (const int number : {1, 2, 3})
    list.build([number, mesh] { return Cut(number, mesh); });
  list.build([] { return fresh(9, torch::nn::Linear(kWidth, 3)); });
  return list;
}

inline at::Tensor loss_of(const Tensors& outputs, const Tensors& labels) {
  return (outputs[0].to(at::kFloat) - labels[0]).square().mean();
}

// Of one data-parallel rank; rows differ from micro-batch to micro-batch.
inline MicroBatch batch_of(int place, int step, int64_t micro, at::ScalarType dtype = at::kFloat) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(10'000 * (place + 1) + 100 * step + micro);
  const int64_t rows = 3 + micro % 2;
  return {{at::randn({rows, 6}, generator, at::kFloat).to(dtype)}, {at::randn({rows, 3}, generator, at::kFloat)}};
}

struct Case {
  int stages = 2, ranks = 1, chunks = 1;
  std::string schedule = "1f1b";
  int zero = 0;
  std::string dtype = "fp32";
  int micro_batches = 4;
  double clip = 0;
  int interval = 0;       // of activation checkpointing
  std::string more = "";  // of the configuration
  int tp = 1;
  std::string optimizer = "AdamW";
  std::vector<nn::ParamGroup> groups = {};
  bool own = false;  // an optimizer and a schedule of one's own
  std::function<Layers(const comm::Mesh&)> list = [](const comm::Mesh&) { return layers(); };

  comm::MeshShape shape() const { return comm::mesh_shape(ranks * tp, -1, 1, tp); }
  std::string name() const {
    return c10::str(stages, " stages of ", ranks, ", ", chunks, " chunks, ", schedule, ", zero ", zero, ", ", dtype,
                    ", ", micro_batches, " micro-batches, clip ", clip, ", interval ", interval, ", ", more, ", ",
                    own ? "own " : "", optimizer);
  }
  at::ScalarType type() const { return dtype == "fp32" ? at::kFloat : dtype == "bf16" ? at::kBFloat16 : at::kHalf; }
  Config config() const {
    const std::string precision = dtype == "fp32"   ? ""
                                  : dtype == "bf16" ? R"("bf16": {"enabled": true},)"
                                                    : R"("fp16": {"enabled": true, "initial_scale_power": 8},)";
    return Config::from_json(c10::str("{", precision, more, R"("train_micro_batch_size_per_gpu": 3,
      "gradient_accumulation_steps": )",
                                      micro_batches, R"(, "gradient_clipping": )", clip, R"(,
      "optimizer": {"type": ")",
                                      optimizer, R"(", "params": {"lr": 0.01, "weight_decay": 0.1}},
      "pipeline": {"schedule": ")",
                                      schedule, R"(", "activation_checkpoint_interval": )", interval, R"(},
      "tensor_parallel": {"autotp_size": )",
                                      tp, R"(}, "zero_optimization": {"stage": )", zero, "}}"));
  }
  std::shared_ptr<torch::optim::Optimizer> optimizer_of(const torch::nn::Module& module) const {
    return std::make_shared<torch::optim::SGD>(module.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  }
  std::shared_ptr<nn::Schedule> schedule_of() const {
    return nn::scaled_by([](int64_t updates) { return 1.0 / static_cast<double>(1 + updates); });
  }
  nn::PipelineOptions options() const {
    nn::PipelineOptions options{
        .loss = &loss_of, .partition = "uniform", .chunks = chunks, .seed = std::nullopt, .groups = groups};
    if (own) {
      options.schedule = schedule_of();
      options.optimizer = [this](const nn::StageLayers& stage) { return optimizer_of(stage); };
    }
    return options;
  }
  nn::Recipe recipe(const torch::nn::Module& module) const {
    nn::Recipe recipe{.units = nn::units_of_layers, .groups = groups};
    if (own) recipe.schedule = schedule_of(), recipe.optimizer = optimizer_of(module);
    return recipe;
  }
};

// Groups of parameters, optimizers of whole ones, an optimizer and a schedule of one's own.
inline void add_optimizers(std::vector<Case>& cases) {
  const std::vector<nn::ParamGroup> groups{
      {.takes = [](const std::string&, const at::Tensor& param) { return param.dim() < 2; },
       .set = [](optim::GroupOptions& group) { group.weight_decay = 0; }}};
  for (const int zero : {0, 1, 2}) {
    for (const char* optimizer : {"AdamW", "Lamb", "Muon"})
      cases.push_back({.ranks = 2, .zero = zero, .optimizer = optimizer, .groups = groups});
    cases.push_back({.ranks = 2, .zero = zero, .own = true});
    cases.push_back(
        {.ranks = 2, .zero = zero, .own = true, .list = [](const comm::Mesh&) { return functions_last(); }});
  }
}

inline Weights weights_of(const torch::nn::Module& module) {
  Weights weights;
  for (const auto& param : module.named_parameters())
    weights[param.key()] = param.value().detach().clone();
  return weights;
}

// Ranks of all parts as threads.
inline void run_parts(const std::vector<comm::MeshShape>& shapes, const std::function<void(const comm::Parts&)>& body,
                      std::chrono::milliseconds timeout = std::chrono::minutes(1)) {
  auto parts = comm::thread_parts(shapes, timeout);
  std::vector<comm::GroupPtr> groups;
  for (const comm::Parts& each : parts)
    groups.push_back(each.everyone);
  run_threads(groups, [&](int rank, const comm::GroupPtr&) {
    const comm::Parts mine = std::exchange(parts[rank], {});
    body(mine);
  });
}

// Each stage is a part.
inline void run_stages(const Case& c, const std::function<void(const comm::Parts&)>& body,
                       std::chrono::milliseconds timeout = std::chrono::minutes(1)) {
  run_parts(std::vector(c.stages, c.shape()), body, timeout);
}

inline nn::BatchSource data_of(const Case& c, const comm::Parts& parts, int step) {
  return [type = c.type(), place = parts.mesh.rank(comm::kBatchAxes), step](int64_t micro) {
    return batch_of(place, step, micro, type);
  };
}

// Calls `on_send` before each message's tensor leaves.
class Watched final : public comm::PointToPoint {
 public:
  using OnSend = std::function<void(const at::Tensor& tensor, int tag)>;
  Watched(comm::PointToPointPtr inner, OnSend on_send) : inner_(std::move(inner)), on_send_(std::move(on_send)) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  at::Device device() const override { return inner_->device(); }
  int64_t send(const at::Tensor& tensor, int to, int tag, comm::Label label) override {
    on_send_(tensor, tag);
    return inner_->send(tensor, to, tag, label);
  }
  void receive(const at::Tensor& tensor, int from, int tag, comm::Label label) override {
    inner_->receive(tensor, from, tag, label);
  }
  void settle(int64_t number) override { inner_->settle(number); }
  void flush() override { inner_->flush(); }

 private:
  const comm::PointToPointPtr inner_;
  const OnSend on_send_;
};

struct Trained {
  std::vector<double> losses;
  Weights weights;
  double norm = 0;
};

// The same layers on one engine over the ranks of one stage: what a pipeline must come to.
// `before` is called with the module before every step.
inline Trained train_whole(const Case& c, int steps, const std::function<void(torch::nn::Module&, int)>& before = {}) {
  struct Whole : nn::StageLayers {
    using StageLayers::StageLayers;
    Tensors forward(const Tensors& x) { return run(0, x); }
  };
  Trained result;
  std::mutex mutex;
  std::vector<std::vector<double>> losses(c.ranks);
  run_ranks(c.ranks, [&](int rank, const comm::GroupPtr& group) {
    const Layers list = c.list(comm::Mesh());
    auto module = std::make_shared<Whole>(list, std::vector{0, list.size()}, 1, 0, std::nullopt);
    Case whole = c;
    whole.tp = 1;
    nn::Engine<Whole> engine(module, whole.config(), comm::Mesh(group), nullptr, whole.recipe(*module));
    for (int step = 0; step < steps; ++step) {
      if (before) before(*module, step);
      at::Tensor total = at::zeros({});
      for (int64_t micro = 0; micro < c.micro_batches; ++micro) {
        const MicroBatch batch = batch_of(rank, step, micro, c.type());
        const at::Tensor loss = loss_of(engine.forward(batch.inputs), batch.labels);
        engine.backward(loss);
        engine.step();
        total = total + loss.detach().to(at::kFloat);
      }
      losses[rank].push_back((total / static_cast<double>(c.micro_batches)).item<double>());
    }
    const std::scoped_lock lock(mutex);
    result.norm = engine.core().global_grad_norm().value_or(0);
    result.weights = weights_of(*module);
  });
  for (int step = 0; step < steps; ++step) {
    double sum = 0;
    for (const auto& of_rank : losses)
      sum += of_rank[step];
    result.losses.push_back(sum / c.ranks);
  }
  return result;
}

}  // namespace tessera::testing
