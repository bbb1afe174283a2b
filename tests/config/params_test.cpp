#include "tessera/config/params.h"

#include "support.h"
#include "tessera/config/resolve.h"

namespace tessera::config {
namespace {

std::optional<optim::OptimizerOptions> optimizer(const std::string& type, const Params& params) {
  Report report;
  auto options = read_optimizer({.type = type, .params = params}, report);
  report.raise();
  return options;
}

std::string optimizer_error(const std::string& type, const Params& params) {
  return error_of([&] { optimizer(type, params); });
}

template <class Schedule>
Schedule schedule(const std::string& type, const Params& params) {
  Report report;
  const auto options = read_schedule({.type = type, .params = params}, report);
  report.raise();
  return std::get<Schedule>(options.value());
}

std::string schedule_error(const std::string& type, const Params& params) {
  Report report;
  read_schedule({.type = type, .params = params}, report);
  return error_of([&] { report.raise(); });
}

TEST(Params, AdamIsAdamWUnlessConfiguredOtherwise) {
  EXPECT_TRUE(optimizer("Adam", {})->defaults.decoupled);
  EXPECT_FALSE(optimizer("adam", {{"adam_w_mode", false}})->defaults.decoupled);
  EXPECT_FALSE(optimizer("adam", {{"adam_w_mode", 0}})->defaults.decoupled);
  EXPECT_TRUE(optimizer("AdamW", {{"adam_w_mode", false}})->defaults.decoupled);
  EXPECT_EQ(optimizer("AdamW", {})->defaults.weight_decay, 0.0);
  EXPECT_EQ(optimizer("AdamW", {{"torch_adam", true}})->defaults.weight_decay, 0.01);
  EXPECT_EQ(optimizer("Adam", {{"torch_adam", true}, {"adam_w_mode", false}})->defaults.weight_decay, 0.0);
}

TEST(Params, ReadsEveryNativeRule) {
  const auto adam = optimizer("AdamW", {{"lr", 2},
                                        {"betas", List{0.8, 0.9}},
                                        {"eps", 1e-6},
                                        {"weight_decay", 0.1},
                                        {"bias_correction", false},
                                        {"fused", true},
                                        {"fp32_optimizer_states", true}});
  EXPECT_EQ(adam->rule, optim::Rule::Adam);
  EXPECT_EQ(adam->defaults.lr, 2.0);
  EXPECT_EQ(adam->defaults.beta1, 0.8);
  EXPECT_EQ(adam->defaults.beta2, 0.9);
  EXPECT_EQ(adam->defaults.eps, 1e-6);
  EXPECT_EQ(adam->defaults.weight_decay, 0.1);
  EXPECT_FALSE(adam->defaults.bias_correction);
  const auto sgd = optimizer("SGD", {{"momentum", 0.9}, {"nesterov", true}});
  EXPECT_EQ(sgd->rule, optim::Rule::Sgd);
  EXPECT_EQ(sgd->defaults.momentum, 0.9);
  EXPECT_TRUE(sgd->defaults.nesterov);
  EXPECT_EQ(optimizer("Adagrad", {{"lr_decay", 0.5}})->defaults.lr_decay, 0.5);
  const auto lion = optimizer("Lion", {});
  EXPECT_EQ(lion->rule, optim::Rule::Lion);
  EXPECT_EQ(lion->defaults.lr, 1e-3);
  EXPECT_EQ(lion->defaults.beta2, 0.99);
}

TEST(Params, ReadsOptimizersOfWholeParameters) {
  const auto lamb = optimizer("lamb", {{"lr", 0.1}, {"eps_inside_sqrt", true}, {"max_coeff", 5}, {"amsgrad", false}});
  EXPECT_EQ(lamb->rule, optim::Rule::Lamb);
  EXPECT_EQ(lamb->defaults.max_coeff, 5);
  EXPECT_TRUE(lamb->defaults.eps_inside_sqrt);
  struct Row {
    Params params;
    double lr, others_lr, beta2, eps;
  };
  for (const Row& row : std::vector<Row>{{{}, 0.02, 3e-4, 0.95, 1e-10},
                                         {{{"lr", 0.5}}, 0.5, 0.5, 0.95, 1e-10},
                                         {{{"lr", 0.5}, {"muon_lr", 0.1}}, 0.1, 0.5, 0.95, 1e-10},
                                         {{{"adam_lr", 0.1}, {"betas", List{0.8, 0.9}}}, 0.02, 0.1, 0.9, 1e-10},
                                         {{{"eps", 1e-6}, {"torch_adam", true}}, 0.02, 3e-4, 0.95, 1e-6}}) {
    const auto muon = optimizer("Muon", row.params);
    EXPECT_EQ(muon->defaults.lr, row.lr);
    EXPECT_TRUE(muon->defaults.use_muon && muon->defaults.nesterov && !muon->others->use_muon);
    EXPECT_EQ(muon->others->lr, row.others_lr);
    EXPECT_EQ(muon->others->beta2, row.beta2);
    EXPECT_EQ(muon->others->eps, row.eps);
  }
  EXPECT_FALSE(optimizer("Muon", {{"adam_w_mode", false}})->others->decoupled);
  EXPECT_HAS(optimizer_error("Muon", {{"momentum", 1}}), "momentum: must be a number >= 0.0 and < 1.0, got 1");
  EXPECT_HAS(optimizer_error("Muon", {{"ns_method", "other"}}), "ns_method: must be standard or gram");
  EXPECT_HAS(optimizer_error("Lamb", {{"min_coeff", 20}}),
             "min_coeff: must be above 0 and no more than max_coeff, got 20 and 10");
  EXPECT_HAS(optimizer_error("Lamb", {{"amsgrad", true}}), "amsgrad: is not served");
}

TEST(Params, LeavesOtherOptimizersToPython) {
  EXPECT_FALSE(optimizer("NAdam", {{"anything", 1}}));
  EXPECT_FALSE(optimizer("Adam", {{"torch_adam", true}, {"amsgrad", true}, {"foreach", true}}));
  EXPECT_FALSE(optimizer("", {}));
  const auto kind = kind_of({.type = "Adam", .params = {{"torch_adam", true}, {"amsgrad", true}, {"adam_w_mode", 0}}});
  EXPECT_EQ(kind->rule, optim::Rule::Adam) << "the type has a rule, whatever the parameters ask for";
  EXPECT_FALSE(kind->defaults.decoupled);
  EXPECT_FALSE(kind_of({.type = "NAdam", .params = {}}));
}

TEST(Params, ReadsTorchsOptimizersOfCpp) {
  const auto read = [](const std::string& type, const Params& params) {
    Report report;
    auto options = read_torch_optimizer({.type = type, .params = params}, report);
    report.raise();
    return options;
  };
  const auto rmsprop = read("RMSprop", {{"alpha", 0.9}, {"centered", true}, {"momentum", 0.5}, {"foreach", true}});
  EXPECT_EQ(rmsprop->rule, optim::Rule::External);
  EXPECT_EQ(rmsprop->defaults.lr, 0.01);
  EXPECT_EQ(rmsprop->defaults.alpha, 0.9);
  EXPECT_TRUE(rmsprop->defaults.centered);
  for (const bool decoupled : {false, true}) {
    const auto adam = read("adam", {{"torch_adam", true}, {"amsgrad", true}, {"adam_w_mode", decoupled}});
    EXPECT_EQ(adam->type, optim::find_torch_type(decoupled ? "AdamW" : "Adam"));
    EXPECT_EQ(adam->defaults.weight_decay, decoupled ? 0.01 : 0);
    EXPECT_TRUE(adam->defaults.amsgrad);
  }
  EXPECT_FALSE(read("rmsprop", {})) << "exact, as in Python";
  EXPECT_FALSE(read("SparseAdam", {}));
  const auto rprop = read("Rprop", {{"etas", List{0.3, 1.5}}, {"step_sizes", List{1e-3, 2}}});
  EXPECT_TRUE(rprop->defaults.eta_minus == 0.3 && rprop->defaults.eta_plus == 1.5);
  EXPECT_TRUE(rprop->defaults.step_size_min == 1e-3 && rprop->defaults.step_size_max == 2);
  EXPECT_HAS(error_of([&] { read("Rprop", {{"etas", List{0.3, 0.5}}}); }),
             "etas: must have 0 < etas[0] < 1 < etas[1], got 0.3 and 0.5");
  EXPECT_HAS(error_of([&] { read("Rprop", {{"weight_decay", 0.1}}); }), "weight_decay: unknown parameter");
  const auto asgd = read("ASGD", {{"lambd", 0.01}, {"t0", 10}});
  EXPECT_TRUE(asgd->defaults.lambd == 0.01 && asgd->defaults.t0 == 10 && asgd->defaults.alpha == 0.75);
  const auto nadam = read("NAdam", {{"momentum_decay", 0.01}, {"decoupled_weight_decay", true}, {"maximize", true}});
  EXPECT_TRUE(nadam->defaults.lr_decay == 0.01 && nadam->defaults.decoupled && nadam->defaults.maximize);
  EXPECT_EQ(read("Adadelta", {})->defaults.alpha, 0.9);
  const auto error = [&](const Params& params) { return error_of([&] { read("RMSprop", params); }); };
  EXPECT_HAS(error({{"alpa", 0.9}}), "did you mean \"alpha\"?");
  EXPECT_HAS(error({{"momentum", -1}}), "momentum: must be a number >= 0");
  EXPECT_EQ(error({{"maximize", true}}), "") << "Python's class has it";
  const auto cpp = [](const std::string& text) {
    return error_of(
        [&] { torch_optimizer(Config::from_json(R"({"train_batch_size": 1, "optimizer": )" + text + "}")); });
  };
  EXPECT_HAS(cpp(R"({"type": "RMSprop", "params": {"maximize": true}})"), "torch::optim::RMSprop of C++ has it not");
}

// Whatever front end reads the configuration.
TEST(Params, ConfigurationsNameWrongParametersOfTorchsOptimizers) {
  const auto error = [](const std::string& text) {
    return error_of([&] { Config::from_json(R"({"train_batch_size": 1, "optimizer": )" + text + "}"); });
  };
  EXPECT_HAS(error(R"({"type": "RAdam", "params": {"betaz": [0.9, 0.99]}})"),
             "optimizer.params.betaz: unknown parameter; did you mean \"betas\"?");
  EXPECT_HAS(error(R"({"type": "Rprop", "params": {"etas": [2, 3]}})"),
             "optimizer.params.etas: must have 0 < etas[0] < 1 < etas[1], got 2 and 3");
  EXPECT_HAS(error(R"({"type": "Adamax", "params": {"lr": -1}})"),
             "optimizer.params.lr: must be a number >= 0.0, got -1");
  EXPECT_HAS(error(R"({"type": "Adam", "params": {"torch_adam": true, "amsgrad": true, "lr": -1}})"),
             "optimizer.params.lr: must be a number >= 0.0, got -1");
}

TEST(Params, AdafactorsFirstEpsMayBeNull) {
  for (const Value& first : {Value(), Value("auto")})
    EXPECT_EQ(optimizer("adafactor", {{"eps", List{first, 0.01}}})->defaults.eps1, optim::kOfDtype);
  const auto given = optimizer("Adafactor", {{"eps", List{1e-5, 0.01}}, {"d", 2}, {"beta2_decay", -0.5}});
  EXPECT_EQ(given->rule, optim::Rule::Adafactor);
  EXPECT_TRUE(given->defaults.eps1 == 1e-5 && given->defaults.eps == 0.01 && given->defaults.d == 2);
  EXPECT_HAS(optimizer_error("Adafactor", {{"eps", 1e-3}}), "must be null or a number, and a number from 0");
  EXPECT_HAS(optimizer_error("Adafactor", {{"eps", List{-1, 1e-3}}}), "must be null or a number, and a number from 0");
  EXPECT_HAS(optimizer_error("Adafactor", {{"d", 0.5}}), "d: must be a number >= 1");
  EXPECT_HAS(optimizer_error("Adafactor", {{"beta2_decay", 0.5}}), "beta2_decay: must be <= 0");
}

TEST(Params, RefusesWrongOptimizerParameters) {
  EXPECT_HAS(optimizer_error("Adam", {{"weight_decai", 0}}), "did you mean \"weight_decay\"?");
  EXPECT_HAS(optimizer_error("Adam", {{"momentum", 0.9}}), "optimizer.params.momentum: unknown parameter");
  EXPECT_HAS(optimizer_error("Adam", {{"betas", 0.9}}), "betas: must be two numbers");
  EXPECT_HAS(optimizer_error("Adam", {{"amsgrad", true}}), "set torch_adam");
  EXPECT_HAS(optimizer_error("Adam", {{"bias_correction", "x"}}), "bias_correction: must be true or false");
  EXPECT_HAS(optimizer_error("SGD", {{"nesterov", true}}),
             "optimizer.params.nesterov: needs momentum > 0 and dampening 0, got 0 and 0");
  EXPECT_HAS(optimizer_error("Lion", {{"max_grad_norm", 1.0}}), "use gradient_clipping");
}

TEST(Params, ReadsSchedulesOfTorch) {
  EXPECT_EQ(schedule<optim::StepLR>("StepLR", {{"step_size", 3}, {"last_epoch", -1}}).step_size, 3);
  EXPECT_EQ(schedule<optim::MultiStepLR>("MultiStepLR", {{"milestones", List{2, 5}}}).milestones,
            (std::vector<int64_t>{2, 5}));
  EXPECT_EQ(schedule<optim::ConstantLR>("ConstantLR", {{"factor", 0.5}}).factor, 0.5);
  EXPECT_EQ(schedule<optim::LinearLR>("LinearLR", {{"total_iters", 7}}).total_iters, 7);
  EXPECT_EQ(schedule<optim::ExponentialLR>("ExponentialLR", {{"gamma", 0.9}}).gamma, 0.9);
  EXPECT_EQ(schedule<optim::CosineAnnealingLR>("CosineAnnealingLR", {{"T_max", 9}, {"eta_min", 0.1}}).eta_min, 0.1);
  EXPECT_EQ(schedule<optim::PolynomialLR>("PolynomialLR", {{"power", 2}}).power, 2);
  const auto restarts = schedule<optim::CosineAnnealingWarmRestarts>("CosineAnnealingWarmRestarts", {{"T_0", 4}});
  EXPECT_EQ(restarts.T_0, 4);
  EXPECT_EQ(restarts.T_mult, 1);
  const auto cycle = schedule<optim::CyclicLR>(
      "CyclicLR", {{"base_lr", 0.1}, {"max_lr", List{0.2, 0.3}}, {"mode", "exp_range"}, {"scale_fn", Value()}});
  EXPECT_EQ(cycle.max_lr, (std::vector<double>{0.2, 0.3}));
  EXPECT_EQ(cycle.mode, optim::CycleMode::ExpRange);
  const auto one = schedule<optim::OneCycleLR>(
      "OneCycleLR", {{"max_lr", 0.1}, {"epochs", 3}, {"steps_per_epoch", 5}, {"anneal_strategy", "linear"}});
  EXPECT_EQ(one.steps(), 15);
  EXPECT_EQ(one.anneal_strategy, optim::AnnealStrategy::Linear);
  EXPECT_HAS(schedule_error("OneCycleLR", {{"max_lr", 0.1}, {"epochs", 3}}),
             "scheduler.params.total_steps: is required, or epochs and steps_per_epoch are");
  EXPECT_HAS(schedule_error("OneCycleLR", {{"max_lr", 0.1}, {"total_steps", 3}, {"pct_start", 1.5}}),
             "pct_start: must be from 0 to 1");
  EXPECT_HAS(schedule_error("OneCycleLR", {{"max_lr", 0.1}, {"total_steps", 3}, {"anneal_strategy", "exp"}}),
             "anneal_strategy: must be cos or linear");
  EXPECT_HAS(schedule_error("CyclicLR", {{"base_lr", 0.1}, {"max_lr", 1}, {"scale_fn", 2}}),
             "scale_fn: is a function, which a program alone can give");
  EXPECT_HAS(schedule_error("CosineAnnealingWarmRestarts", {{"T_0", 0}}), "T_0: must be a positive integer");
  EXPECT_HAS(schedule_error("StepLR", {}), "scheduler.params.step_size: is required");
  EXPECT_HAS(schedule_error("ExponentialLR", {}), "scheduler.params.gamma: is required");
  EXPECT_HAS(schedule_error("MultiStepLR", {{"milestones", List{2.5}}}), "must be integers, got 2.5");
  EXPECT_HAS(schedule_error("StepLR", {{"step_size", 3}, {"last_epoch", 4}}), "must be -1; a checkpoint says");
  EXPECT_HAS(schedule_error("LinearLR", {{"end_facto", 0}}), "did you mean \"end_factor\"?");
  EXPECT_EQ(schedule_error("steplr", {{"step_size", 0}}), "") << "exact, as in Python";
}

TEST(Params, ReadsEverySchedule) {
  const auto warmup = schedule<optim::WarmupLR>(
      "WarmupLR", {{"warmup_max_lr", List{0.1, 0.2}}, {"warmup_num_steps", 10.0}, {"warmup_type", "linear"}});
  EXPECT_EQ(warmup.warmup_max_lr, (std::vector<double>{0.1, 0.2}));
  EXPECT_EQ(warmup.warmup_num_steps, 10);
  EXPECT_EQ(warmup.warmup_type, optim::WarmupType::Linear);
  EXPECT_TRUE(schedule<optim::WarmupLR>("WarmupLR", {{"warmup_max_lr", Value()}}).warmup_max_lr.empty());
  const auto decay = schedule<optim::WarmupDecayLR>("WarmupDecayLR", {{"total_num_steps", 100}});
  EXPECT_EQ(decay.total_num_steps, 100);
  EXPECT_EQ(decay.warmup_max_lr, std::vector<double>{0.001});
  EXPECT_EQ(
      schedule<optim::WarmupCosineLR>("WarmupCosineLR", {{"total_num_steps", 9}, {"cos_min_ratio", 0.5}}).cos_min_ratio,
      0.5);
  const auto cycle = schedule<optim::OneCycle>(
      "OneCycle",
      {{"cycle_min_lr", 0.1}, {"cycle_max_lr", 1}, {"cycle_second_step_size", 7}, {"cycle_momentum", false}});
  EXPECT_EQ(cycle.cycle_max_lr, std::vector<double>{1.0});
  EXPECT_EQ(cycle.cycle_second_step_size, 7);
  EXPECT_FALSE(cycle.cycle_second_stair_count);
  EXPECT_FALSE(cycle.cycle_momentum);
  EXPECT_TRUE(schedule<optim::LRRangeTest>("LRRangeTest", {{"lr_range_test_staircase", true}}).lr_range_test_staircase);
}

TEST(Params, RefusesWrongScheduleParameters) {
  EXPECT_HAS(schedule_error("WarmupLR", {{"warmup_num_steps", 0}}),
             "warmup_num_steps: must be a positive integer, got 0");
  EXPECT_HAS(schedule_error("WarmupLR", {{"warmup_num_steps", 2.5}}), "must be a positive integer, got 2.5");
  EXPECT_HAS(schedule_error("WarmupLR", {{"warmup_type", "cosine"}}), "must be log or linear");
  EXPECT_HAS(schedule_error("WarmupDecayLR", {{"total_num_steps", "auto"}}), "total_num_steps: is required");
  EXPECT_HAS(schedule_error("OneCycle", {}), "cycle_max_lr: is required");
  EXPECT_HAS(schedule_error("WarmupLR", {{"warmup_steps", 5}}), "warmup_steps: unknown parameter");
  EXPECT_EQ(schedule_error("StepLR", {{"step_size", 5}}), "");
}

TEST(Params, SchedulesOfArguments) {
  const auto error = [](const std::string& type, const Params& arguments) {
    return error_of([&] { schedule_of(type, arguments); });
  };
  EXPECT_EQ(std::get<optim::WarmupLR>(schedule_of("WarmupLR", {{"warmup_num_steps", 7}})).warmup_num_steps, 7);
  EXPECT_EQ(error("WarmupLR", {{"warmup_num_steps", 0}, {"warmup_type", "cubic"}}),
            "[lr_schedules] warmup_num_steps must be a positive integer, got 0; warmup_type must be log or linear, got "
            "\"cubic\"");
  EXPECT_HAS(error("OneCycle", {}), "cycle_min_lr is required");
  EXPECT_HAS(error("LambdaLR", {}), "there is no schedule LambdaLR");
}

}  // namespace
}  // namespace tessera::config
