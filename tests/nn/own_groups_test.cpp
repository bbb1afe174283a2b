// Param groups that a program adds while its engine lives, to its optimizer or by the engine.
#include "tessera/nn/own_groups.h"

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <functional>
#include <memory>
#include <utility>

#include "tessera/nn/engine.h"
#include "tessera/nn/optimizers.h"
#include "tests/io/temp_folder.h"
#include "tests/nn/stages.h"
#include "tests/nn/values.h"
#include "tests/support/errors.h"

// Of its own: other files have a Net, too.
namespace tessera::nn::own_groups_tests {
namespace {

using testing::error_of;
using testing::everywhere;
using testing::expect_close;
using testing::Values;
using testing::values_of;
using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using Params = std::vector<at::Tensor>;

// A layer that is trained, one that is frozen and in no group, and one that comes later.
struct Net : torch::nn::Module {
  Net() {
    first = register_module("first", testing::fresh(0, torch::nn::Linear(5, 7)));
    last = register_module("last", testing::fresh(1, torch::nn::Linear(7, 3)));
    for (at::Tensor& param : first->parameters())
      param.requires_grad_(false);
  }
  Params grow() {
    later = register_module("later", testing::fresh(2, torch::nn::Linear(7, 7)));
    return later->parameters();
  }
  Params thaw() {
    for (at::Tensor& param : first->parameters())
      param.requires_grad_(true);
    return first->parameters();
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = at::tanh(first(x));
    if (later) y = y + later(y);
    return last(y).to(at::kFloat).square().mean();
  }
  torch::nn::Linear first{nullptr}, last{nullptr}, later{nullptr};
};

struct Row {
  std::string name;
  std::function<std::shared_ptr<Optimizer>(const Net& net)> make;
  std::function<std::unique_ptr<OptimizerOptions>()> slower =
      {};                       // of a group that is added; empty: as group_options()
  std::string configured = {};  // by the configuration, whose group has what is frozen, and engine.add_param_group()
};

template <class Class, class Options>
Row of_torch(const std::string& name, const Options& options) {
  return {name, [=](const Net& net) { return std::make_shared<Class>(net.last->parameters(), options); },
          [=] {
            auto slower = std::make_unique<Options>(options);
            slower->lr(options.lr() / 2);
            return slower;
          }};
}

Row of_tessera(const std::string& type, bool configured) {
  const auto make = [type](const Net& net) {
    return make_optimizer(type, net.last->named_parameters(), {.set = [](auto& group) { group.lr = 0.01; }});
  };
  const std::string section =
      c10::str(R"(, "optimizer": {"type": ")", type, R"(", "params": {"lr": 0.01, "weight_decay": 0}})");
  return {c10::str(type, configured ? " of the configuration" : " of make_optimizer()"),
          make,
          {},
          configured ? section : ""};
}

std::vector<Row> rows() {
  using namespace torch::optim;
  std::vector<Row> rows{of_torch<SGD>("SGD", SGDOptions(0.05).momentum(0.9)),
                        of_torch<AdamW>("AdamW", AdamWOptions(0.02).amsgrad(true)),
                        of_torch<RMSprop>("RMSprop", RMSpropOptions(0.01).momentum(0.5)),
                        of_torch<Adagrad>("Adagrad", AdagradOptions(0.05))};
  for (const char* type : {"Adam", "SGD", "Lamb", "NAdam"})
    for (const bool configured : {false, true})
      rows.push_back(of_tessera(type, configured));
  return rows;
}

at::Tensor batch(int64_t step) {
  return at::arange(20, at::kFloat).view({4, 5}).add(static_cast<double>(step)).sin();
}

void add_to(const Row& row, Optimizer& optimizer, const Params& params) {
  if (row.slower) {
    optimizer.add_param_group(OptimizerParamGroup(params, row.slower()));
  } else {
    optimizer.add_param_group(OptimizerParamGroup(params));
    group_options(optimizer.param_groups().back()).lr = 0.005;
  }
}

// An engine with the optimizer that its program keeps.
struct Loop {
  Loop(const Row& row, int stage, const comm::GroupPtr& group) : row(row) {
    const auto net = std::make_shared<Net>();
    if (row.configured.empty()) own = row.make(*net);
    engine = std::make_unique<Engine<Net>>(
        initialize(net,
                   Config::from_json(c10::str(R"({"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0,
            "zero_allow_untested_optimizer": true, "zero_optimization": {"stage": )",
                                              stage, "}", row.configured, "}")),
                   comm::Mesh(group), Recipe{.optimizer = own}));
  }
  void add(const Params& params) {
    if (own) return add_to(row, *own, params);
    optim::GroupOptions slower = engine->groups()[0];
    slower.lr = 0.005;
    engine->add_param_group(params, slower);
  }
  void train(int64_t to);

  const Row& row;
  std::shared_ptr<Optimizer> own;
  std::unique_ptr<Engine<Net>> engine;
};

constexpr int64_t kGrows = 2, kThaws = 3, kSaves = 4, kSteps = 6;

void Loop::train(int64_t to) {
  for (int64_t step = engine->global_steps(); step < to; ++step) {
    if (step == kGrows) add(engine->module().grow());
    if (step == kThaws && own) add(engine->module().thaw());
    engine->forward(batch(step)).backward();
    EXPECT_TRUE(engine->step());
  }
}

// Torch's Adagrad has states from its constructor on, and none of what is added: its step() fails.
void begin_states(Optimizer& optimizer, const Params& params) {
  if (dynamic_cast<torch::optim::Adagrad*>(&optimizer) == nullptr) return;
  for (const at::Tensor& param : params) {
    auto state = std::make_unique<torch::optim::AdagradParamState>();
    state->step(0);
    state->sum(at::zeros_like(param));
    optimizer.state()[param.unsafeGetTensorImpl()] = std::move(state);
  }
}

Values plain(const Row& row) {
  Net net;
  const auto optimizer = row.make(net);
  for (int64_t step = 0; step < kSteps; ++step) {
    Params added;
    if (step == kGrows) added = net.grow();
    if (step == kThaws && row.configured.empty()) added = net.thaw();
    if (!added.empty()) add_to(row, *optimizer, added);
    begin_states(*optimizer, added);
    optimizer->zero_grad();
    net.forward(batch(step)).backward();
    optimizer->step();
  }
  return values_of(net);
}

// As the plain loop, also on with a checkpoint, in an engine of another stage that has grown before the load.
TEST(OwnGroups, WhatIsAddedIsTrained) {
  for (const Row& row : rows()) {
    const Values want = plain(row);
    everywhere(row.name, [&](int stage, const comm::GroupPtr& group) {
      static io::TempFolder folder;
      const std::string mine = folder / c10::str(row.name, stage, group->size());
      Loop first(row, stage, group);
      first.train(kSaves);
      first.engine->save_checkpoint(mine);
      first.train(kSteps);
      expect_close(values_of(*first.engine), want);
      EXPECT_EQ(first.engine->lr().size(), first.own ? 3U : 2U);
      EXPECT_EQ(first.engine->lr()[1] * 2, first.engine->lr()[0]);
      Loop second(row, 3 - stage, group);
      second.add(second.engine->module().grow());
      if (second.own) second.add(second.engine->module().thaw());
      EXPECT_TRUE(second.engine->load_checkpoint(mine));
      second.train(kSteps);
      expect_close(values_of(*second.engine), want);
      if (second.own == nullptr) return;
      const at::Tensor weight = second.engine->module().later->weight;
      second.engine->destroy();
      EXPECT_TRUE(second.own->param_groups()[1].params()[0].is_same(weight));  // it is back
    });
  }
}

// As it was before: the optimizer, and what is trained.
TEST(OwnGroups, WhatIsRefusedIsOutAgain) {
  for (const Row& row : {rows()[0], of_tessera("Adam", false), of_tessera("Lamb", false)})
    everywhere(row.name, [&](int stage, const comm::GroupPtr& group) {
      Loop run(row, stage, group);
      const Params trained = run.engine->module().last->parameters();
      auto& groups = run.own->param_groups();
      const auto refused = [&](const Params& params, const std::string& said) {
        groups.emplace_back(params, groups[0].options().clone());  // as add_param_group(), which knows no masters
        EXPECT_HAS(error_of<c10::ValueError>([&] { run.engine->forward(batch(0)); }), said);
        EXPECT_EQ(groups.size(), 1U);
      };
      refused(trained, "'last.weight' is in param group 0 already: change the rates of that one");
      refused({at::ones({2}).requires_grad_()}, "a tensor of shape [2] is no parameter of the module");
      refused({at::ones({2}).requires_grad_()}, "register the module that has it");
      refused({at::ones({2}).requires_grad_()}, "what was added to the optimizer's param groups is out of them again");
      groups[0].params().push_back(at::ones({2}));
      EXPECT_HAS(error_of([&] { run.engine->forward(batch(0)); }), "no parameter of the module");
      const io::TempFolder folder;
      groups.emplace_back(trained, groups[0].options().clone());
      EXPECT_HAS(error_of([&] { run.engine->save_checkpoint(folder.path()); }), "is in param group 0 already");
      const Params frozen = run.engine->module().first->parameters();
      run.engine->forward(batch(0)).backward();
      // One rank alone, after the forward: all have the error of step().
      if (group->rank() == group->size() - 1) groups.emplace_back(Params{trained[0]}, groups[0].options().clone());
      EXPECT_HAS(error_of([&] { run.engine->step(); }), "is in param group 0 already");
      EXPECT_TRUE(run.engine->step());
      groups[0].params().push_back(frozen[0]);  // in no group until here
      run.engine->module().thaw();
      run.engine->forward(batch(1)).backward();
      EXPECT_TRUE(run.engine->step());
      EXPECT_FALSE(run.engine->module_state_dict()["first.weight"].equal(Net().first->weight));
      const auto held = std::exchange(groups[0].params(), {});
      EXPECT_HAS(error_of([&] { run.engine->forward(batch(0)); }), "were removed, exchanged or put in another order");
      groups[0].params() = held;
      run.engine->forward(batch(2)).backward();
      EXPECT_TRUE(run.engine->step());
    });
}

TEST(OwnGroups, TheEngineCannotAddToAnOptimizerOfTorch) {
  testing::run_ranks(2, [&](int, const comm::GroupPtr& group) {
    Loop run(rows()[0], 1, group);
    EXPECT_HAS(error_of<UsageError>([&] { run.engine->add_param_group(run.engine->module().grow(), {}); }),
               "call its add_param_group() in place of the engine's");
  });
}

}  // namespace
}  // namespace tessera::nn::own_groups_tests
