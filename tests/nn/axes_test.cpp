// Engines over the axes of a mesh: means over the ranks that share a batch, and axes over which the model does nothing.
#include <gtest/gtest.h>
#include <torch/nn.h>

#include <functional>
#include <map>
#include <vector>

#include "tessera/nn/engine.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera::nn {
namespace {

// Over all ranks that gradients are averaged over, with as many tokens on each as its number says.
TEST(Axes, MeansAreOverAllTokensOfAllRanks) {
  using comm::Axis;
  const std::vector<std::map<Axis, int>> meshes{{{Axis::DpShard, 4}},
                                                {{Axis::DpShard, 2}, {Axis::Sp, 2}},
                                                {{Axis::Sp, 4}},
                                                {{Axis::DpReplicate, 2}, {Axis::Sp, 2}}};
  for (const auto& axes : meshes) {
    testing::run_axes(axes, [&](int rank, const comm::Mesh& mesh) {
      const auto config = Config::from_json(R"({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0,
          "optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "zero_optimization": {"stage": 2}})");
      torch::nn::Linear model(torch::nn::LinearOptions(1, 1).bias(false));
      auto engine = initialize(model, config, mesh);
      const double before = model->weight.item<double>();
      const int64_t tokens = rank + 1;
      const at::Tensor sum = engine.forward(at::full({tokens, 1}, static_cast<double>(rank))).sum();
      const at::Tensor loss = engine.token_mean(sum, at::tensor(tokens));
      EXPECT_NEAR(engine.mean(loss).item<double>(), 2 * before, 1e-5);  // 0 + 2 + 6 + 12 of 10 tokens
      loss.backward();
      engine.step();
      EXPECT_NEAR(before - model->weight.item<double>(), 2.0, 1e-5);
      EXPECT_EQ(engine.sum(at::tensor(tokens)).item<int64_t>(), 10);
      EXPECT_EQ(engine.mean(at::tensor(tokens)).item<double>(), 2.5);
    });
  }
}

TEST(Axes, MeansOfNothingAreRefused) {
  torch::nn::Linear model(2, 2);
  auto engine = initialize(
      model, Config::from_json(R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}})"), comm::Mesh());
  const at::Tensor one = at::ones({}), none;
  for (const auto& call :
       std::vector<std::function<void()>>{[&] { engine.mean(none); }, [&] { engine.sum(none); },
                                          [&] { engine.token_mean(one, none); }, [&] { engine.token_mean(none, one); }})
    EXPECT_HAS(testing::error_of<c10::ValueError>(call), "tensor is undefined");
}

// Ranks of a sequence that the configuration asks for, and a model without an attention: nothing is updated, on any rank.
TEST(Axes, ASequenceThatNothingExchangesIsAnError) {
  for (const bool in_backward : {false, true}) {
    testing::run_axes({{comm::Axis::Sp, 2}}, [&](int, const comm::Mesh& mesh) {
      const auto config = Config::from_json(c10::str(
          R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}, "sequence_parallel_size": 2,
              "gradient_clipping": 0, "zero_optimization": {"stage": 1}, "tessera": {"update_in_backward": )",
          in_backward ? "true" : "false", "}}"));
      auto engine = initialize(torch::nn::Linear(2, 2), config, mesh);
      const auto update = [&] {
        engine.forward(at::ones({1, 2})).sum().backward();
        engine.step();
      };
      if (in_backward) update();
      const int64_t steps = engine.global_steps();
      EXPECT_HAS(testing::message_of<UsageError>(update), "no attention of the model");
      EXPECT_EQ(engine.global_steps(), steps);
    });
  }
}

// Ranks along axes over which the model does nothing.
TEST(Axes, AxesThatCutNothingAreWarnedOfOnce) {
  for (const comm::Axis axis : {comm::Axis::Tp, comm::Axis::Sp}) {
    testing::run_axes({{axis, 2}}, [&](int rank, const comm::Mesh& mesh) {
      const testing::KeptWarnings kept;
      const auto config = Config::from_json(R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}})");
      auto engine = initialize(torch::nn::Linear(2, 2), config, mesh);
      for (int i = 0; i < 3; ++i) {
        engine.forward(at::ones({1, 2})).sum().backward();
        engine.step();
      }
      ASSERT_EQ(kept.lines.size(), rank == 0 ? 1U : 0U);
      const char* text =
          axis == comm::Axis::Tp ? "no module of the model is cut over them" : "no attention of the model";
      if (rank == 0) {
        EXPECT_HAS(kept.lines[0], text);
      }
    });
  }
}

}  // namespace
}  // namespace tessera::nn
