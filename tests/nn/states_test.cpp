#include "tessera/nn/states.h"

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/adam.h>

#include <cmath>

#include "tessera/nn/engine.h"
#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

// Of its own: other files have a train(), too.
namespace tessera::nn::states_tests {
namespace {

using testing::error_of;

// A linear layer with two names, and one that is frozen.
torch::nn::Sequential states_model() {
  torch::manual_seed(3);
  torch::nn::Sequential model(torch::nn::Linear(3, 5), torch::nn::Linear(5, 3));
  model->push_back("again", model->ptr<torch::nn::LinearImpl>(0));
  for (at::Tensor& param : model->ptr(1)->parameters())
    param.requires_grad_(false);
  return model;
}

Config states_config(int stage, bool bf16, const std::string& optimizer) {
  return Config::from_json(c10::str(R"({"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": )",
                                    bf16 ? "true" : "false", R"(}, "optimizer": {"type": ")", optimizer,
                                    R"("}, "zero_optimization": {"stage": )", stage, "}}"));
}

template <class E>
void train(E& engine) {
  const at::ScalarType dtype = engine.core().params()[0].tensor.scalar_type();
  const at::Tensor x = engine.forward(at::ones({2, 3}).to(dtype));
  x.to(at::kFloat).square().mean().backward();
}

}  // namespace

TEST(States, ByParameterAndByAnyName) {
  for (const int ranks : {1, 2})
    for (int stage = 0; stage < 4; ++stage)
      for (const bool bf16 : {false, true})
        testing::run_ranks(ranks, [&](int, const comm::GroupPtr& group) {
          const testing::KeptWarnings kept;
          auto engine = initialize(states_model(), states_config(stage, bf16, "Adam"), comm::Mesh(group));
          const States states = engine.states();
          const at::Tensor weight = engine.core().params()[0].tensor;
          EXPECT_FALSE(states.full_grad("0.weight").defined());
          train(engine);
          EXPECT_EQ(states.full_grad("0.weight").sizes(), (at::IntArrayRef{5, 3}));
          states.set_full_grad("again.weight", at::full({5, 3}, 2.0));
          EXPECT_TRUE(states.full_grad(weight).equal(at::full({5, 3}, 2.0)));
          engine.step();
          EXPECT_EQ(states.full_state(weight, "step").item<float>(), 1);
          EXPECT_EQ(states.full_state("0.weight", "exp_avg").sizes(), (at::IntArrayRef{5, 3}));

          const auto text = [&](const auto& call) { return error_of<c10::ValueError>(call); };
          const at::Tensor values = at::arange(15, at::kFloat).view({5, 3}) / 8;
          states.set_full_param("0.weight", values);
          states.set_full_state(weight, "exp_avg_sq", values);
          states.set_full_state(weight, "step", at::tensor(7));
          EXPECT_TRUE(states.full_param(weight).equal(values));
          EXPECT_TRUE(states.full_state("again.weight", "exp_avg_sq").equal(values));
          EXPECT_EQ(states.local_state("0.weight", "step").item<float>(), 7);
          EXPECT_TRUE(engine.module_state_dict()["0.weight"].equal(values.to(weight.scalar_type())));

          const auto [begin, end] = states.local_range("0.weight");
          EXPECT_TRUE(states.local_param(weight).view({-1}).equal(values.view({-1}).slice(0, begin, end)));
          states.set_local_param(weight, states.local_param(weight) + 1);
          states.set_local_state(weight, "exp_avg", states.local_param(weight));
          EXPECT_TRUE(states.full_param("0.weight").equal(values + 1));
          EXPECT_TRUE(states.full_state("0.weight", "exp_avg").equal(values + 1));

          for (const at::Tensor& step : {at::tensor(-5), at::tensor(2.5), at::tensor(NAN), at::tensor(INFINITY),
                                         at::tensor(1e300, at::kDouble), at::ones({2}), at::Tensor()}) {
            EXPECT_HAS(text([&] { states.set_full_state(weight, "step", step); }), "[state] 'step' is ") << step;
            EXPECT_HAS(text([&] { states.set_local_state(weight, "step", step); }), "[state] 'step' is ");
          }
          EXPECT_HAS(
              text([&] { states.set_full_state(weight, "exp_avg_sq", values - 1); }),
              "'exp_avg_sq' is a mean or sum of squares, of which the next update takes the root: none of it is below "
              "0, and it has -1");
          EXPECT_EQ(states.local_state("0.weight", "step").item<float>(), 7);

          EXPECT_FALSE(states.full_param("1.weight").defined()) << "frozen";
          EXPECT_FALSE(states.local_state("1.weight", "exp_avg").defined());
          EXPECT_HAS(text([&] { states.set_full_param("1.weight", at::zeros({3, 5})); }),
                     "parameter '1.weight' is not optimized");
          EXPECT_HAS(text([&] { states.set_full_state("1.weight", "exp_avg", at::zeros({3, 5})); }),
                     "parameter '1.weight' is not optimized");
          EXPECT_HAS(text([&] { states.set_local_grad("1.weight", at::zeros({15})); }), "is not optimized");
          EXPECT_HAS(text([&] { states.full_param("2.weight"); }), "the module has no parameter '2.weight'");
          EXPECT_HAS(text([&] { states.full_param(at::ones({1})); }), "is not a parameter of the engine");
          EXPECT_HAS(text([&] { states.full_state(weight, "sum"); }),
                     "no optimizer state 'sum'; there are exp_avg, exp_avg_sq, step");
        });
}

TEST(States, KeysAreThoseOfTheOptimizer) {
  const auto asked = [](const std::string& optimizer) {
    auto engine = initialize(states_model(), states_config(1, false, optimizer), comm::Mesh());
    return error_of<c10::ValueError>([&] { engine.states().full_state("0.weight", "x"); });
  };
  EXPECT_HAS(asked("SGD"), "there are none");
  EXPECT_HAS(asked("Lion"), "there are exp_avg, step");
  EXPECT_HAS(asked("Adagrad"), "there are sum, step");
}

// Of those that update the masters themselves: torch's, of the configuration or the program's own, and of whole parameters.
TEST(States, OfOptimizersThatRunThemselves) {
  struct Row {
    std::string optimizer;  // empty: the program's own
    std::vector<std::string> keys;
  };
  const std::vector<Row> rows{
      {R"("RMSprop", "params": {"momentum": 0.5, "centered": true})", {"square_avg", "momentum_buffer", "grad_avg"}},
      {R"("Adam", "params": {"torch_adam": true, "amsgrad": true})", {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}},
      {R"("NAdam", "params": {"lr": 0.01})", {"exp_avg", "exp_avg_sq"}},
      {R"("Adadelta")", {"square_avg", "acc_delta"}},
      {R"("ASGD")", {"ax"}},
      {R"("Rprop")", {"prev", "step_size"}},
      {R"("Lamb")", {"exp_avg", "exp_avg_sq"}},
      {"", {"exp_avg", "exp_avg_sq"}}};
  const auto check = [](const Row& row, int stage, const comm::GroupPtr& group) {
    const testing::KeptWarnings kept;
    const auto model = states_model();
    const std::string optimizer = row.optimizer.empty() ? "" : R"("optimizer": {"type": )" + row.optimizer + "}, ";
    const auto config = Config::from_json(
        c10::str("{", optimizer, R"("zero_allow_untested_optimizer": true, "train_micro_batch_size_per_gpu": 2,
                  "zero_optimization": {"stage": )",
                 stage, "}}"));
    Recipe recipe;
    if (row.optimizer.empty()) recipe.optimizer = std::make_shared<torch::optim::Adam>(model->ptr(0)->parameters());
    auto engine = initialize(model, config, comm::Mesh(group), recipe);
    const States states = engine.states();
    const auto text = [&](const auto& call) { return error_of<c10::ValueError>(call); };
    EXPECT_FALSE(states.full_state("0.weight", row.keys[0]).defined()) << "before a step";
    EXPECT_HAS(text([&] { states.set_full_state("0.bias", row.keys[0], at::ones({5})); }), "it makes it in a step");
    train(engine);
    engine.step();
    EXPECT_EQ(states.full_state("again.weight", "step").item<float>(), 1);
    const at::Tensor values = at::arange(15, at::kFloat).view({5, 3}) / 8;
    const auto [begin, end] = states.local_range("0.weight");
    for (const std::string& key : row.keys) {
      EXPECT_EQ(states.full_state("0.weight", key).sizes(), (at::IntArrayRef{5, 3}));
      states.set_full_state("0.weight", key, values);
      EXPECT_TRUE(states.full_state("0.weight", key).equal(values)) << key;
      const at::Tensor mine = states.local_state("0.weight", key);
      if (end > begin) {
        EXPECT_TRUE(mine.view({-1}).equal(values.view({-1}).slice(0, begin, end)));
        states.set_local_state("0.weight", key, mine + 1);
      }
      EXPECT_TRUE(states.full_state("0.weight", key).equal(values + 1)) << key;
      const bool under_root = key == "exp_avg_sq" || key == "max_exp_avg_sq" || key == "square_avg";
      EXPECT_EQ(text([&] { states.set_full_state("0.weight", key, values - 1); }).empty(), !under_root) << key;
      states.set_full_state("0.weight", key, values + 1);
    }
    for (const at::Tensor& step : {at::tensor(-5), at::tensor(2.5), at::tensor(NAN), at::ones({2})}) {
      EXPECT_HAS(text([&] { states.set_full_state("0.weight", "step", step); }), "'s state 'step' is ");
    }
    states.set_full_state("0.weight", "step", at::tensor(7));
    EXPECT_EQ(states.full_state("0.weight", "step").item<float>(), 7);
    EXPECT_FALSE(states.full_state("1.weight", row.keys[0]).defined()) << "frozen";
    EXPECT_HAS(text([&] { states.full_state("0.bias", "sum"); }), "has no state 'sum' of this parameter");
    train(engine);
    engine.step();
    EXPECT_EQ(states.full_state("0.weight", "step").item<float>(), 8);
  };
  for (const Row& row : rows)
    for (const int ranks : {1, 3})
      for (int stage = 0; stage < 4; ++stage)
        testing::run_ranks(ranks, [&](int, const comm::GroupPtr& group) { check(row, stage, group); });
}

// Means over rows and columns are whole on every rank; of a vector there is a value for each element.
TEST(States, OfAdafactorAreByRowsAndColumns) {
  for (const int ranks : {1, 3})
    for (int stage = 0; stage < 4; ++stage)
      testing::run_ranks(ranks, [&](int, const comm::GroupPtr& group) {
        auto engine = initialize(states_model(), states_config(stage, false, "Adafactor"), comm::Mesh(group));
        train(engine);
        engine.step();
        const States states = engine.states();
        EXPECT_EQ(states.full_state("0.bias", "variance").sizes(), (at::IntArrayRef{5}));
        EXPECT_EQ(states.full_state("0.weight", "step").item<float>(), 1);
        EXPECT_HAS(error_of<c10::ValueError>([&] { states.full_state("0.weight", "row_var"); }),
                   "Adafactor's state 'row_var' is not one value for each element");
      });
}

// Values of torch.optim's classes of Python after the same seven updates.
TEST(States, WhatLibTorchHasNotUpdatesAsInPython) {
  struct Row {
    const char *type, *params;
    std::vector<float> values;
    std::vector<float> of_plane = {};  // where an update is of the whole matrix
  };
  const std::string decays = R"("weight_decay": 0.1, "lr": )";
  const std::vector<Row> rows{
      {"NAdam", R"(0.05, "momentum_decay": 0.01)", {-0.7547375F, -0.3460176F, 0.15246715F, 0.65997988F}},
      {"NAdam",
       R"(0.05, "decoupled_weight_decay": true, "maximize": true)",
       {-0.74724585F, -0.23636812F, 0.23488487F, 0.69821042F}},
      {"RAdam", R"(0.05, "betas": [0.9, 0.99])", {-0.86302459F, -0.41339743F, 0.1478346F, 0.75208145F}},
      {"RAdam", R"(0.05, "decoupled_weight_decay": true)", {-0.85597849F, -0.40934628F, 0.1473631F, 0.74609017F}},
      {"Adamax", "0.05", {-0.81983232F, -0.42654812F, 0.13920687F, 0.71283472F}},
      {"Adadelta", R"(0.5, "rho": 0.8)", {-0.79788274F, -0.30046389F, 0.19889534F, 0.69807613F}},
      {"ASGD",
       R"(0.05, "lambd": 0.01, "alpha": 0.5, "t0": 3)",
       {-0.763071418F, -0.314827472F, 0.157486513F, 0.661928654F}},
      {"Rprop", "0.05", {-0.902800024F, -0.402799994F, 0.137999982F, 0.671999931F}},
      {"Rprop",
       R"(0.02, "etas": [0.3, 1.5], "step_sizes": [0.01, 0.1], "maximize": true)",
       {-0.738750041F, -0.238750011F, 0.234999985F, 0.719999969F}},
      {"Adafactor",
       "0.05",
       {-0.76539588F, -0.295761675F, 0.177298635F, 0.646423876F},
       {-0.497709841F, -0.251576483F, 0.0202185959F, 0.256046176F, 0.497588575F, 0.710894823F}},
      {"Adafactor",
       R"(0.05, "beta2_decay": -0.5, "eps": [1e-5, 0.01], "d": 1.5, "maximize": true, "weight_decay": 0)",
       {-0.803198099F, -0.278858006F, 0.22568436F, 0.728311241F},
       {-0.487611413F, -0.234168053F, -0.0112348041F, 0.238458976F, 0.480545789F, 0.754396319F}}};
  struct Line : torch::nn::Module {
    at::Tensor line = register_parameter("line", at::arange(4, at::kFloat) * 0.5 - 0.8);
    at::Tensor plane = register_parameter("plane", at::arange(6, at::kFloat).view({2, 3}) * 0.25 - 0.5);
    at::Tensor forward(const at::Tensor& x, const at::Tensor& y) { return (line * x).sum() + (plane * y).sum(); }
  };
  const auto given = [&](const Row& row) {
    const std::string text = row.params;
    const bool says = row.type == std::string("Rprop") || text.find("weight_decay\": 0") != std::string::npos;
    return (says ? "\"lr\": " : decays) + text;
  };
  for (const Row& row : rows)
    for (const int stage : {0, 1, 2, 3}) {
      testing::run_ranks(stage == 0 ? 1 : 2, [&](int rank, const comm::GroupPtr& group) {
        const auto config = Config::from_json(c10::str(
            R"({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "zero_allow_untested_optimizer": true,
                "zero_optimization": {"stage": )",
            stage, R"(}, "optimizer": {"type": ")", row.type, R"(", "params": {)", given(row), "}}}"));
        auto engine = initialize(std::make_shared<Line>(), config, comm::Mesh(group));
        for (int64_t step = 0; step < 7; ++step) {
          const auto shift = static_cast<double>(step);
          engine
              .forward((at::arange(4, at::kFloat) + shift).sin(),
                       (at::arange(6, at::kFloat) + shift).cos().view({2, 3}))
              .backward();
          engine.step();
        }
        EXPECT_TRUE(at::allclose(engine.states().full_param("line"), at::tensor(row.values), 1e-5, 1e-6))
            << row.type << ", " << row.params << ", rank " << rank;
        if (row.of_plane.empty()) return;
        const at::Tensor plane = engine.states().full_param("plane").view({-1});
        EXPECT_TRUE(at::allclose(plane, at::tensor(row.of_plane), 1e-5, 1e-6)) << row.type << ", " << row.params;
      });
    }
}

// While the object lives; also where an exception ends it.
TEST(States, AreAwayInAScope) {
  for (const int ranks : {1, 2})
    for (const int stage : {1, 2, 3})
      testing::run_ranks(ranks, [&](int, const comm::GroupPtr& group) {
        const io::TempFolder disk;
        const auto config = Config::from_json(c10::str(
            R"({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": )",
            stage, R"(, "offload_optimizer": {"device": "none", "nvme_path": ")", disk.path(), R"("}}})"));
        auto engine = initialize(states_model(), config, comm::Mesh(group));
        const at::Tensor before = engine.states().full_param("0.weight").clone();
        const auto away = [&](bool throws) {
          auto held = engine.states_away(zero::all_state_kinds(), shard::Residence::Nvme);
          EXPECT_TRUE(engine.states_are_away());
          EXPECT_HAS(error_of<UsageError>([&] { engine.step(); }), "reload_states() first");
          if (throws) throw std::runtime_error("passes");
          held.end();
          EXPECT_FALSE(engine.states_are_away());
        };
        EXPECT_EQ(error_of([&] { away(true); }), "passes");
        EXPECT_FALSE(engine.states_are_away());
        away(false);
        EXPECT_TRUE(engine.states().full_param("0.weight").equal(before));
        train(engine);
        EXPECT_TRUE(engine.step());
      });
}

}  // namespace tessera::nn::states_tests
