// Test support: a small model with odd parameter sizes, its data, and what plain single-process PyTorch makes of it.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/engine/engine.h"
#include "tests/support/ranks.h"

namespace tessera::testing {

// y = (tanh((x * c) W1) W2 + b) * a, with parameters of 1, 3, 17, 15 and 85 elements in two blocks and the root.
struct Toy {
  std::vector<at::Tensor> tensors;
  inline static const std::vector<std::string> kNames{"a", "b", "c", "w1", "w2"};

  explicit Toy(uint64_t seed = 1) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    const std::vector<std::vector<int64_t>> shapes{{1}, {3}, {17}, {17, 5}, {5, 3}};
    for (const auto& shape : shapes) {
      tensors.push_back(at::randn(shape, generator, at::kFloat).requires_grad_(true));
    }
  }

  std::vector<engine::ParamSpec> specs() const {
    const std::vector<std::string> units{"root", "blocks.1", "blocks.0", "blocks.0", "blocks.1"};
    std::vector<engine::ParamSpec> specs;
    for (size_t i = 0; i < tensors.size(); ++i)
      specs.push_back({kNames[i], tensors[i], 0, units[i]});
    return specs;
  }

  // `engine`: its blocks run as modules, for partitioned parameters.
  at::Tensor outputs(const at::Tensor& x, engine::Engine* engine = nullptr) const {
    if (engine == nullptr || !enclosed) return layers(x, engine);
    if (!registered) whole = engine->modules().add({});
    registered = true;
    if (whole < 0) return layers(x, engine);
    engine->modules().enter(whole);
    at::Tensor output;
    try {
      output = layers(x, engine);
    } catch (...) {
      engine->modules().abort(whole);
      throw;
    }
    engine->modules().leave(whole, {output});
    return output;
  }
  at::Tensor layers(const at::Tensor& x, engine::Engine* engine) const {
    const at::Tensor input = x.to(tensors[0].scalar_type());
    const at::Tensor h = module(engine, 0, input, [&] { return at::tanh(at::matmul(input * tensors[2], tensors[3])); });
    const at::Tensor y = module(engine, 1, h, [&] { return at::matmul(h, tensors[4]) + tensors[1]; });
    return module(engine, 2, y, [&] { return y * tensors[0]; });
  }
  at::Tensor loss(const at::Tensor& x, engine::Engine* engine = nullptr) const {
    return outputs(x, engine).to(at::kFloat).square().mean();
  }

  template <class F>
  at::Tensor module(engine::Engine* engine, int number, const at::Tensor& input, F&& body) const {
    if (engine == nullptr) return body();
    if (modules.empty()) {
      for (const auto& params : std::vector<std::vector<int>>{{2, 3}, {1, 4}, {0}})
        modules.push_back(engine->modules().add(params));
    }
    const int id = modules[number];
    if (id < 0) return body();
    if (engine->modules().enter(id)) engine->modules().note_inputs({input});
    at::Tensor output;
    try {
      output = body();
    } catch (...) {
      engine->modules().abort(id);
      throw;
    }
    engine->modules().leave(id, {output});
    return output;
  }
  bool enclosed = false;  // its blocks, by a module without parameters, in which the next unit is gathered early
  mutable bool registered = false;
  mutable int whole = -1;            // the number of that one in the engine, once registered
  mutable std::vector<int> modules;  // theirs
};

// The batch of one rank and micro-step: [4, 17], the same wherever it is asked for.
inline at::Tensor toy_batch(int rank, int micro_step) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(1000 + 17 * micro_step + rank);
  return at::randn({4, 17}, generator, at::kFloat);
}

// A user's write to a parameter.
inline void fill(const at::Tensor& parameter, double value) {
  const at::NoGradGuard no_grad;
  at::Tensor(parameter).fill_(value);
}

inline optim::GroupOptions toy_adamw() {
  optim::GroupOptions group;
  group.lr = 0.02;
  group.weight_decay = 0.1;
  return group;
}

// fp32 to bf16 as a split master does it: ties go up, where torch's cast takes them to the even neighbour.
inline at::Tensor bf16_half_up(const at::Tensor& x) {
  return x.contiguous().view(at::kInt).add(0x8000).bitwise_and(-0x10000).view(at::kFloat).to(at::kBFloat16);
}

// Plain PyTorch in one process: the gradients of every rank and micro-batch, their mean, clipping and AdamW, with an
// fp32 master of weights in `dtype`.
class ToyReference {
 public:
  // `scale`: of the loss; gradients are divided by it before clipping.
  ToyReference(at::ScalarType dtype, int world, int accumulation, double clip, double scale = 1)
      : dtype_(dtype), world_(world), accumulation_(accumulation), clip_(clip), scale_(scale) {
    for (at::Tensor& t : model_.tensors) {
      const at::Tensor weight = t.detach().to(dtype_);
      masters_.push_back(weight.to(at::kFloat, false, /*copy=*/true));
      m_.push_back(at::zeros_like(masters_.back()));
      v_.push_back(at::zeros_like(masters_.back()));
      t = weight.clone().requires_grad_(true);
    }
  }

  // Mean gradients, fp32, in the arithmetic of a flat gradient of `dtype`: one rounding for each micro-batch that is
  // added, one for the mean over ranks.
  void step() {
    std::vector<at::Tensor> sums;
    for (int rank = 0; rank < world_; ++rank) {
      std::vector<at::Tensor> local;
      for (int micro = 0; micro < accumulation_; ++micro) {
        (model_.loss(toy_batch(rank, micro_ + micro)) * scale_).backward();
        for (size_t i = 0; i < model_.tensors.size(); ++i) {
          at::Tensor& grad = model_.tensors[i].mutable_grad();
          const at::Tensor scaled = grad.to(at::kFloat) * (1.0F / static_cast<float>(accumulation_));
          if (micro == 0) {
            local.push_back(scaled.to(dtype_));
          } else {
            local[i] = (local[i].to(at::kFloat) + scaled).to(dtype_);
          }
          grad.reset();
        }
      }
      for (size_t i = 0; i < local.size(); ++i) {
        if (rank == 0) {
          sums.push_back(local[i].to(at::kFloat));
        } else {
          sums[i] = sums[i] + local[i].to(at::kFloat);
        }
      }
    }
    micro_ += accumulation_;
    grads.clear();
    double squares = 0;
    for (const at::Tensor& sum : sums) {
      grads.push_back((sum / world_).to(dtype_).to(at::kFloat) / scale_);
      squares += grads.back().to(at::kDouble).square().sum().item<double>();
    }
    norm = std::sqrt(squares);
    const double coefficient = clip_ > 0 ? std::min(1.0, clip_ / (norm + 1e-6)) : 1.0;
    ++steps_;
    const auto group = toy_adamw();
    const double bias1 = 1 - std::pow(group.beta1, steps_), bias2 = 1 - std::pow(group.beta2, steps_);
    for (size_t i = 0; i < grads.size(); ++i) {
      const at::Tensor g = grads[i] * coefficient;
      masters_[i].mul_(1 - group.lr * group.weight_decay);
      m_[i].lerp_(g, 1 - group.beta1);
      v_[i].mul_(group.beta2).addcmul_(g, g, 1 - group.beta2);
      const at::Tensor denominator = (v_[i].sqrt() / std::sqrt(bias2)).add_(group.eps);
      masters_[i].addcdiv_(m_[i], denominator, -group.lr / bias1);
      const at::NoGradGuard no_grad;
      model_.tensors[i].copy_(cast(masters_[i]));
    }
  }

  const std::vector<at::Tensor>& masters() const { return masters_; }
  std::vector<at::Tensor> grads;
  double norm = 0;

 private:
  at::Tensor cast(const at::Tensor& master) const {
    return dtype_ == at::kBFloat16 ? bf16_half_up(master) : master.to(dtype_);
  }

  Toy model_;
  at::ScalarType dtype_;
  int world_, accumulation_;
  double clip_, scale_;
  int micro_ = 0;
  int64_t steps_ = 0;
  std::vector<at::Tensor> masters_, m_, v_;
};

struct ToyRun {
  int stage = 0;
  bool bf16 = false;
  int accumulation = 1;
  double clip = 1.0;
  int64_t bucket = 500'000'000;
  int64_t min_unit = 0;
  int64_t persistence = 4;                             // stage 3: "a" and "b" stay resident
  int last_stage = 3;                                  // of over_stages()
  std::optional<amp::PrecisionPolicy> precision = {};  // else fp32, bf16 or fp16
  bool fp16 = false;
  amp::ScalerOptions scaler = {};
  bool share = false;                       // parameters
  bool in_backward = false;                 // the update
  double unit_clip = 0, previous_clip = 0;  // then
  bool runs_on = false;                     // the update
};

inline engine::Options toy_options(const ToyRun& run) {
  engine::Options options;
  options.zero.stage = run.stage;
  const auto policy = run.fp16   ? amp::PrecisionPolicy::fp16()
                      : run.bf16 ? amp::PrecisionPolicy::bf16()
                                 : amp::PrecisionPolicy::fp32();
  options.zero.precision = run.precision.value_or(policy);
  options.scaler = run.scaler;
  options.zero.reduce_bucket_size = run.bucket;
  options.zero.min_unit_elements = run.min_unit;
  options.zero.gather.persistence_threshold = run.persistence;
  options.zero.share_params = run.share;
  options.zero.update_in_backward = run.in_backward;
  options.zero.unit_clipping = run.unit_clip;
  options.zero.update_runs_on = run.runs_on;
  options.zero.previous_clipping = run.previous_clip;
  options.gradient_accumulation_steps = run.accumulation;
  options.gradient_clipping = run.clip;
  return options;
}

inline engine::Engine toy_engine(const ToyRun& run, const Toy& toy, const comm::GroupPtr& group) {
  return engine::Engine(toy_options(run), comm::Mesh(group), toy.specs(), {toy_adamw()});
}

// One rank of over_stages().
struct ToyRank {
  engine::Engine& engine;
  const Toy& toy;
  int rank;
  int stage;
  const comm::GroupPtr& group;
};

// body on every rank of each world, once for every stage up to the last; `run` says the rest.
inline void over_stages(const std::vector<int>& worlds, const ToyRun& run,
                        const std::function<void(const ToyRank&)>& body) {
  for (const int world : worlds) {
    for (int stage = 0; stage <= run.last_stage; ++stage) {
      run_ranks(world, [&](int rank, const comm::GroupPtr& group) {
        ToyRun staged = run;
        staged.stage = stage;
        const Toy toy;
        engine::Engine engine = toy_engine(staged, toy, group);
        body({engine, toy, rank, stage, group});
      });
    }
  }
}

// One engine forward in C++: what a front end does.
inline at::Tensor toy_forward(engine::Engine& engine, const Toy& toy, const at::Tensor& x) {
  engine.pre_forward();
  at::Tensor loss;
  try {
    loss = toy.loss(x, &engine);
  } catch (...) {
    engine.abort_forward();
    throw;
  }
  engine.post_forward({loss});
  return loss;
}

}  // namespace tessera::testing
