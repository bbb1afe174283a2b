#include "tessera/optim/types.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "tests/support/errors.h"

namespace tessera::optim {
namespace {

TEST(OptimizerOptions, OfType) {
  EXPECT_TRUE(options_of_type("Adam").defaults.decoupled);
  EXPECT_FALSE(options_of_type("Adam", false).defaults.decoupled);
  EXPECT_TRUE(options_of_type("ADAMW", false).defaults.decoupled);
  EXPECT_EQ(options_of_type("sgd").rule, Rule::Sgd);
  EXPECT_TRUE(is_native_type("aDaGrAd"));
  EXPECT_FALSE(is_native_type("adamm") || is_native_type("") || is_native_type("Adam "));
  // As in tests/python/optim/test_factory.py.
  for (const std::string type : {"Adam", "AdamW", "SGD", "Adagrad", "Lion"}) {
    const GroupOptions found = options_of_type(type).defaults;
    EXPECT_EQ(found.lr, type == "Adagrad" ? 1e-2 : 1e-3);
    EXPECT_EQ(found.beta1, 0.9);
    EXPECT_EQ(found.beta2, type == "Lion" ? 0.99 : 0.999);
    EXPECT_EQ(found.eps, type == "Adagrad" ? 1e-10 : 1e-8);
    EXPECT_EQ(found.weight_decay + found.momentum + found.dampening + found.lr_decay + found.initial_accumulator_value,
              0);
    EXPECT_TRUE(found.decoupled && found.bias_correction && !found.nesterov && !found.maximize);
  }
  EXPECT_HAS(testing::error_of<c10::ValueError>([] { options_of_type("adamm"); }), "'adamm'; known are Adam");
  for (const Type& type : types()) {
    EXPECT_EQ(find_type(type.name), &type);
    EXPECT_EQ(is_native_type(type.name), has_kernel(type.rule));
    check(type, type.defaults);
  }
  const OptimizerOptions amsgrad{
      .rule = Rule::External, .defaults = {.amsgrad = true}, .type = find_torch_type("AdamW")};
  EXPECT_EQ(state_count(amsgrad), 3);
  OptimizerOptions rmsprop{.rule = Rule::External, .defaults = {}, .type = find_torch_type("RMSprop")};
  EXPECT_EQ(state_count(rmsprop), 1);
  rmsprop.defaults.momentum = 0.9;
  rmsprop.defaults.centered = true;
  EXPECT_EQ(state_count(rmsprop), 3);
  const OptimizerOptions muon = options_of_type("muon", false);
  EXPECT_TRUE(muon.defaults.use_muon && !muon.others->use_muon && !muon.others->decoupled);
}

TEST(OptimizerOptions, OutOfBounds) {
  const auto error = [](const char* type, auto... changes) {
    GroupOptions group = find_type(type)->defaults;
    (changes(group), ...);
    return testing::error_of<c10::ValueError>([&] { check(*find_type(type), group); });
  };
  EXPECT_EQ(error("Lamb", [](auto& g) { g.lr = -1; }), "[Lamb] lr must be >= 0, got -1");
  EXPECT_EQ(error("Muon", [](auto& g) { g.momentum = 1, g.ns_steps = 0; }),
            "[Muon] momentum must be in [0, 1), got 1; ns_steps must be >= 1, got 0");
  EXPECT_EQ(error("SGD", [](auto& g) { g.lr = INFINITY, g.dampening = NAN; }),
            "[SGD] lr must be a finite number, got inf; dampening must be a finite number, got nan");
  EXPECT_EQ(error("Lamb", [](auto& g) { g.max_coeff = INFINITY; }), "");
  EXPECT_HAS(error("Adam", [](auto& g) { g.beta2 = std::nan(""); }), "beta 1 must be in [0, 1), got nan");
  EXPECT_EQ(testing::error_of<c10::ValueError>([] { check(*find_type("Adam"), {.lr = -1}, "FusedAdam", 2); }),
            "[FusedAdam] param group 2: lr must be >= 0, got -1");
  EXPECT_HAS(error("SGD", [](auto& g) { g.nesterov = true; }),
             "nesterov needs momentum > 0 and dampening 0, got 0 and 0");
  EXPECT_HAS(error("Adafactor", [](auto& g) { g.beta2_decay = 0.5; }), "[Adafactor] beta2_decay must be <= 0, got 0.5");
  EXPECT_HAS(error("Lamb", [](auto& g) { g.min_coeff = 20; }),
             "min_coeff must be above 0 and no more than max_coeff, got 20 and 10");
}

}  // namespace
}  // namespace tessera::optim
