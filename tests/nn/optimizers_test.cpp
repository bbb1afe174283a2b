#include "tessera/nn/optimizers.h"

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim.h>
#include <torch/serialize.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "tessera/nn/engine.h"
#include "tessera/optim/schedule.h"
#include "tests/support/errors.h"

// Of its own: other files have a train(), too.
namespace tessera::nn::optimizers_tests {
namespace {

using optim::GroupOptions;
using testing::error_of;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

using Set = std::function<void(GroupOptions&)>;

torch::nn::Sequential net(at::ScalarType dtype = at::kFloat) {
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(5, 7), torch::nn::LayerNorm(torch::nn::LayerNormOptions({7})),
                              torch::nn::Linear(7, 3));
  model->to(dtype);
  return model;
}

bool is_vector(const std::string&, const at::Tensor& param) {
  return param.dim() < 2;
}

// Vectors have a rate of their own and no decay.
std::vector<ParamGroup> vectors_apart() {
  return {{.takes = is_vector, .set = [](GroupOptions& group) { group.lr = 0.02, group.weight_decay = 0; }}};
}

void set_decay(GroupOptions& group) {
  group.lr = 0.01;
  group.weight_decay = 0.1;
}

std::shared_ptr<Optimizer> made(const std::string& type, torch::nn::Sequential& model, const Set& set = set_decay) {
  return make_optimizer(type, model->named_parameters(), {.set = set, .groups = vectors_apart()});
}

// Gradients that depend on the step only, so that what differs is the optimizer. The third parameter has one in every second step.
void give_gradients(torch::nn::Sequential& model, int64_t step) {
  const auto params = model->parameters();
  for (size_t i = 0; i < params.size(); ++i) {
    const auto phase = static_cast<double>(step) + 0.1 * static_cast<double>(i);
    const at::Tensor grad = at::arange(params[i].numel(), at::kFloat).add(phase).sin().view(params[i].sizes());
    params[i].mutable_grad() = i == 2 && step % 2 == 1 ? at::Tensor() : grad.to(params[i].scalar_type()).clone();
  }
}

void train(torch::nn::Sequential& model, Optimizer& optimizer, int64_t from, int64_t to) {
  for (int64_t step = from; step < to; ++step) {
    give_gradients(model, step);
    optimizer.step();
    optimizer.zero_grad();
  }
}

void copy_values(torch::nn::Sequential& to, torch::nn::Sequential& from) {
  const at::NoGradGuard no_grad;
  const auto mine = to->parameters(), others = from->parameters();
  for (size_t i = 0; i < mine.size(); ++i)
    at::Tensor(mine[i]).copy_(others[i]);
}

bool same_bits(torch::nn::Sequential& a, torch::nn::Sequential& b) {
  const auto mine = a->parameters(), others = b->parameters();
  bool same = true;
  for (size_t i = 0; i < mine.size(); ++i)
    same = same && mine[i].equal(others[i]);
  return same;
}

void expect_close(torch::nn::Sequential& a, torch::nn::Sequential& b, const std::string& what) {
  const auto mine = a->parameters(), others = b->parameters();
  for (size_t i = 0; i < mine.size(); ++i)
    EXPECT_TRUE(at::allclose(mine[i], others[i], 1e-5, 1e-6)) << what << ", parameter " << i;
}

std::string saved(const Optimizer& optimizer) {
  std::ostringstream stream;
  torch::save(optimizer, stream);
  return stream.str();
}

void load(Optimizer& optimizer, const std::string& archive) {
  std::istringstream stream(archive);
  torch::load(optimizer, stream);
}

template <class Class, class Options>
std::shared_ptr<Optimizer> of_torch(torch::nn::Sequential& model, const Options& options) {
  std::vector<at::Tensor> matrices, vectors;
  for (const at::Tensor& param : model->parameters())
    (param.dim() < 2 ? vectors : matrices).push_back(param);
  const std::vector<OptimizerParamGroup> groups{OptimizerParamGroup(vectors), OptimizerParamGroup(matrices)};
  auto result = std::make_shared<Class>(groups, options);
  static_cast<Options&>(result->param_groups()[0].options()).lr(0.02).weight_decay(0);
  return result;
}

struct Pair {
  std::string type;
  Set set;
  std::function<std::shared_ptr<Optimizer>(torch::nn::Sequential&)> theirs;
  std::string config = "";  // of the type in an engine, beside rate and decay
};

std::vector<Pair> pairs() {
  using namespace torch::optim;
  const auto with = [](const Set& more) { return [more](GroupOptions& group) { set_decay(group), more(group); }; };
  return {{"Adam", with([](GroupOptions& g) { g.beta1 = 0.8, g.beta2 = 0.95; }),
           [](auto& m) { return of_torch<Adam>(m, AdamOptions(0.01).weight_decay(0.1).betas({0.8, 0.95})); },
           R"(, "adam_w_mode": false, "betas": [0.8, 0.95])"},
          {"AdamW", set_decay, [](auto& m) { return of_torch<AdamW>(m, AdamWOptions(0.01).weight_decay(0.1)); }},
          {"adamw", [](GroupOptions& g) { g.lr = 0.01; },
           [](auto& m) { return of_torch<AdamW>(m, AdamWOptions(0.01)); }, R"(, "weight_decay": 0.01)"},
          {"SGD", with([](GroupOptions& g) { g.momentum = 0.9, g.nesterov = true; }),
           [](auto& m) { return of_torch<SGD>(m, SGDOptions(0.01).momentum(0.9).weight_decay(0.1).nesterov(true)); },
           R"(, "momentum": 0.9, "nesterov": true)"},
          {"Adagrad", with([](GroupOptions& g) { g.lr_decay = 0.1; }),
           [](auto& m) { return of_torch<Adagrad>(m, AdagradOptions(0.01).weight_decay(0.1).lr_decay(0.1)); },
           R"(, "lr_decay": 0.1)"}};
}

// Every type that is no class of torch::optim, with what a configuration says for the same.
std::vector<Pair> others() {
  return {{"FusedAdam", set_decay, {}, ""}, {"Lion", set_decay, {}, ""},    {"Lamb", set_decay, {}, ""},
          {"Muon", set_decay, {}, ""},      {"NAdam", set_decay, {}, ""},   {"RAdam", set_decay, {}, ""},
          {"Adamax", set_decay, {}, ""},    {"Adadelta", set_decay, {}, ""}};
}

std::vector<Pair> all_types() {
  std::vector<Pair> all = pairs();
  for (const Pair& pair : others())
    all.push_back(pair);
  return all;
}

}  // namespace

// Trained by both; archives are exchanged amid it, both ways.
TEST(Optimizers, NumbersAndArchivesAreTorchs) {
  for (const Pair& pair : pairs()) {
    auto model = net(), plain = net();
    const auto mine = made(pair.type, model, pair.set), theirs = pair.theirs(plain);
    train(model, *mine, 0, 3);
    train(plain, *theirs, 0, 3);
    expect_close(model, plain, pair.type);
    const auto other = pair.theirs(model), again = made(pair.type, plain, [](GroupOptions&) {});
    load(*other, saved(*mine));
    load(*again, saved(*theirs));
    EXPECT_EQ(again->param_groups()[0].options().get_lr(), 0.02);
    EXPECT_EQ(again->param_groups()[1].options().get_lr(), 0.01);
    train(model, *other, 3, 6);
    train(plain, *again, 3, 6);
    expect_close(model, plain, pair.type + ", exchanged");
  }
}

// An engine that does not partition, with the same groups; in fp32 there are no other masters.
TEST(Optimizers, AnEngineGivesTheSameBits) {
  for (const Pair& pair : all_types()) {
    auto model = net(), served = net();
    const auto alone = made(pair.type, model, pair.set);
    const std::string type = pair.type == "FusedAdam" ? "AdamW" : pair.type;
    const std::string decay = pair.config.find("weight_decay") == std::string::npos ? R"(, "weight_decay": 0.1)" : "";
    const auto config =
        Config::from_json(R"({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "optimizer": {"type": ")" +
                          type + R"(", "params": {"lr": 0.01)" + decay + pair.config + "}}}");
    auto engine = initialize(served, config, comm::Mesh(), Recipe{.groups = vectors_apart()});
    for (int64_t step = 0; step < 3; ++step) {
      const at::Tensor x = at::arange(20, at::kFloat).view({4, 5}).add(static_cast<double>(step)).sin();
      model->forward(x).square().mean().backward();
      alone->step();
      alone->zero_grad();
      engine.forward(x).square().mean().backward();
      engine.step();
    }
    EXPECT_TRUE(same_bits(model, served)) << pair.type;
  }
}

TEST(Optimizers, TypesWithAKernelUpdate16BitParametersInFp32) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf})
    for (const Pair& pair : all_types()) {
      if (pair.type != "FusedAdam" && !optim::is_native_type(pair.type)) continue;
      auto low = net(dtype), high = net();
      const auto optimizer = made(pair.type, low, pair.set), reference = made(pair.type, high, pair.set);
      for (int64_t step = 0; step < 4; ++step) {
        copy_values(high, low);
        give_gradients(low, step);
        for (size_t i = 0; i < low->parameters().size(); ++i)
          high->parameters()[i].mutable_grad() =
              low->parameters()[i].grad().defined() ? low->parameters()[i].grad().to(at::kFloat) : at::Tensor();
        optimizer->step();
        reference->step();
        auto rounded = net(dtype);
        copy_values(rounded, high);
        EXPECT_TRUE(same_bits(low, rounded)) << pair.type << ", " << dtype << ", step " << step;
      }
    }
}

TEST(Optimizers, AnArchiveGoesOnWithTheSameBits) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    std::vector<Pair> types = all_types();
    types.push_back({"RMSprop", set_decay, {}, ""});
    for (const Pair& pair : types) {
      if (pair.type == "Lamb" && dtype == at::kHalf) continue;  // its eps is 0 there: what has no gradient becomes NaN
      auto model = net(dtype), copy = net(dtype);
      const auto first = made(pair.type, model, pair.set);
      train(model, *first, 0, 3);
      first->param_groups()[1].options().set_lr(0.03);
      copy_values(copy, model);
      const auto second = made(pair.type, copy, [](GroupOptions&) {});
      train(copy, *second, 0, 1);  // the states of this are replaced
      copy_values(copy, model);
      load(*second, saved(*first));
      EXPECT_EQ(second->param_groups()[1].options().get_lr(), 0.03);
      train(model, *first, 3, 6);
      train(copy, *second, 3, 6);
      EXPECT_TRUE(same_bits(model, copy)) << pair.type << ", " << dtype;
      EXPECT_FALSE(same_bits(model, *std::make_unique<torch::nn::Sequential>(net(dtype)))) << pair.type;
    }
  }
}

TEST(Optimizers, StochasticRoundingIsAskedForAndRepeats) {
  const auto run = [](uint64_t seed, int64_t split, bool stochastic) {
    torch::OrderedDict<std::string, at::Tensor> params;
    for (const char* name : {"a", "b"})
      params.insert(name, at::ones({5000}, at::kBFloat16).requires_grad_(true));
    const auto make = [&](uint64_t of) {
      return make_optimizer("AdamW", params,
                            {.set = [](GroupOptions& group) { group.lr = 1e-4, group.weight_decay = 0; },
                             .stochastic_rounding = stochastic,
                             .seed = of});
    };
    auto optimizer = make(seed);
    for (int64_t step = 0; step < 20; ++step) {
      if (step == split) {
        const std::string archive = saved(*optimizer);
        optimizer = make(77);  // the archive has the seed
        load(*optimizer, archive);
      }
      for (const auto& param : params)
        param.value().mutable_grad() = at::ones_like(param.value());
      optimizer->step();
    }
    return at::cat(params.values()).detach().to(at::kFloat);
  };
  EXPECT_TRUE(run(0, 7, false).eq(1).all().item<bool>()) << "each step is lost";
  const at::Tensor drawn = run(0, 7, true);
  EXPECT_NEAR(drawn.mean().item<double>(), 1 - 20e-4, 2e-4);
  EXPECT_FALSE(drawn.slice(0, 0, 5000).equal(drawn.slice(0, 5000)));
  EXPECT_TRUE(drawn.equal(run(0, 13, true)));
  EXPECT_FALSE(drawn.equal(run(1, 7, true)));
}

TEST(Optimizers, GroupsMayBeAddedFrozenAndChanged) {
  for (const char* type : {"Adam", "Lamb", "Muon", "NAdam"}) {
    auto model = net();
    const auto params = model->parameters();
    std::vector<ParamGroup> groups = vectors_apart();
    groups.push_back({.params = {params[0]}, .frozen = true});
    const auto optimizer = make_optimizer(type, model->named_parameters(), {.set = set_decay, .groups = groups});
    EXPECT_FALSE(params[0].requires_grad());
    size_t count = 0;
    for (const auto& group : optimizer->param_groups())
      count += group.params().size();
    EXPECT_EQ(count, params.size()) << "what is frozen may be thawed";

    at::Tensor added = at::ones({2, 2}).requires_grad_(true);
    optimizer->add_param_group(OptimizerParamGroup({added}));
    EXPECT_EQ(group_options(optimizer->param_groups().back()).weight_decay, 0.1);
    group_options(optimizer->param_groups().back()).lr = 0;
    added.mutable_grad() = at::ones({2, 2});
    const at::Tensor before = params[5].detach().clone();
    const at::Tensor loss = optimizer->step([&] {
      const at::Tensor value = model->forward(at::ones({2, 5})).square().sum();
      value.backward();
      return value;
    });
    EXPECT_GT(loss.item<double>(), 0);
    EXPECT_TRUE(added.equal(at::ones({2, 2}))) << type;
    EXPECT_FALSE(params[5].equal(before)) << type;
    group_options(optimizer->param_groups().back()).lr = 0.5;
    optimizer->step();
    EXPECT_FALSE(added.equal(at::ones({2, 2}))) << type;
  }
}

TEST(Optimizers, WhatIsRefusedChangesNothing) {
  for (const char* type : {"Adam", "AdamW", "FusedAdam", "SGD", "Lion", "Adagrad", "Lamb", "NAdam"}) {
    const auto refused = [&](const at::Tensor& param) {
      torch::OrderedDict<std::string, at::Tensor> params;
      const at::Tensor good = at::ones({3}).requires_grad_(true);
      params.insert("good", good);
      params.insert("other", at::ones({1}).requires_grad_(true));
      params.insert("param", param);
      good.mutable_grad() = at::ones({3});
      const auto optimizer = make_optimizer(type, params, {.groups = {{.params = {good}}}});
      const std::string text = error_of<c10::ValueError>([&] { optimizer->step(); });
      EXPECT_TRUE(good.eq(1).all().item<bool>()) << type;
      return text;
    };
    const std::string origin = std::string("[") + type + "] parameter 1 of group 1 ";
    torch::nn::Embedding sparse(torch::nn::EmbeddingOptions(4, 2).sparse(true));
    sparse->forward(at::ones({1}, at::kLong)).sum().backward();
    EXPECT_HAS(refused(sparse->weight), origin + "has a sparse gradient");
    if (std::string(type) == "Lamb" || std::string(type) == "NAdam")
      continue;  // they compute in any dtype, on any device
    at::Tensor wide = at::ones({2}, at::kDouble).requires_grad_(true);
    wide.mutable_grad() = at::ones_like(wide);
    EXPECT_HAS(refused(wide), origin + "is Double; served are Float, BFloat16 and Half");
    if (std::string(type) == "FusedAdam") continue;  // on a device that has kernels
    at::Tensor away = at::ones({2}, at::TensorOptions(at::kMeta)).requires_grad_(true);
    away.mutable_grad() = at::ones_like(away);
    EXPECT_HAS(refused(away), origin + "is on meta: outside an engine parameters on the CPU are updated");
  }
}

TEST(Optimizers, WrongArgumentsAndArchivesAreRefusedByName) {
  auto model = net();
  const auto text = [&](const std::string& type, const Set& set, bool stochastic = false) {
    return error_of<c10::ValueError>(
        [&] { make_optimizer(type, model->named_parameters(), {.set = set, .stochastic_rounding = stochastic}); });
  };
  const auto nothing = [](GroupOptions&) {};
  EXPECT_HAS(text("Adan", nothing), "[make_optimizer] unknown optimizer type 'Adan'; known are FusedAdam, Adam, AdamW");
  EXPECT_HAS(text("FusedAdam", [](GroupOptions& g) { g.lr = -1, g.beta2 = 1; }),
             "[FusedAdam] lr must be >= 0, got -1; beta 1 must be in [0, 1), got 1");
  EXPECT_HAS(text("Adagrad", [](GroupOptions& g) { g.lr_decay = -1; }), "[Adagrad] lr_decay must be >= 0, got -1");
  EXPECT_HAS(text("Lamb", [](GroupOptions& g) { g.min_coeff = 20; }),
             "[Lamb] min_coeff must be above 0 and no more than max_coeff");
  EXPECT_HAS(text("NAdam", nothing, true), "stochastic_rounding is for Adam, AdamW, SGD, Lion, Adagrad and FusedAdam");
  EXPECT_HAS(text("Adam", [](GroupOptions& g) { g.amsgrad = g.maximize = true; }), "amsgrad is torch::optim's");
  EXPECT_HAS(error_of([&] { make_optimizer("Adam", torch::OrderedDict<std::string, at::Tensor>()); }),
             "there are no parameters");
  EXPECT_HAS(error_of<c10::ValueError>([&] {
               make_optimizer("Muon", model->named_parameters(), {.groups = {{.takes = is_vector, .use_muon = true}}});
             }),
             "[Muon] 4 parameters have fewer than two dimensions: put them into a group with use_muon false");
  EXPECT_HAS(error_of<c10::ValueError>(
                 [&] { make_optimizer("Adam", model->named_parameters(), {.groups = {{.params = {at::ones(1)}}}}); }),
             "param group 0 lists a tensor of shape [1] that is no parameter");

  const auto adam = made("Adam", model);
  const auto amsgrad = made("Adam", model, [](GroupOptions& g) { g.amsgrad = true; });
  EXPECT_NE(dynamic_cast<torch::optim::Adam*>(amsgrad.get()), nullptr);
  EXPECT_HAS(error_of<c10::ValueError>([&] { group_options(amsgrad->param_groups()[0]); }), "torch::optim's own class");
  train(model, *amsgrad, 0, 1);
  EXPECT_HAS(error_of([&] { load(*adam, saved(*amsgrad)); }), "[Adam] amsgrad is not supported (param group 0)");
  group_options(adam->param_groups()[1]).lr = -2;
  EXPECT_HAS(error_of<c10::ValueError>([&] { adam->step(); }), "[Adam] param group 1: lr must be >= 0, got -2");
  group_options(adam->param_groups()[1]).lr = 0.01;

  const auto of_other = [&](const char* type, const char* other) {
    auto plain = net();
    const auto before = made(type, plain), saver = made(other, plain);
    train(plain, *saver, 0, 1);
    train(plain, *before, 0, 1);
    const std::string kept = saved(*before);
    const std::string text = error_of([&] { load(*before, saved(*saver)); });
    EXPECT_EQ(before->param_groups()[0].options().get_lr(), 0.02);
    auto copy = net();
    copy_values(copy, plain);
    const auto again = made(type, copy);
    load(*again, kept);
    train(plain, *before, 1, 3);
    train(copy, *again, 1, 3);
    EXPECT_TRUE(same_bits(plain, copy)) << "a load that fails changes nothing: " << type;
    return text;
  };
  EXPECT_HAS(of_other("Adam", "Adagrad"),
             "[Adam.load] the state of parameter 0 has no exp_avg, exp_avg_sq; it has step, sum");
  EXPECT_HAS(of_other("NAdam", "Adagrad"), "the states are those of another optimizer than NAdam");
  EXPECT_HAS(of_other("Lamb", "Adagrad"), "the states are those of another optimizer than Lamb");
  const auto one = make_optimizer("Adam", model->named_parameters());
  EXPECT_HAS(error_of<c10::ValueError>([&] { load(*one, saved(*adam)); }),
             "[Adam.load] the archive has 2 param groups, the optimizer has 1");
}

// Of an optimizer without betas OneCycle says that it moves nothing, once.
TEST(Schedules, OneCycleNeedsBetas) {
  const auto warnings = [](const std::string& type, const auto& make, bool cycles = true) {
    const testing::KeptWarnings kept;
    auto model = net();
    const std::shared_ptr<Optimizer> own = make(model->parameters());
    const auto config = Config::from_json(c10::str(
        R"({"train_micro_batch_size_per_gpu": 1, "scheduler": {"type": "onecycle", "params": {"cycle_min_lr": 0.01,
            "cycle_max_lr": 0.1, "cycle_momentum": )",
        cycles ? "true" : "false", R"(}}, "optimizer": {"type": ")", type, R"("}})"));
    auto engine = initialize(model, config, comm::Mesh(), Recipe{.optimizer = own});
    for (int64_t step = 0; step < 3; ++step) {
      engine.backward(engine.forward(at::ones({2, 5})).square().mean());
      engine.step();
    }
    std::string found;
    for (const std::string& line : kept.lines)
      if (line.find("OneCycle") != std::string::npos) found += line + "\n";
    return found;
  };
  const auto none = [](const auto&) { return nullptr; };
  const auto sgd = [](const auto& params) { return std::make_shared<torch::optim::SGD>(params, 0.1); };
  const auto adam = [](const auto& params) { return std::make_shared<torch::optim::Adam>(params, 0.1); };
  const char* const said =
      " has none and keeps its momentum: set cycle_momentum to false, or take an optimizer that has betas\n";
  const std::string begins = "[optim.schedule] OneCycle cycles betas; ";
  EXPECT_EQ(warnings("SGD", none), begins + "SGD" + said);
  EXPECT_EQ(warnings("Adagrad", none), begins + "Adagrad" + said);
  EXPECT_EQ(warnings("AdamW", sgd), begins + "torch::optim::SGD" + said);
  EXPECT_EQ(warnings("SGD", none, /*cycles=*/false), "");
  for (const char* type : {"AdamW", "Lamb", "NAdam"})
    EXPECT_EQ(warnings(type, none), "") << type;
  EXPECT_EQ(warnings("SGD", adam), "");
}

// As torch: the first beta, or the momentum; of optimizers of the program's own, too.
TEST(Schedules, OfTorchMoveMomentum) {
  const optim::OneCycleLR options{.max_lr = {0.1}, .total_steps = 8};
  const auto at = [&](int64_t step) { return optim::evaluate(options, step, {0.1}); };
  const auto train = [&](const std::string& type, const std::shared_ptr<Optimizer>& own, const auto& model,
                         const auto& momentum) {
    for (const int stage : {0, 2}) {
      if (own != nullptr && stage > 0) continue;
      const auto config = Config::from_json(c10::str(
          R"({"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": true,
              "scheduler": {"type": "OneCycleLR", "params": {"max_lr": 0.1, "total_steps": 8}},
              "optimizer": {"type": ")",
          type, R"("}, "zero_optimization": {"stage": )", stage, "}}"));
      auto engine = initialize(model, config, comm::Mesh(), Recipe{.optimizer = own});
      for (int64_t step = 0; step < 3; ++step) {
        EXPECT_EQ(momentum(engine), at(step).momentum[0]) << type << stage;
        EXPECT_EQ(engine.lr()[0], at(step).lr[0]);
        engine.backward(engine.forward(at::ones({2, 5})).square().mean());
        engine.step();
      }
    }
  };
  const auto beta = [](auto& engine) { return engine.groups()[0].beta1; };
  const auto momentum = [](auto& engine) { return engine.groups()[0].momentum; };
  for (const char* type : {"AdamW", "Lamb", "NAdam"})
    train(type, nullptr, net(), beta);
  for (const char* type : {"SGD", "RMSprop"})
    train(type, nullptr, net(), momentum);
  auto model = net();
  const auto sgd = std::make_shared<torch::optim::SGD>(model->parameters(), 0.1);
  train("AdamW", sgd, model,
        [&](auto&) { return static_cast<torch::optim::SGDOptions&>(sgd->param_groups()[0].options()).momentum(); });
  auto other = net();
  const auto adam = std::make_shared<torch::optim::AdamW>(other->parameters(), 0.1);
  train("AdamW", adam, other, [&](auto&) {
    return std::get<0>(static_cast<torch::optim::AdamWOptions&>(adam->param_groups()[0].options()).betas());
  });
  EXPECT_HAS(
      error_of<c10::ValueError>([&] { train("Adagrad", nullptr, net(), beta); }),
      "OneCycleLR cycles momentum, and the optimizer has neither betas nor momentum: set cycle_momentum to false");
}

}  // namespace tessera::nn::optimizers_tests
