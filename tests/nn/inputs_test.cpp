// Inputs of a forward that are not what the engine has: named, and cast.
#include <gtest/gtest.h>
#include <torch/nn.h>

#include <memory>
#include <type_traits>
#include <utility>

#include "tessera/nn/engine.h"
#include "tests/support/errors.h"

namespace tessera::nn::inputs_tests {
namespace {

// fp16.auto_cast: floating-point tensors, and those of a vector, whatever else comes in.
struct Keeps : torch::nn::Module {
  Keeps() { linear = register_module("linear", torch::nn::Linear(2, 2)); }
  at::Tensor forward(at::Tensor& x, const std::vector<at::Tensor>& more, const at::Tensor& numbers,
                     std::unique_ptr<int> count) {
    found = {x.scalar_type(), more.at(0).scalar_type(), more.at(1).scalar_type(), numbers.scalar_type()};
    return linear->forward(x.to(linear->weight.scalar_type())) * *count;
  }
  std::vector<at::ScalarType> found;
  torch::nn::Linear linear{nullptr};
};

}  // namespace

TEST(Inputs, InputsOfOtherDtypesAreNamedAndCast) {
  auto engine = initialize(torch::nn::Linear(2, 2), Config::from_json(R"({"train_batch_size": 1,
      "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "bf16": {"enabled": true}})"),
                           comm::Mesh());
  const at::Tensor x = at::ones({1, 2});
  EXPECT_EQ(engine.dtype(), at::kBFloat16);
  EXPECT_HAS(testing::error_of([&] { engine.forward(x); }),
             "[engine.forward] the engine has bfloat16 on cpu; input [0] is float32 on cpu: pass inputs through "
             "engine.cast_inputs(), or call engine.cast_forward_inputs(true)");
  EXPECT_EQ(engine.forward(engine.cast_inputs(x)).scalar_type(), at::kBFloat16);
  EXPECT_EQ(engine.cast_inputs(std::vector{x, at::ones({1}, at::kLong)})[1].scalar_type(), at::kLong);
  engine.cast_forward_inputs(true);
  engine.backward(engine.forward(x).sum());
  EXPECT_TRUE(engine.step());
  const std::string other = testing::error_of([&] { engine.forward(at::ones({1, 3})); });
  EXPECT_EQ(other.find("[engine.forward]"), std::string::npos) << other;
}

static_assert(std::is_nothrow_move_constructible_v<Engine<torch::nn::LinearImpl>>);

TEST(Inputs, Fp16CastsInputsWhereItIsAskedTo) {
  for (const bool fp16 : {true, false}) {
    const std::string enabled = fp16 ? "true" : "false";
    auto engine = initialize(std::make_shared<Keeps>(),
                             Config::from_json(R"({"train_batch_size": 1, "optimizer": {"type": "SGD"},
      "fp16": {"auto_cast": true, "initial_scale_power": 4, "enabled": )" +
                                               enabled + "}}"),
                             comm::Mesh());
    at::Tensor x = at::ones({1, 2});
    const std::vector<at::Tensor> more{at::ones({1}), at::ones({1}, at::kLong)};
    engine.backward(engine.forward(x, more, at::ones({1}, at::kInt), std::make_unique<int>(2)).sum());
    const auto floats = fp16 ? at::kHalf : at::kFloat;
    EXPECT_EQ(engine.module().found, (std::vector{floats, floats, at::kLong, at::kInt}));
    EXPECT_EQ(x.scalar_type(), at::kFloat);
    EXPECT_TRUE(engine.step());
  }
}

}  // namespace tessera::nn::inputs_tests
