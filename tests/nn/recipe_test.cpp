#include "tessera/nn/recipe.h"

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <cmath>
#include <cstdlib>
#include <mutex>

#include "tessera/nn/engine.h"
#include "tessera/nn/hooked.h"
#include "tessera/nn/optimizers.h"
#include "tessera/nn/whole_optimizer.h"
#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"
#include "tests/support/ranks.h"

namespace tessera::nn {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

// The generator is the program's, ranks are threads.
torch::nn::Sequential net() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(5, 7), torch::nn::LayerNorm(torch::nn::LayerNormOptions({7})),
                               torch::nn::Linear(7, 3));
}

bool is_vector(const std::string&, const at::Tensor& param) {
  return param.dim() < 2;
}

Config config_of_stage(int stage, const std::string& more = "") {
  return Config::from_json(
      R"({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "zero_allow_untested_optimizer": true,
          "zero_optimization": {"reduce_scatter": false, "stage": )" +
      std::to_string(stage) + "}, \"checkpoint\": {\"random_state\": true}" + more + "}");
}
std::string optimizer_of(const std::string& type, const std::string& more = "") {
  return R"(, "optimizer": {"type": ")" + type + R"(", "params": {"lr": 0.01, "weight_decay": 0.1)" + more + "}}";
}
const std::string kAdamW = optimizer_of("AdamW");

// Matrices, and vectors by a rate of their own and without decay, as torch's optimizers have them.
template <class Class, class Options>
std::shared_ptr<Optimizer> of_torch(torch::nn::Module& module, const Options& options) {
  std::vector<at::Tensor> matrices, vectors;
  for (const at::Tensor& param : module.parameters())
    (param.dim() < 2 ? vectors : matrices).push_back(param);
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(vectors, std::make_unique<Options>(Options(options).lr(0.02).weight_decay(0)));
  groups.emplace_back(matrices, std::make_unique<Options>(options));
  auto made = std::make_shared<Class>(groups, options);
  for (size_t i = 0; i < groups.size(); ++i)  // torch takes what is a class's default from `options`
    made->param_groups()[i].set_options(groups[i].options().clone());
  return made;
}

// The same of optimizers of whole parameters, which need no engine.
std::shared_ptr<Optimizer> of_whole(torch::nn::Module& module, const char* type) {
  std::vector<std::vector<at::Tensor>> params(2);
  for (const at::Tensor& param : module.parameters())
    params[param.dim() < 2 ? 0 : 1].push_back(param);
  const optim::OptimizerOptions options = optim::options_of_type(type);
  std::vector<optim::GroupOptions> groups{options.others.value_or(options.defaults), options.defaults};
  groups[0].lr = 0.02;
  groups[1].lr = 0.01;
  groups[1].weight_decay = 0.1;
  return std::make_shared<WholeOptimizer>(options.rule, groups, params);
}

// Those of make_optimizer().
std::shared_ptr<Optimizer> of_tessera(torch::nn::Module& module, const char* type) {
  const auto set = [](optim::GroupOptions& options) { options.lr = 0.01, options.weight_decay = 0.1; };
  const auto of_vectors = [](optim::GroupOptions& options) { options.lr = 0.02, options.weight_decay = 0; };
  return make_optimizer(type, module.named_parameters(),
                        {.set = set, .groups = {{.takes = is_vector, .set = of_vectors}}});
}

struct Case {
  const char* name;
  std::function<std::shared_ptr<Optimizer>(torch::nn::Module&)> plain;
  std::string native = {};  // groups of the recipe over the configuration's optimizer; else the optimizer itself
};

std::vector<Case> cases() {
  using namespace torch::optim;
  const auto adamw = [](auto& m) { return of_torch<AdamW>(m, AdamWOptions(0.01).weight_decay(0.1)); };
  const auto amsgrad = [](bool decoupled) {
    return optimizer_of("Adam", std::string(R"(, "torch_adam": true, "amsgrad": true, "adam_w_mode": )") +
                                    (decoupled ? "true" : "false"));
  };
  const auto rmsprop = RMSpropOptions(0.01).weight_decay(0.1).momentum(0.5).centered(true).alpha(0.9);
  return {
      {"groups", adamw, kAdamW},
      {"Adam with amsgrad",
       [](auto& m) { return of_torch<Adam>(m, AdamOptions(0.01).weight_decay(0.1).amsgrad(true)); }, amsgrad(false)},
      {"AdamW with amsgrad",
       [](auto& m) { return of_torch<AdamW>(m, AdamWOptions(0.01).weight_decay(0.1).amsgrad(true)); }, amsgrad(true)},
      {"configured RMSprop", [rmsprop](auto& m) { return of_torch<RMSprop>(m, rmsprop); },
       optimizer_of("RMSprop", R"(, "momentum": 0.5, "centered": true, "alpha": 0.9)")},
      {"Lamb", [](auto& m) { return of_whole(m, "Lamb"); }, optimizer_of("Lamb")},
      {"Muon", [](auto& m) { return of_whole(m, "Muon"); }, optimizer_of("muon")},
      {"Tessera's Adam", [](auto& m) { return of_tessera(m, "Adam"); }},
      {"Tessera's Lion", [](auto& m) { return of_tessera(m, "Lion"); }},
      {"Tessera's NAdam", [](auto& m) { return of_tessera(m, "NAdam"); }},
      {"Tessera's Lamb", [](auto& m) { return of_tessera(m, "Lamb"); }},
      {"AdamW", adamw},
      {"SGD", [](auto& m) { return of_torch<SGD>(m, SGDOptions(0.01).momentum(0.9).weight_decay(0.1)); }},
      {"RMSprop", [](auto& m) { return of_torch<RMSprop>(m, RMSpropOptions(0.01).weight_decay(0.1)); }},
      {"Adagrad", [](auto& m) {
         return of_torch<Adagrad>(m, AdagradOptions(0.01).lr_decay(0.1).initial_accumulator_value(0.5));
       }}};
}

double factor(int64_t updates) {
  return 1 / std::sqrt(1.0 + static_cast<double>(updates));
}

Recipe recipe_of(const Case& test, torch::nn::Module& module) {
  Recipe recipe;
  recipe.schedule = scaled_by(factor);
  if (!test.native.empty()) {
    recipe.groups = {
        {.takes = is_vector, .set = [](optim::GroupOptions& group) { group.lr = 0.02, group.weight_decay = 0; }}};
  } else {
    recipe.optimizer = test.plain(module);
  }
  return recipe;
}

at::Tensor batch(int64_t step) {
  return at::arange(20, at::kFloat).view({4, 5}).add(static_cast<double>(step)).sin();
}

std::vector<at::Tensor> values_of(torch::nn::Module& module) {
  std::vector<at::Tensor> values;
  for (const at::Tensor& param : module.parameters())
    values.push_back(param.detach().clone());
  return values;
}

// Masters in fp32 of what `dtype` has of the model, and a copy of them in it that computes.
std::vector<at::Tensor> plain_loop(const Case& test, int64_t steps, at::ScalarType dtype = at::kFloat) {
  auto model = net(), computes = net();
  computes->to(dtype);
  {
    const at::NoGradGuard no_grad;
    const auto masters = model->parameters(), copies = computes->parameters();
    for (size_t i = 0; i < masters.size(); ++i)
      at::Tensor(masters[i]).copy_(copies[i]);
  }
  const auto optimizer = test.plain(*model);
  const std::vector<double> rates{0.02, 0.01};
  for (int64_t step = 0; step < steps; ++step) {
    for (size_t i = 0; i < rates.size(); ++i)
      optimizer->param_groups()[i].options().set_lr(rates[i] * factor(step));
    computes->zero_grad();
    computes->forward(batch(step).to(dtype)).square().mean().backward();
    const auto masters = model->parameters(), copies = computes->parameters();
    for (size_t i = 0; i < masters.size(); ++i)
      masters[i].mutable_grad() = copies[i].grad().to(at::kFloat);
    optimizer->step();
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < masters.size(); ++i)
      at::Tensor(copies[i]).copy_(masters[i]);
  }
  return values_of(*model);
}

// From a checkpoint in `from`, or the beginning, to step `to`; saves in `folder`.
std::vector<at::Tensor> train(const Case& test, int stage, const comm::GroupPtr& group, int64_t to,
                              const std::string& from, const std::string& folder) {
  auto model = net();
  auto engine = initialize(model, config_of_stage(stage, test.native), comm::Mesh(group), recipe_of(test, *model));
  if (!from.empty()) {
    const Loaded loaded = engine.load_checkpoint(from);
    EXPECT_TRUE(loaded);
    EXPECT_EQ(loaded.client.at("epoch").toInt(), 7);
    EXPECT_TRUE(loaded.client.at("losses").toTensor().equal(at::ones({2})));
    const checkpoint::Reader read = checkpoint::open(from);  // the same without the engine
    EXPECT_EQ(checkpoint::client_values(read).at("epoch").toInt(), 7);
    EXPECT_EQ(engine::counters_of(read).global_steps, engine.global_steps());
    for (const checkpoint::ParamRecord& param : read.manifest().params)
      EXPECT_EQ(read.read_whole(param.name, "weight").sizes(), at::IntArrayRef(param.shape));
  }
  for (int64_t step = engine.core().global_steps(); step < to; ++step) {
    EXPECT_NEAR(engine.lr()[0], 0.02 * factor(step), 1e-12);
    EXPECT_NEAR(engine.lr()[1], 0.01 * factor(step), 1e-12);
    engine.forward(batch(step)).square().mean().backward();
    EXPECT_TRUE(engine.step());
  }
  if (!folder.empty()) {
    engine.save_checkpoint(folder, {}, {{"epoch", int64_t{7}}, {"losses", at::ones({2})}});
  }
  const GatheredParameters whole(engine.core(), model->parameters());
  return values_of(*model);
}

void expect_close(const std::vector<at::Tensor>& values, const std::vector<at::Tensor>& expected, double bound,
                  const std::string& what) {
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_LE((values[i] - expected[i]).abs().max().item<double>(), bound) << what << ", parameter " << i;
}

// The bound: a few roundings of fp32 values near 1. A client's optimizer does what it does alone, so its bits are the same where
// no rank cuts a vector of eight elements.
TEST(Recipe, TrainsAsThePlainLoopAndGoesOnAnywhere) {
  for (const Case& test : cases()) {
    const auto expected = plain_loop(test, 4);
    for (int stage = 0; stage <= 3; ++stage) {
      const io::TempFolder folder;
      for (const int ranks : {1, 2}) {
        const std::string what = std::string(test.name) + ", stage " + std::to_string(stage);
        testing::run_ranks(ranks, [&](int, const comm::GroupPtr& group) {
          const std::string mine = folder / std::to_string(ranks);
          expect_close(train(test, stage, group, 4, "", ""), expected, 1e-6, what);
          train(test, stage, group, 2, "", mine);
          expect_close(train(test, stage, group, 4, mine, ""), expected, 1e-6, what + ", resumed");
        });
      }
      for (const int ranks : {1, 2})
        testing::run_ranks(ranks, [&](int, const comm::GroupPtr& group) {
          expect_close(train(test, 3 - stage, group, 4, folder / std::to_string(3 - ranks), ""), expected, 1e-6,
                       std::string(test.name) + ", saved by other ranks and stage");
        });
    }
  }
}

// The optimizer's masters have fp32; parameters and gradients 16 bits.
TEST(Recipe, TrainsMastersOfBf16AsThePlainLoop) {
  for (const Case& test : cases()) {
    const auto expected = plain_loop(test, 3, at::kBFloat16);
    for (int stage = 0; stage <= 3; ++stage)
      for (const int ranks : {1, 2})
        testing::run_ranks(ranks, [&](int, const comm::GroupPtr& group) {
          auto model = net();
          auto engine = initialize(model, config_of_stage(stage, R"(, "bf16": {"enabled": true})" + test.native),
                                   comm::Mesh(group), recipe_of(test, *model));
          for (int64_t step = 0; step < 3; ++step) {
            engine.forward(batch(step).to(at::kBFloat16)).square().mean().backward();
            EXPECT_TRUE(engine.step());
          }
          std::vector<at::Tensor> masters;
          for (const auto& param : model->named_parameters())
            masters.push_back(engine.states().full_param(param.key()).clone());
          expect_close(masters, expected, 1e-6, c10::str(test.name, ", bf16, stage ", stage, ", ", ranks, " ranks"));
        });
  }
}

TEST(Recipe, GroupsTakeWhatTheyNameAndNothingElse) {
  const auto built = [](std::vector<ParamGroup> groups, const std::shared_ptr<Optimizer>& optimizer = nullptr) {
    auto model = net();
    return initialize(model, config_of_stage(0, kAdamW), comm::Mesh(),
                      Recipe{.groups = std::move(groups), .optimizer = optimizer});
  };
  auto model = net();
  const auto params = model->parameters();
  auto engine = initialize(model, config_of_stage(0, kAdamW), comm::Mesh(),
                           Recipe{.groups = {{.params = {params[0]}, .frozen = true}, {.takes = is_vector}}});
  EXPECT_FALSE(params[0].requires_grad());
  EXPECT_EQ(engine.lr().size(), 3U);
  const std::vector<int> expected{-1, 1, 1, 1, 2, 1};
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_EQ(engine.core().params()[i].group, expected[i]) << i;

  EXPECT_HAS(testing::error_of<c10::ValueError>([&] { built({{.takes = is_vector}, {.takes = is_vector}}); }),
             "[initialize] param group 1 takes no parameter");
  EXPECT_HAS(testing::error_of<c10::ValueError>([&] { built({{.params = {at::ones({2})}}}); }),
             "param group 0 lists a tensor of shape [2] that is no parameter of the module");
  EXPECT_HAS(testing::error_of<c10::ValueError>([&] {
               auto other = net();
               const at::Tensor bias = other->parameters()[1];
               initialize(other, config_of_stage(0, kAdamW), comm::Mesh(),
                          Recipe{.groups = {{.params = {bias}}, {.params = {bias}}}});
             }),
             "param groups 0 and 1 both list '0.bias'");
  EXPECT_HAS(testing::error_of<c10::ValueError>(
                 [&] { built({{.takes = is_vector}}, std::make_shared<torch::optim::SGD>(net()->parameters(), 0.1)); }),
             "has its groups already");
}

// Of what is named: the matrices of each group, then the rest of it.
struct ResidualImpl : Hooked<ResidualImpl, at::Tensor(at::Tensor)> {
  ResidualImpl() { line = register_module("line", torch::nn::Linear(5, 5)); }
  at::Tensor forward_impl(const at::Tensor& x) { return x + line(x); }
  torch::nn::Linear line{nullptr};
};

// A frozen layer that is thawed, in the group that it is of, and a block that comes to the model.
struct Growing : torch::nn::Module {
  Growing() {
    first = register_module("first", torch::nn::Linear(5, 5));
    last = register_module("last", torch::nn::Linear(5, 3));
    fill(*this);
    for (at::Tensor& param : first->parameters())
      param.requires_grad_(false);
  }
  std::vector<at::Tensor> grow() {
    block = register_module("block", std::make_shared<ResidualImpl>());
    fill(*block);
    for (at::Tensor& param : first->parameters())
      param.requires_grad_(true);
    return block->parameters();
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = torch::tanh(first(x));
    return last(block ? block->forward(y) : y).square().mean();
  }
  static void fill(torch::nn::Module& module) {
    const at::NoGradGuard no_grad;
    for (at::Tensor& param : module.parameters())
      param.copy_(at::linspace(-0.3, 0.5, param.numel()).view(param.sizes()));
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  std::shared_ptr<ResidualImpl> block;
};

// Of a module that came later a group may have a part: the rest is named, and nothing is trained.
TEST(Recipe, APartOfWhatCameMayBeInAGroup) {
  for (int stage = 0; stage <= 3; ++stage)
    testing::run_ranks(2, [&](int, const comm::GroupPtr& group) {
      auto model = std::make_shared<Growing>();
      auto engine = initialize(model, config_of_stage(stage, kAdamW), comm::Mesh(group));
      engine.add_param_group({model->grow().front()}, engine.groups().front());
      engine.forward(batch(0)).backward();
      EXPECT_HAS(testing::error_of<UsageError>([&] { engine.step(); }),
                 "block.line.bias: added after the engine was built");
    });
}

TEST(Recipe, ParametersMayBeginToBeTrained) {
  using torch::optim::AdamW;
  using torch::optim::AdamWOptions;
  constexpr int64_t kSteps = 4, kGrows = 2;
  Growing plain;
  AdamW optimizer(plain.last->parameters(), AdamWOptions(0.01).weight_decay(0.1));
  for (int64_t step = 0; step < kSteps; ++step) {
    if (step == kGrows) {
      optimizer.add_param_group(plain.grow());
      for (const at::Tensor& param : plain.first->parameters())
        optimizer.param_groups()[0].params().push_back(param);
      optimizer.param_groups().back().set_options(std::make_unique<AdamWOptions>(AdamWOptions(0.02).weight_decay(0)));
    }
    optimizer.zero_grad();
    plain.forward(batch(step)).backward();
    optimizer.step();
  }
  for (int stage = 0; stage <= 3; ++stage)
    for (const int ranks : {1, 2})
      testing::run_ranks(ranks, [&](int, const comm::GroupPtr& group) {
        const std::string what = c10::str("stage ", stage, ", ", ranks, " ranks");
        auto model = std::make_shared<Growing>();
        auto engine = initialize(model, config_of_stage(stage, kAdamW), comm::Mesh(group));
        for (int64_t step = 0; step < kSteps; ++step) {
          if (step == kGrows) {
            optim::GroupOptions options = engine.groups().front();
            options.lr = 0.02;
            options.weight_decay = 0;
            EXPECT_EQ(engine.add_param_group(model->grow(), options), 1);
            for (const auto& wrong :
                 {model->last->parameters(), model->first->parameters(), model->block->parameters()})
              EXPECT_HAS(testing::error_of<c10::ValueError>([&] { engine.add_param_group(wrong, options); }),
                         "is in param group");
            EXPECT_HAS(testing::error_of<c10::ValueError>([&] { engine.add_param_group({at::ones({2})}, options); }),
                       "a tensor of shape [2] is no parameter of the module");
          }
          engine.forward(batch(step)).backward();
          EXPECT_TRUE(engine.step());
        }
        EXPECT_EQ(engine.lr(), (std::vector<double>{0.01, 0.02}));
        const GatheredParameters whole(engine, model->parameters());
        expect_close(values_of(*model), values_of(plain), 1e-6, what);
      });
}

using Change = std::function<void(optim::GroupOptions&)>;

struct Wrong {
  Change change;
  std::string said;
  std::string optimizer = "AdamW";
};

// As the configuration would be; wherever it comes from, all ranks have the error, and nothing has changed.
TEST(Recipe, HyperParametersOfGroupsHaveTheBoundsOfTheConfiguration) {
  const double nan = std::nan("");
  const std::vector<Wrong> wrongs{
      {[](auto& g) { g.lr = -1; }, "lr must be >= 0, got -1"},
      {[=](auto& g) { g.lr = nan; }, "lr must be >= 0, got nan"},
      {[](auto& g) { g.lr = INFINITY; }, "lr must be a finite number, got inf"},
      {[](auto& g) { g.beta2 = 1; }, "beta 1 must be in [0, 1), got 1"},
      {[=](auto& g) { g.weight_decay = nan; }, "weight_decay must be >= 0, got nan"},
      {[](auto& g) { g.momentum = -1; }, "momentum must be >= 0, got -1", "SGD"},
      {[](auto& g) { g.min_coeff = 20; }, "min_coeff must be above 0 and no more than max_coeff", "Lamb"},
      {[](auto& g) { g.momentum = 1; }, "momentum must be in [0, 1), got 1", "Muon"}};
  for (const Wrong& wrong : wrongs)
    for (const int stage : {0, 1, 2, 3})
      for (const int ranks : {1, 2})
        testing::run_ranks(ranks, [&](int rank, const comm::GroupPtr& group) {
          SCOPED_TRACE(c10::str(wrong.said, ", stage ", stage, ", ", ranks, " ranks"));
          const Config config = config_of_stage(stage, optimizer_of(wrong.optimizer));
          const auto start = [&](const std::vector<ParamGroup>& groups) {
            return initialize(std::make_shared<Growing>(), config, comm::Mesh(group), Recipe{.groups = groups});
          };
          const auto takes = [](const std::string&, const at::Tensor&) { return true; };
          EXPECT_HAS(testing::error_of<c10::ValueError>([&] { start({{.takes = takes, .set = wrong.change}}); }),
                     wrong.said);
          auto engine = start({});
          const auto before = engine.states().full_param("last.weight").clone();
          const bool alone = rank == ranks - 1;  // all ranks have the error of one
          auto& options = engine.groups().back();
          const optim::GroupOptions good = options;
          if (alone) wrong.change(options);
          engine.forward(batch(0)).backward();
          EXPECT_HAS(testing::error_of([&] { engine.step(); }), wrong.said);
          options = good;
          if (alone) engine.groups().push_back(good);
          EXPECT_HAS(testing::error_of([&] { engine.step(); }), "add_param_group() makes one more");
          const io::TempFolder folder;
          EXPECT_HAS(testing::error_of<c10::ValueError>([&] { engine.save_checkpoint(folder.path()); }),
                     "add_param_group() makes one more");
          if (alone) engine.groups().pop_back();
          EXPECT_TRUE(engine.states().full_param("last.weight").equal(before));
          EXPECT_TRUE(engine.step());
          optim::GroupOptions added = good;
          wrong.change(added);
          const auto params = engine.module().grow();
          const size_t count = engine.groups().size();
          EXPECT_HAS(testing::error_of<c10::ValueError>([&] { engine.add_param_group(params, added); }), wrong.said);
          EXPECT_EQ(engine.groups().size(), count);
        });
}

TEST(Recipe, MuonIsForMatricesInside) {
  const auto groups_of = [](const std::vector<ParamGroup>& groups) {
    auto model = net();
    auto engine = initialize(model, config_of_stage(1, optimizer_of("Muon")), comm::Mesh(), Recipe{.groups = groups});
    std::vector<int> found;
    for (const auto& spec : engine.core().params())
      found.push_back(spec.group);
    std::string kinds;
    for (const auto& group : engine.core().groups())
      kinds += group.use_muon ? "m" : "v";
    return std::pair(found, kinds);
  };
  const auto first = [](const std::string& name, const at::Tensor&) { return name.starts_with("0."); };
  EXPECT_EQ(groups_of({}), std::pair(std::vector<int>({0, 1, 1, 1, 0, 1}), std::string("mv")));
  EXPECT_EQ(groups_of({{.takes = first}}), std::pair(std::vector<int>({0, 1, 3, 3, 2, 3}), std::string("mvmv")));
  EXPECT_EQ(groups_of({{.takes = first, .use_muon = false}}),
            std::pair(std::vector<int>({0, 0, 2, 2, 1, 2}), std::string("vmv")));
  EXPECT_HAS(testing::error_of<c10::ValueError>([&] { groups_of({{.takes = first, .use_muon = true}}); }),
             "Muon updates matrices, and '0.bias' has 1 dimensions");
}

TEST(Recipe, EmptyFunctionsAreNone) {
  EXPECT_HAS(testing::error_of<c10::ValueError>([] { scaled_by({}); }), "[schedule] scaled_by: the function is empty");
  auto model = net();
  auto engine = initialize(model, config_of_stage(3, kAdamW), comm::Mesh(), Recipe{.units = {}});
  EXPECT_EQ(engine.module_state_dict().size(), model->parameters().size());
}

TEST(Recipe, TypesThatCppHasNotAreNamed) {
  const auto build = [](const std::string& type) {
    initialize(net(), config_of_stage(0, optimizer_of(type)), comm::Mesh());
  };
  EXPECT_HAS(testing::error_of<c10::ValueError>([&] { build("rprop"); }),
             "did you mean \"Rprop\"?); set optimizer.type to one of Adam, AdamW, SGD, Lion, Adagrad, Lamb, Muon, Ada");
  EXPECT_HAS(testing::error_of<c10::NotImplementedError>([&] { build("SparseAdam"); }), "takes sparse gradients only");
  for (const auto& [type, near] : {std::pair("rmsprop", "RMSprop"), {"Adamm", "Adam"}, {"Loin", "Lion"}})
    EXPECT_HAS(testing::error_of<c10::ValueError>([&] { build(type); }),
               c10::str("('", type, "' is none: did you mean \"", near, "\"?); set optimizer.type to one of"));
  EXPECT_HAS(testing::error_of<c10::ValueError>([&] { build("Nothing"); }), "('Nothing' is none); set");
  const auto scheduled = [](const std::string& type) {
    Config config = config_of_stage(0, kAdamW);
    config.scheduler.type = type;
    return testing::error_of<c10::ValueError>([&] { initialize(net(), config, comm::Mesh()); });
  };
  EXPECT_HAS(scheduled("LambdaLR"),
             "(LambdaLR does in Python only); set scheduler.type to one of WarmupLR, WarmupDecayLR");
  EXPECT_HAS(scheduled("LambdaLR"), "CyclicLR, OneCycleLR, or give Recipe::schedule one of your own");
  EXPECT_HAS(scheduled("steplr"), "('steplr' is none: did you mean \"StepLR\"?)");
  EXPECT_HAS(scheduled("WarmupDecyLR"), "('WarmupDecyLR' is none: did you mean \"WarmupDecayLR\"?)");
  EXPECT_HAS(testing::error_of<c10::NotImplementedError>([&] { build("LBFGS"); }), "needs a closure");
}

class Broken : public Schedule {
 public:
  explicit Broken(std::vector<double> rates) : rates_(std::move(rates)) {}
  std::vector<double> rates(int64_t, const std::vector<double>&) override { return rates_; }

 private:
  const std::vector<double> rates_;
};

TEST(Recipe, RatesOfAScheduleAreChecked) {
  for (const auto& rates : {std::vector<double>{}, {0.1, 0.2}, {-0.1}, {std::nan("")}})
    EXPECT_HAS(testing::error_of<c10::ValueError>([&] {
                 initialize(net(), config_of_stage(0, kAdamW), comm::Mesh(),
                            Recipe{.schedule = std::make_shared<Broken>(rates)});
               }),
               "[schedule] the schedule gives");
}

// One that the program tells how it goes.
struct Lowered : Schedule {
  std::vector<double> rates(int64_t, const std::vector<double>& initial) override {
    std::vector<double> rates = initial;
    for (double& rate : rates)
      rate *= scale;
    return rates;
  }
  std::string state() const override { return std::to_string(scale); }
  void load_state(const std::string& state) override { scale = std::stod(state); }
  double scale = 1;
};

TEST(Recipe, AScheduleHasItsStateBackFromACheckpoint) {
  for (int stage = 0; stage <= 3; ++stage) {
    const io::TempFolder folder;
    for (const bool saves : {true, false})
      testing::run_ranks(2, [&](int, const comm::GroupPtr& group) {
        const auto schedule = std::make_shared<Lowered>();
        auto engine = initialize(net(), config_of_stage(stage, kAdamW), comm::Mesh(group), {.schedule = schedule});
        if (saves) schedule->scale = 0.25;
        if (!saves) {
          EXPECT_TRUE(engine.load_checkpoint(folder.path()));
          EXPECT_EQ(schedule->scale, 0.25);
          EXPECT_EQ(engine.lr(), (std::vector<double>{0.0025})) << "of the next update";
        }
        engine.forward(batch(0)).square().mean().backward();
        engine.step();
        EXPECT_EQ(engine.lr(), (std::vector<double>{0.0025}));
        if (saves) engine.save_checkpoint(folder.path());
      });
  }
}

// What dropout draws after a resume is what it would have drawn, on each rank. Ranks that are threads share a generator.
TEST(Recipe, GeneratorsGoOnWhereTheyWereSaved) {
  if (!testing::is_rank()) {
    const io::TempFolder folder;
    for (const auto& result : testing::run_processes(2, {{"TESSERA_TEST_FOLDER", folder.path()}}))
      EXPECT_EQ(result.exit_code, 0) << result.output;
    return;
  }
  for (int stage = 0; stage <= 3; ++stage) {
    const std::string folder = c10::str(std::getenv("TESSERA_TEST_FOLDER"), "/", stage);
    auto engine = initialize(net(), config_of_stage(stage, kAdamW));
    torch::manual_seed(10 + engine.rank());
    engine.save_checkpoint(folder);
    const at::Tensor next = at::rand({4});
    torch::manual_seed(7);
    EXPECT_TRUE(engine.load_checkpoint(folder));
    EXPECT_TRUE(at::rand({4}).equal(next)) << stage;
  }
}

}  // namespace
}  // namespace tessera::nn
