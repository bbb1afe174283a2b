// Optimizers that a program brings: which an engine runs, and whose groups rule. recipe_test.cpp trains by each.
#include "tessera/nn/client_optimizer.h"

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <functional>
#include <memory>
#include <string>

#include "tessera/nn/engine.h"
#include "tessera/nn/optimizers.h"
#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

// Of its own: other files have a net(), too.
namespace tessera::nn::client_optimizer_tests {
namespace {

using torch::optim::Optimizer;

torch::nn::Sequential net() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(5, 7), torch::nn::LayerNorm(torch::nn::LayerNormOptions({7})),
                               torch::nn::Linear(7, 3));
}

Config config_of_stage(int stage, const std::string& more = "") {
  return Config::from_json(
      R"({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "zero_optimization": {"stage": )" +
      std::to_string(stage) + "}" + more + "}");
}

at::Tensor batch(int64_t step) {
  return at::arange(20, at::kFloat).view({4, 5}).add(static_cast<double>(step)).sin();
}

// Vectors by a rate of their own.
std::shared_ptr<Optimizer> of_tessera(torch::nn::Module& module, const char* type) {
  const auto set = [](optim::GroupOptions& options) { options.lr = 0.01, options.weight_decay = 0.1; };
  const auto is_vector = [](const std::string&, const at::Tensor& param) { return param.dim() < 2; };
  return make_optimizer(type, module.named_parameters(), {.set = set, .groups = {{.takes = is_vector}}});
}

// Its step() would need what an engine has not: a closure, whole parameters, states.
class Norms : public Optimizer {
 public:
  using Optimizer::Optimizer;
  at::Tensor step(LossClosure) override { return {}; }
};

TEST(ClientOptimizer, OptimizersThatCannotBeRunAreRefused) {
  const auto error = [](int stage, const auto& make, const std::string& more = "") {
    auto model = net();
    const std::shared_ptr<Optimizer> optimizer = make(*model);
    return testing::error_of([&] {
      initialize(model, config_of_stage(stage, more), comm::Mesh(), Recipe{.optimizer = optimizer}).destroy();
      EXPECT_EQ(optimizer->param_groups()[0].params().size(), 6U);  // they are back
    });
  };
  const auto norms = [](auto& model) {
    return std::make_shared<Norms>(model.parameters(), std::make_unique<torch::optim::SGDOptions>(0.1));
  };
  EXPECT_EQ(error(0, norms), "");
  EXPECT_HAS(error(1, norms), "is not known to work on slices of parameters, as stage 1 gives them");
  EXPECT_EQ(error(1, norms, R"(, "zero_allow_untested_optimizer": true)"), "");
  const auto rmsprop = [](auto& model) { return std::make_shared<torch::optim::RMSprop>(model.parameters()); };
  for (const int stage : {1, 2, 3}) {  // as Python's engine has it of torch's classes
    EXPECT_HAS(error(stage, rmsprop), "RMSprop is not known to work on slices of parameters");
    EXPECT_EQ(error(stage, rmsprop, R"(, "zero_allow_untested_optimizer": true)"), "");
  }
  EXPECT_EQ(error(0, rmsprop), "");
  testing::run_axes({{comm::Axis::Tp, 2}}, [&](int, const comm::Mesh& mesh) {
    const auto model = torch::nn::Sequential(torch::nn::Linear(4, 4));
    const auto config = Config::from_json(R"({"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2,
        "partition_config": {"use_default_specs": false, "layer_specs": [{"patterns": ["0"], "partition_type": "column"}]}}})");
    EXPECT_HAS(testing::error_of([&] { initialize(model, config, mesh, Recipe{.optimizer = norms(*model)}); }),
               "as tensor_parallel.autotp_size gives them; set \"zero_allow_untested_optimizer\": true if it updates "
               "element by element, or use stage 0 without tensor parallelism");
    for (const char* type : {"RMSprop", "NAdam"}) {
      auto of_type = config;
      of_type.optimizer.type = type;
      EXPECT_HAS(testing::error_of([&] { initialize(model, of_type, mesh); }),
                 c10::str(type, " is not known to work on slices of parameters, as tensor_parallel.autotp_size gives"));
      of_type.zero_allow_untested_optimizer = true;
      EXPECT_EQ(testing::error_of([&] { initialize(model, of_type, mesh).destroy(); }), "");
    }
  });
  EXPECT_HAS(error(0, [](auto& m) { return std::make_shared<torch::optim::LBFGS>(m.parameters()); }),
             "needs a closure");
  EXPECT_HAS(
      error(0, [](auto&) { return std::make_shared<torch::optim::SGD>(net()->parameters(), 0.1); }),
      "that is no parameter of the module: a C++ engine trains what its module has; register the module that has it");
  EXPECT_HAS(error(0,
                   [](auto& model) {
                     auto adam = std::make_shared<torch::optim::Adam>(model.parameters());
                     model.parameters()[0].mutable_grad() = at::ones({7, 5});
                     adam->step();
                     return adam;
                   }),
             "has states already");
}

// The way out works in C++: the same optimizer, of make_optimizer().
TEST(ClientOptimizer, WhatOnlyTheEnginesOwnRulesCanDoNamesOneThatCan) {
  const io::TempFolder folder;
  const auto error = [&](const std::string& more, bool of_torch, const auto& then) {
    auto model = net();
    std::shared_ptr<Optimizer> own = of_tessera(*model, "AdamW");
    if (of_torch) own = std::make_shared<torch::optim::AdamW>(model->parameters());
    return testing::error_of([&] {
      auto engine = initialize(model, config_of_stage(3, more), comm::Mesh(), Recipe{.optimizer = own});
      then(engine);
    });
  };
  const auto nothing = [](auto&) {};
  const auto leaves = [](auto& engine) {
    engine.offload_states();
    engine.reload_states();
  };
  const std::string nvme = R"({"device": "nvme", "nvme_path": ")" + folder.path() + R"("}})";
  const std::string said =
      "name one of Adam, AdamW, SGD, Lion, Adagrad in the configuration, or pass one of these that Tessera runs "
      "itself: "
      "an object of torch's class in Python, of tessera::nn::make_optimizer() in C++";
  const auto both = [&](const std::string& more, const auto& then) {
    EXPECT_HAS(error(more, true, then), said);
    EXPECT_EQ(error(more, false, then), "");
  };
  both("", leaves);
  both(R"(, "tessera": {"update_in_backward": true})", nothing);
  const auto start = [&](bool of_torch) {
    auto model = net();
    std::shared_ptr<Optimizer> own = of_tessera(*model, "AdamW");
    if (of_torch) own = std::make_shared<torch::optim::AdamW>(model->parameters());
    const auto away = Config::from_json(c10::str(
        R"({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "offload_optimizer": )", nvme, "}"));
    return testing::error_of([&] { initialize(model, away, comm::Mesh(), Recipe{.optimizer = own}).destroy(); });
  };
  EXPECT_HAS(start(true), said);
  EXPECT_EQ(start(false), "");
}

// The groups stay the program's: what it changes there holds from the next step on, and what the engine changes stands there.
TEST(ClientOptimizer, OptimizersOfTesseraKeepTheirGroups) {
  for (const char* type : {"AdamW", "Lamb", "NAdam"}) {
    auto model = net(), plain = net();
    const auto optimizer = of_tessera(*model, type), alone = of_tessera(*plain, type);
    auto engine = initialize(model, config_of_stage(1), comm::Mesh(), Recipe{.optimizer = optimizer});
    for (int64_t step = 0; step < 3; ++step) {
      for (const auto& each : {optimizer, alone}) {
        group_options(each->param_groups()[0]).lr = step == 1 ? 0 : 0.05;
        group_options(each->param_groups()[1]).beta1 = 0.5;
      }
      engine.forward(batch(step)).square().mean().backward();
      EXPECT_TRUE(engine.step());
      plain->zero_grad();
      plain->forward(batch(step)).square().mean().backward();
      alone->step();
      EXPECT_EQ(engine.lr()[0], step == 1 ? 0 : 0.05);
    }
    for (size_t i = 0; i < plain->parameters().size(); ++i)
      EXPECT_TRUE(at::allclose(model->parameters()[i], plain->parameters()[i], 0, 1e-6)) << type << ", parameter " << i;
    const io::TempFolder folder;
    engine.save_checkpoint(folder.path());
    group_options(optimizer->param_groups()[1]).lr = 7;
    EXPECT_TRUE(engine.load_checkpoint(folder.path()));
    EXPECT_EQ(group_options(optimizer->param_groups()[1]).lr, 0.01) << type;
    group_options(optimizer->param_groups()[1]).beta2 = 1;
    engine.forward(batch(0)).square().mean().backward();
    EXPECT_HAS(testing::error_of<c10::ValueError>([&] { engine.step(); }), "param group 1: beta");
  }
}

// What is written to the engine's groups holds for the program's optimizer: all of one of Tessera's, the rate of torch's.
TEST(ClientOptimizer, WhatIsWrittenToTheEnginesGroupsHolds) {
  for (const int accumulation : {1, 2})
    for (const char* type : {"AdamW", "Lamb", "torch::optim::SGD"}) {
      const bool of_torch = type == std::string("torch::optim::SGD");
      auto model = net();
      const std::shared_ptr<Optimizer> optimizer =
          of_torch ? std::make_shared<torch::optim::SGD>(model->parameters(), 0.1) : of_tessera(*model, type);
      const auto more = c10::str(R"(, "gradient_accumulation_steps": )", accumulation);
      auto engine = initialize(model, config_of_stage(1, more), comm::Mesh(), Recipe{.optimizer = optimizer});
      const auto train = [&] {
        for (int micro = 0; micro < accumulation; ++micro) {
          engine.forward(batch(micro)).square().mean().backward();
          engine.step();
        }
      };
      train();
      const at::Tensor before = model->parameters()[0].detach().clone();
      engine.groups()[0].lr = 0;
      if (!of_torch) engine.groups()[0].weight_decay = 0.25;
      if (!of_torch) engine.groups()[1].lr = 0;
      train();
      EXPECT_TRUE(model->parameters()[0].equal(before)) << type;
      EXPECT_EQ(engine.lr()[0], 0) << type;
      EXPECT_EQ(
          of_torch ? optimizer->param_groups()[0].options().get_lr() : group_options(optimizer->param_groups()[0]).lr,
          0);
      if (!of_torch) {
        EXPECT_EQ(group_options(optimizer->param_groups()[0]).weight_decay, 0.25);
        continue;
      }
      engine.groups()[0].momentum = 0.9;
      EXPECT_HAS(testing::error_of([&] { train(); }), "of the program's own, whose options are in its param groups");
      train();
    }
}

TEST(ClientOptimizer, OptimizersOfTesseraThatAnEngineCannotRunAreRefused) {
  const auto error = [](const OptimizerArguments& arguments, const std::function<void(Optimizer&)>& change = {}) {
    auto model = net();
    const auto optimizer = make_optimizer("Lion", model->named_parameters(), arguments);
    if (change) change(*optimizer);
    return testing::error_of(
        [&] { initialize(model, config_of_stage(1), comm::Mesh(), Recipe{.optimizer = optimizer}); });
  };
  EXPECT_EQ(error({}), "");
  EXPECT_HAS(error({.stochastic_rounding = true}),
             "[initialize] stochastic_rounding of Lion is for programs without an engine; an engine rounds as "
             "tessera.rounding of its configuration says");
  EXPECT_HAS(error({}, [](Optimizer& lion) { group_options(lion.param_groups()[0]).lr = -1; }),
             "[Lion] param group 0: lr must be >= 0, got -1");
  EXPECT_HAS(error({},
                   [](Optimizer& lion) {
                     lion.param_groups()[0].params()[0].mutable_grad() = at::ones({7, 5});
                     lion.step();
                   }),
             "has states already");
}

TEST(ClientOptimizer, OneOfFrozenParametersIsWarnedOf) {
  const testing::KeptWarnings kept;
  torch::nn::Sequential model(torch::nn::Linear(2, 2), torch::nn::Linear(2, 2));
  for (at::Tensor& param : model[0]->parameters())
    param.requires_grad_(false);
  const auto optimizer = std::make_shared<torch::optim::SGD>(model[0]->parameters(), 0.1);
  const auto config = Config::from_json(R"({"train_micro_batch_size_per_gpu": 1})");
  auto engine = initialize(model, config, comm::Mesh(), Recipe{.optimizer = optimizer});
  ASSERT_EQ(kept.lines.size(), 1U);
  EXPECT_HAS(kept.lines[0],
             "nothing is trained: none of the parameters that the optimizer is to have requires a gradient");
}

}  // namespace
}  // namespace tessera::nn::client_optimizer_tests
