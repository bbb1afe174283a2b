#include "tessera/engine/preflight.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tessera/engine/build.h"
#include "tests/support/errors.h"
#include "tests/support/toy.h"

namespace tessera::testing {

using engine::Engine;
using engine::ParamSpec;

namespace {

std::vector<const void*> addresses(const Toy& toy) {
  std::vector<const void*> all;
  for (const at::Tensor& tensor : toy.tensors)
    all.push_back(tensor.const_data_ptr());
  return all;
}

// What an engine over `specs` says when it refuses them; then `toy` must be as it was.
std::string refusal(const Toy& toy, const std::vector<ParamSpec>& specs, engine::Options options = toy_options({})) {
  const auto before = addresses(toy);
  const std::string error = error_of([&] { Engine(options, comm::Mesh(), specs, {toy_adamw()}); });
  if (!error.empty()) {
    EXPECT_EQ(addresses(toy), before);
  }
  return error;
}

engine::Options of_model(int stage) {
  auto options = toy_options({.stage = stage});
  options.precision_of_model = true;
  return options;
}

}  // namespace

TEST(Preflight, AModelOfALiveEngineIsRefusedBeforeItIsTouched) {
  const Toy toy;
  for (const bool bf16 : {false, true}) {
    Engine first = toy_engine({.stage = 1}, toy, comm::single_group());
    const at::Tensor master = first.states().get_full(3, engine::Quantity::Master).clone();
    EXPECT_HAS(refusal(toy, toy.specs(), toy_options({.bf16 = bf16})), "'a' already belongs to a live engine");
    EXPECT_TRUE(first.states().get_full(3, engine::Quantity::Master).equal(master));
    toy_forward(first, toy, toy_batch(0, 0)).backward();
    EXPECT_TRUE(first.step());
    first.destroy();
  }
  EXPECT_EQ(refusal(toy, toy.specs()), "");
}

TEST(Preflight, ParametersInTheSameMemoryAreRefusedByName) {
  Toy toy;
  const at::Tensor base = at::zeros({100});
  toy.tensors[0].set_data(base.narrow(0, 10, 1));
  toy.tensors[2].set_data(base.narrow(0, 0, 17));
  EXPECT_HAS(refusal(toy, toy.specs()), "parameters 'c' and 'a' lie in the same memory");
  toy.tensors[0].set_data(base.narrow(0, 17, 1));
  EXPECT_EQ(refusal(toy, toy.specs()), "") << "neighbours in one tensor are apart";
}

TEST(Preflight, WithoutASectionTheModelKeepsItsDtype) {
  for (const auto dtype : {at::kBFloat16, at::kHalf, at::kFloat}) {
    for (int stage = 0; stage < 4; ++stage) {
      run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
        Toy toy;
        for (at::Tensor& tensor : toy.tensors)
          tensor.set_data(tensor.detach().to(dtype));
        Engine engine(of_model(stage), comm::Mesh(group), toy.specs(), {toy_adamw()});
        EXPECT_EQ(engine.options().zero.precision.param, dtype);
        EXPECT_EQ(engine.options().zero.precision.grad, dtype);
        EXPECT_TRUE(engine.options().zero.precision.master_is_param());
        EXPECT_EQ(engine.memory().master, 0);
        toy_forward(engine, toy, toy_batch(rank, 0)).backward();
        EXPECT_TRUE(engine.step());
        EXPECT_EQ(toy.tensors[3].scalar_type(), dtype);
      });
    }
  }
}

TEST(Preflight, DtypesThatNobodyTrainsAndMixedOnesAreRefusedByName) {
  Toy toy;
  toy.tensors[3].set_data(toy.tensors[3].detach().to(at::kDouble));
  EXPECT_HAS(refusal(toy, toy.specs(), of_model(1)), "'w1' is Double, which is not trained");
  for (const bool low : {false, true}) {  // a precision section casts no complex one
    Toy wave;
    wave.tensors[3].set_data(wave.tensors[3].detach().to(at::kComplexFloat));
    auto options = of_model(1);
    if (low) options.zero.precision.param = options.zero.precision.grad = at::kBFloat16;
    EXPECT_HAS(refusal(wave, wave.specs(), options), "'w1' is ComplexFloat, which is not trained in any precision");
    auto specs = wave.specs();
    specs[3].group = -1;  // frozen: until it begins to be trained
    specs[3].joins = 0;
    wave.tensors[3].requires_grad_(false);
    Engine engine(options, comm::Mesh(), specs, {toy_adamw()});
    wave.tensors[3].requires_grad_(true);
    EXPECT_HAS(error_of([&] { engine.join(); }), "'w1' is ComplexFloat, which is not trained in any precision");
  }
  toy.tensors[3].set_data(toy.tensors[3].detach().to(at::kBFloat16));
  EXPECT_HAS(refusal(toy, toy.specs(), of_model(1)), "several dtypes: 'a' is Float, 'w1' BFloat16");
  auto specs = toy.specs();
  specs[3].group = -1;  // frozen ones may have another: nothing is cast
  EXPECT_EQ(error_of([&] { Engine(of_model(3), comm::Mesh(), specs, {toy_adamw()}); }), "");
  EXPECT_EQ(toy.tensors[3].scalar_type(), at::kBFloat16);
}

TEST(Preflight, RanksThatBuildDifferentEnginesSayWhatDiffers) {
  using Change = std::function<void(engine::Options&, std::vector<ParamSpec>&, std::vector<optim::GroupOptions>&)>;
  const std::vector<std::pair<std::string, Change>> rows{
      {"rank 1 has param group 0: lr 0.5", [](auto&, auto&, auto& groups) { groups[0].lr = 0.5; }},
      {"rank 0 has gradient_clipping 1, rank 1 has gradient_clipping 2",
       [](auto& options, auto&, auto&) { options.gradient_clipping = 2; }},
      {"rank 1 has ZeRO stage 2", [](auto& options, auto&, auto&) { options.zero.stage = 2; }},
      {"rank 1 has optimizer", [](auto& options, auto&, auto&) { options.rule = optim::Rule::Lion; }},
      {"rank 0 has parameter 'a', shape [1], param group 0, unit 'root', rank 1 has parameter 'b'",
       [](auto&, auto& specs, auto&) { std::swap(specs[0], specs[1]); }},
      {"rank 0 has number of parameters 5, rank 1 has number of parameters 4",
       [](auto&, auto& specs, auto&) { specs.pop_back(); }},
      {"unit 'blocks.1', rank 1 has parameter 'w2', shape [5, 3], param group 0, unit 'root'",
       [](auto&, auto& specs, auto&) { specs[4].unit = "root"; }},
      {"rank 1 has parameter 'w1', shape [17, 5], strides [1, 17]",
       [](auto&, auto& specs, auto&) { specs[3].tensor.set_data(specs[3].tensor.detach().t().contiguous().t()); }},
  };
  for (const auto& [text, change] : rows) {
    run_ranks(3, [&, &text = text, &change = change](int rank, const comm::GroupPtr& group) {
      const Toy toy;
      auto options = toy_options({.stage = 1});
      auto specs = toy.specs();
      std::vector<optim::GroupOptions> groups{toy_adamw()};
      if (rank > 0) change(options, specs, groups);
      const std::string error = error_of([&] { Engine(options, comm::Mesh(group), specs, groups); });
      EXPECT_HAS(error, "ranks build different engines: rank 0 has ");
      EXPECT_HAS(error, text);
    });
  }
}

}  // namespace tessera::testing
