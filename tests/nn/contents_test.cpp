#include "tessera/nn/contents.h"

#include <gtest/gtest.h>
#include <torch/nn.h>

#include <filesystem>

#include "tessera/nn/engine.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera::nn {
namespace {

// Its forward reads more than the members of the layer that it is made of.
struct AdaptedImpl : torch::nn::LinearImpl {
  AdaptedImpl() : LinearImpl(6, 6) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = LinearImpl::forward(x);
    return gain.defined() ? y * gain : y;
  }
  at::Tensor gain;
};

struct HeadedImpl : torch::nn::Module {
  HeadedImpl() {
    attention = register_module("attention", torch::nn::MultiheadAttention(6, 2));
    cell = register_module("cell", torch::nn::GRUCell(6, 6));
    body = register_module(
        "body", torch::nn::Sequential(torch::nn::Linear(6, 6), torch::nn::LayerNorm(torch::nn::LayerNormOptions({6}))));
    adapted = register_module("adapted", std::make_shared<AdaptedImpl>());
    head = register_module("head", torch::nn::Linear(6, 2));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor row = cell(x).unsqueeze(1);
    return head(adapted->forward(body->forward(std::get<0>(attention(row, row, row)).squeeze(1)))).square().mean();
  }
  torch::nn::MultiheadAttention attention{nullptr};
  torch::nn::GRUCell cell{nullptr};
  torch::nn::Sequential body{nullptr};
  std::shared_ptr<AdaptedImpl> adapted;
  torch::nn::Linear head{nullptr};
};

Config config_of_stage(int stage) {
  return Config::from_json(c10::str(R"({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD"},
    "zero_optimization": {"stage": )",
                                    stage, "}}"));
}

struct Replacement {
  std::string name;
  std::function<void(HeadedImpl&)> act;
  std::string said;
};

// tessera.update_in_backward: before the backward has updated anything.
TEST(Contents, AnUpdateInTheBackwardIsRefusedBeforeIt) {
  for (int stage = 1; stage < 4; ++stage) {
    for (const int ranks : {1, 2}) {
      SCOPED_TRACE(c10::str(ranks, " ranks in stage ", stage));
      testing::run_ranks(ranks, [&](int rank, const comm::GroupPtr& group) {
        auto net = std::make_shared<HeadedImpl>();
        const auto config = Config::from_json(c10::str(
            R"({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD"}, "gradient_clipping": 0,
              "tessera": {"update_in_backward": true}, "zero_optimization": {"stage": )",
            stage, "}}"));
        auto engine = initialize(net, config, comm::Mesh(group));
        const auto masters = [&] {
          std::vector<at::Tensor> all;
          for (size_t i = 0; i < engine.core().params().size(); ++i)
            all.push_back(engine.core().states().get_full(static_cast<int>(i), zero::Quantity::Master).clone());
          return all;
        };
        const auto backward = [&] { engine.forward(torch::ones({4, 6})).backward(); };
        backward();
        EXPECT_HAS(testing::error_of<UsageError>([&] { engine.clip_grad_norm(1); }),
                   "[engine.clip_grad_norm] tessera.update_in_backward has used the gradients when it is called");
        EXPECT_TRUE(engine.step());
        const auto before = masters();
        const at::Tensor kept = net->head->weight;
        if (rank == ranks - 1) net->head->weight = torch::randn({2, 6}, at::requires_grad());
        EXPECT_HAS(testing::error_of(backward), "head.weight: the layer's member was given another tensor");
        const auto after = masters();
        for (size_t i = 0; i < before.size(); ++i)
          EXPECT_TRUE(after[i].equal(before[i]));
        EXPECT_EQ(engine.core().global_steps(), 1);
        net->head->weight = kept;
        backward();
        EXPECT_TRUE(engine.step());
        EXPECT_FALSE(masters()[0].equal(before[0]));
      });
    }
  }
}

TEST(Contents, WhatTheForwardUsesAndTheEngineDoesNotHaveIsRefusedOnAllRanks) {
  const std::vector<Replacement> cases{
      {"member", [](HeadedImpl& net) { net.head->weight = torch::randn({2, 6}, at::requires_grad()); }, "head.weight"},
      {"attention", [](HeadedImpl& net) { net.attention->in_proj_weight = torch::randn({18, 6}, at::requires_grad()); },
       "attention.in_proj_weight"},
      {"cell", [](HeadedImpl& net) { net.cell->bias_hh = torch::randn({18}, at::requires_grad()); }, "cell.bias_hh"},
      {"module", [](HeadedImpl& net) { net.head = net.replace_module("head", torch::nn::Linear(6, 2)); },
       "head.weight, head.bias: replaced"},
      {"added", [](HeadedImpl& net) { net.body->push_back(torch::nn::Linear(6, 6)); },
       "body.2.weight, body.2.bias: added"},
      {"of a layer",
       [](HeadedImpl& net) { net.adapted->gain = net.adapted->register_parameter("gain", torch::ones({6})); },
       "adapted.gain: added"},
      {"frozen",
       [](HeadedImpl& net) {
         net.body->push_back(torch::nn::Linear(6, 6));
         net.body->parameters()[4].requires_grad_(false);
         net.body->parameters()[5].requires_grad_(false);
       },
       ""},
      {"values",
       [](HeadedImpl& net) {
         const torch::NoGradGuard no_grad;
         net.head->bias.fill_(1);
       },
       ""},
  };
  const auto folder = std::filesystem::temp_directory_path() / "tessera_contents_test";
  for (int stage = 0; stage < 4; ++stage) {
    for (const Replacement& c : cases) {
      SCOPED_TRACE(c10::str(c.name, " in stage ", stage));
      testing::run_ranks(2, [&](int, const comm::GroupPtr& group) {
        auto net = std::make_shared<HeadedImpl>();
        Config of_ranks = config_of_stage(stage);
        auto engine = initialize(net, of_ranks, comm::Mesh(group));
        engine.forward(torch::ones({4, 6})).backward();
        EXPECT_TRUE(engine.step());
        c.act(*net);
        engine.forward(torch::ones({4, 6})).backward();
        if (c.said.empty()) {
          EXPECT_TRUE(engine.step());
          return;
        }
        for (const auto& call : {std::function<void()>([&] { engine.step(); }),
                                 std::function<void()>([&] { engine.save_checkpoint(folder); })}) {
          try {
            call();
            ADD_FAILURE() << "no error";
          } catch (const std::exception& error) {
            EXPECT_NE(std::string(error.what()).find(c.said), std::string::npos) << error.what();
          }
        }
        EXPECT_EQ(engine.core().global_steps(), 1);
      });
    }
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "latest"));
}

TEST(Contents, WeightsAreNeitherLoadedNorWrittenWhereOneRankHasOthers) {
  const auto folder = std::filesystem::temp_directory_path() / "tessera_contents_test_one";
  for (int stage = 0; stage < 4; ++stage) {
    testing::run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
      auto net = std::make_shared<HeadedImpl>();
      Config config = config_of_stage(stage);
      config.zero_optimization.stage3_gather_16bit_weights_on_model_save = true;
      auto engine = initialize(net, config, comm::Mesh(group));
      const auto weight = [&] { return engine.core().states().get_full(0, zero::Quantity::Master).clone(); };
      engine.save_checkpoint(folder);
      engine.forward(torch::ones({4, 6})).backward();
      EXPECT_TRUE(engine.step());
      const at::Tensor before = weight(), kept = net->head->weight;
      if (rank == 1) net->head->weight = torch::randn({2, 6}, at::requires_grad());
      EXPECT_HAS(testing::error_of<UsageError>([&] { static_cast<void>(engine.load_checkpoint(folder)); }),
                 "[engine.load_checkpoint] head.weight");
      EXPECT_HAS(testing::error_of<UsageError>(
                     [&] { static_cast<void>(engine.save_16bit_model(folder, "weights.safetensors")); }),
                 "[engine.save_16bit_model] head.weight");
      EXPECT_TRUE(weight().equal(before));
      EXPECT_EQ(engine.core().global_steps(), 1);
      net->head->weight = kept;
      EXPECT_TRUE(engine.load_checkpoint(folder));
      EXPECT_EQ(engine.core().global_steps(), 0);
    });
    EXPECT_FALSE(std::filesystem::exists(folder / "weights.safetensors"));
    std::filesystem::remove_all(folder);
  }
}

TEST(Contents, AFrozenLayerThatCameLaterAndIsThawedIsWhatWasAdded) {
  for (int stage = 0; stage < 4; ++stage) {
    for (const int world : {1, 2}) {
      testing::run_ranks(world, [&](int, const comm::GroupPtr& group) {
        auto net = std::make_shared<HeadedImpl>();
        auto engine = initialize(net, config_of_stage(stage), comm::Mesh(group));
        torch::nn::Linear late(6, 6);
        for (at::Tensor& param : late->parameters())
          param.requires_grad_(false);
        net->body->push_back(late);
        const auto step = [&] {
          engine.forward(torch::ones({4, 6})).backward();
          return engine.step();
        };
        EXPECT_TRUE(step());
        for (at::Tensor& param : late->parameters())
          param.requires_grad_(true);
        for (int i = 0; i < 2; ++i)
          EXPECT_HAS(testing::error_of(step), "body.2.weight, body.2.bias: added");
        EXPECT_EQ(engine.core().global_steps(), 1);
        engine.core().add_param({.name = "body.2.weight", .tensor = late->weight, .unit = "late", .joins = 0});
        engine.core().add_param({.name = "body.2.bias", .tensor = late->bias, .unit = "late", .joins = 0});
        engine.core().zero_grad();
        const at::Tensor before = late->bias.detach().clone();
        EXPECT_TRUE(step());
        EXPECT_FALSE(late->bias.equal(before));
      });
    }
  }
}

TEST(Contents, ARankAloneIsNamed) {
  testing::run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
    auto net = std::make_shared<HeadedImpl>();
    auto engine = initialize(net, config_of_stage(1), comm::Mesh(group));
    auto before = net->head->weight;
    if (rank == 1) net->head->weight = torch::randn({2, 6}, at::requires_grad());
    engine.forward(torch::ones({4, 6})).backward();
    try {
      engine.step();
      ADD_FAILURE() << "no error";
    } catch (const c10::ValueError& error) {
      EXPECT_NE(std::string(error.what()).find("rank 1 has head.weight"), std::string::npos) << error.what();
    }
    net->head->weight = before;
    EXPECT_TRUE(engine.step());
  });
}

}  // namespace
}  // namespace tessera::nn
