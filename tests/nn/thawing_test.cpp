// Optimizers that a program brings, over parameters that are thawed later, and over one without dims.
#include "tessera/nn/client_optimizer.h"

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include "tessera/nn/engine.h"
#include "tests/io/temp_folder.h"
#include "tests/nn/stages.h"
#include "tests/nn/values.h"

// Of its own: other files have a Net, too.
namespace tessera::nn::thawing_tests {
namespace {

using testing::everywhere;
using testing::expect_close;
using testing::Values;
using testing::values_of;
using torch::optim::Optimizer;

// A layer that is frozen at first, one that is trained, a factor without dims, and a bias, frozen at first, that no optimizer has.
struct Net : torch::nn::Module {
  Net() {
    first = register_module("first", testing::fresh(0, torch::nn::Linear(5, 7)));
    last = register_module("last", testing::fresh(1, torch::nn::Linear(7, 3)));
    scale = register_parameter("scale", torch::full({}, 1.25));
    left = register_parameter("left", torch::full({3}, 0.5));
    freeze(true);
  }
  void freeze(bool frozen) {
    for (at::Tensor& param : first->parameters())
      param.requires_grad_(!frozen);
    left.requires_grad_(!frozen);
  }
  std::vector<at::Tensor> given() const {
    std::vector<at::Tensor> all = parameters();
    std::erase_if(all, [&](const at::Tensor& param) { return param.is_same(left); });
    return all;
  }
  at::Tensor forward(const at::Tensor& x) {
    return (last(at::tanh(first(x))) * scale + left).to(at::kFloat).square().mean();
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  at::Tensor scale, left;
};

struct Row {
  std::string name;
  std::function<std::shared_ptr<Optimizer>(const std::vector<at::Tensor>& params)> make;  // of the program's own
  std::string configured = {};                                                            // or of the configuration
};

std::vector<Row> own_optimizers() {
  using namespace torch::optim;
  return {{"SGD", [](auto& p) { return std::make_shared<SGD>(p, SGDOptions(0.05).momentum(0.9)); }},
          {"AdamW", [](auto& p) { return std::make_shared<AdamW>(p, AdamWOptions(0.02).amsgrad(true)); }},
          {"RMSprop", [](auto& p) { return std::make_shared<RMSprop>(p, RMSpropOptions(0.01).momentum(0.5)); }},
          {"Adagrad", [](auto& p) { return std::make_shared<Adagrad>(p, AdagradOptions(0.05)); }}};
}

std::vector<Row> configured_optimizers() {
  std::vector<Row> rows;
  for (const char* type : {"Lamb", "Adafactor", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop", "RMSprop"})
    rows.push_back({type, nullptr, c10::str(R"("optimizer": {"type": ")", type, R"(", "params": {"lr": 0.01}}, )")});
  return rows;
}

at::Tensor batch(int64_t step) {
  return at::arange(20, at::kFloat).view({4, 5}).add(static_cast<double>(step)).sin();
}

Engine<Net> engine_of(const Row& row, int stage, const comm::GroupPtr& group, bool thawed = false, bool bf16 = false) {
  const auto net = std::make_shared<Net>();
  if (!row.configured.empty() || thawed) net->freeze(false);
  Recipe recipe;
  if (row.configured.empty()) recipe.optimizer = row.make(net->given());
  return initialize(
      net,
      Config::from_json(c10::str("{", row.configured, R"("train_micro_batch_size_per_gpu": 4,
                      "zero_allow_untested_optimizer": true, "bf16": {"enabled": )",
                                 bf16 ? "true" : "false",
                                 R"(}, "zero_optimization": {"reduce_scatter": false, "stage": )", stage, "}}")),
      comm::Mesh(group), recipe);
}

constexpr int64_t kThaws = 2, kSaves = 4, kSteps = 6;

void train(Engine<Net>& engine, int64_t to, int64_t thaws = kThaws) {
  for (int64_t step = engine.global_steps(); step < to; ++step) {
    if (step == thaws) engine.module().freeze(false);
    engine.forward(batch(step).to(engine.module().left.scalar_type())).backward();
    EXPECT_TRUE(engine.step());
  }
}

Values plain(const Row& row) {
  Net net;
  const auto optimizer = row.make(net.given());
  for (int64_t step = 0; step < kSteps; ++step) {
    if (step == kThaws) net.freeze(false);
    optimizer->zero_grad();
    net.forward(batch(step)).backward();
    optimizer->step();
  }
  return values_of(net);
}

}  // namespace

// What its groups have joins when it requires gradients, as in the plain loop; what none has is never trained, as one warning says.
TEST(Thawing, TrainsWhatIsThawed) {
  for (const Row& row : own_optimizers()) {
    const Values want = plain(row);
    everywhere(row.name, [&](int stage, const comm::GroupPtr& group) {
      auto engine = engine_of(row, stage, group);
      const testing::KeptWarnings kept;
      train(engine, kSteps);
      const auto of_left = [](const std::string& line) {
        return line.starts_with("[engine] 'left': requires gradients now");
      };
      EXPECT_EQ(std::ranges::count_if(kept.lines, of_left), group->rank() == 0 ? 1 : 0);
      expect_close(values_of(engine), want);
      EXPECT_TRUE(engine.module_state_dict()["left"].eq(0.5).all().item<bool>());
      auto rounded = engine_of(row, stage, group, /*thawed=*/false, /*bf16=*/true);
      train(rounded, kSteps);
      expect_close(values_of(rounded), want, 0.05);
      EXPECT_GT(
          (rounded.module_state_dict()["first.weight"].to(at::kFloat) - Net().first->weight).abs().max().item<double>(),
          0.01);
    });
  }
}

// Thawed before the load it goes on with the states that were saved, in an engine that has it frozen, or trained, from the start.
TEST(Thawing, WhatIsThawedBeforeALoadHasItsStates) {
  for (const Row& row : own_optimizers()) {
    const Values want = plain(row);
    everywhere(row.name, [&](int stage, const comm::GroupPtr& group) {
      static io::TempFolder folder;
      const std::string mine = folder / c10::str(row.name, stage, group->size());
      auto first = engine_of(row, stage, group);
      train(first, kSaves);
      first.save_checkpoint(mine);
      for (const bool thawed : {false, true}) {
        auto second = engine_of(row, 3 - stage, group, thawed);
        second.module().freeze(false);
        EXPECT_TRUE(second.load_checkpoint(mine));
        train(second, kSteps);
        expect_close(values_of(second), want);
      }
    });
  }
}

// A checkpoint of what was frozen has no states for it: they begin in the first step after the load.
TEST(Thawing, StatesThatWereNotSavedBegin) {
  for (const Row& row : own_optimizers())
    everywhere(row.name, [&](int stage, const comm::GroupPtr& group) {
      static io::TempFolder folder;
      const std::string mine = folder / c10::str(row.name, stage, group->size());
      auto first = engine_of(row, stage, group);
      train(first, kThaws);
      first.save_checkpoint(mine);
      train(first, kSteps);
      auto second = engine_of(row, 3 - stage, group);
      second.module().freeze(false);
      EXPECT_TRUE(second.load_checkpoint(mine));
      train(second, kSteps);
      expect_close(values_of(second), values_of(first));
    });
}

// States of a parameter without dims are saved and loaded as those of any other, between all stages.
TEST(Thawing, AParameterWithoutDimsGoesOnAtAnyStage) {
  std::vector<Row> rows = own_optimizers();
  std::ranges::move(configured_optimizers(), std::back_inserter(rows));
  for (const Row& row : rows)
    testing::run_ranks(2, [&](int, const comm::GroupPtr& group) {
      static io::TempFolder folder;
      Values want;
      for (int stage = 0; stage <= 3; ++stage) {
        auto engine = engine_of(row, stage, group, /*thawed=*/true);
        train(engine, kThaws);
        engine.save_checkpoint(folder / c10::str(row.name, stage));
        train(engine, kSteps);
        if (stage == 0) want = values_of(engine);
      }
      for (int from = 0; from <= 3; ++from)
        for (int to = 0; to <= 3; ++to) {
          SCOPED_TRACE(c10::str(row.name, ", from stage ", from, " to ", to));
          auto engine = engine_of(row, to, group, /*thawed=*/true);
          EXPECT_TRUE(engine.load_checkpoint(folder / c10::str(row.name, from)));
          train(engine, kSteps);
          expect_close(values_of(engine), want);
        }
    });
}

}  // namespace tessera::nn::thawing_tests
