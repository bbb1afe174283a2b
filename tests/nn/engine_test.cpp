#include "tessera/nn/engine.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <numeric>
#include <set>
#include <thread>

#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera::nn {
namespace {

struct PairNet : torch::nn::Module {
  PairNet() {
    blocks = register_module("blocks", torch::nn::Sequential(torch::nn::Linear(5, 7), torch::nn::Tanh()));
    head = register_module("head", torch::nn::Linear(7, 3));
  }
  // loss, hidden values
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& y) {
    if (fail) {
      throw std::runtime_error("no luck");
    }
    const auto hidden = blocks->forward(x);
    return {torch::mse_loss(head(hidden), y), hidden};
  }
  torch::nn::Sequential blocks{nullptr};
  torch::nn::Linear head{nullptr};
  bool fail = false;
};

// `more`: of the section zero_optimization.
Config adamw_config(int stage, int ranks, const std::string& more = "") {
  return Config::from_json(R"({"gradient_clipping": 0, "train_micro_batch_size_per_gpu": 4, "train_batch_size": )" +
                           std::to_string(4 * ranks) + R"(,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
    "zero_optimization": {"stage": )" +
                           std::to_string(stage) + more + "}}");
}

struct Data {
  at::Tensor x = torch::randn({8, 5}), y = torch::randn({8, 3});
};

void require_grad(const torch::nn::Module& module, bool yes) {
  for (at::Tensor& p : module.parameters())
    p.set_requires_grad(yes);
}

// What a program does before step `i`, where it trains the head late, and ceases to train the blocks.
void change(const PairNet& net, int i, bool late) {
  if (!late) return;
  require_grad(*net.head, i >= 2);
  require_grad(*net.blocks, i < 4);
}

// Weights after 5 steps of plain PyTorch on the whole batch.
std::vector<at::Tensor> plain(PairNet& net, const Data& data, bool late = false) {
  torch::optim::AdamW optimizer(net.parameters(), torch::optim::AdamWOptions(0.01).weight_decay(0.1));
  for (int i = 0; i < 5; ++i) {
    change(net, i, late);
    optimizer.zero_grad();
    std::get<0>(net.forward(data.x, data.y)).backward();
    optimizer.step();
  }
  return net.parameters();
}

void copy(PairNet& to, const PairNet& from) {
  const torch::NoGradGuard no_grad;
  for (const auto& item : from.named_parameters()) {
    to.named_parameters()[item.key()].copy_(item.value());
  }
}

TEST(Engine, TrainsAsPlainPyTorchOnOneAndTwoRanks) {
  torch::manual_seed(1);
  const Data data;
  PairNet start;
  const io::TempFolder disk;
  for (int run = 0; run < 8; ++run) {
    const int ranks = 2, stage = run / 2;
    const bool late = run % 2 == 1;
    PairNet reference;
    copy(reference, start);
    const auto expected = plain(reference, data, late);
    const std::string on_disk = R"({"device": "nvme", "max_in_cpu": 0, "nvme_path": ")" + disk.path() + "\"}";
    const std::string away = stage == 2
                                 ? R"(, "offload_optimizer": {"device": "nvme", "nvme_path": ")" + disk.path() + "\"}"
                             : stage == 3 ? R"(, "stage3_param_persistence_threshold": 0, "offload_param": )" + on_disk
                                          : "";
    auto groups = comm::thread_groups(ranks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        auto net = std::make_shared<PairNet>();
        copy(*net, start);
        change(*net, 0, late);
        auto engine = initialize(net, adamw_config(stage, ranks, away), comm::Mesh(groups[rank]));
        EXPECT_EQ(engine.rank(), rank);
        EXPECT_EQ(engine.size(), ranks);
        for (int i = 0; i < 5; ++i) {
          change(*net, i, late);
          const auto x = data.x.narrow(0, 4 * rank, 4), y = data.y.narrow(0, 4 * rank, 4);
          std::get<0>(engine.forward(x, y)).backward();
          EXPECT_TRUE(engine.step());
          EXPECT_EQ(engine.core().global_samples(), 4 * ranks * (i + 1));
        }
        EXPECT_EQ(engine.core().memory().disk > 0, stage >= 2);
        std::vector<int> all(expected.size());
        std::iota(all.begin(), all.end(), 0);
        engine.core().regions().open(all);
        for (size_t i = 0; i < expected.size(); ++i) {
          EXPECT_TRUE(at::allclose(net->parameters()[i], expected[i], 1e-5, 1e-6)) << "stage " << stage << late;
        }
        engine.core().regions().close(all);
      });
    }
    for (auto& thread : threads) {
      thread.join();
    }
  }
}

// One model as two engines on two ranks: activations and their gradients are handed over (a broadcast stands for a send), all
// forwards come before the backwards, and both clip by one norm. As plain PyTorch, clipped over both.
TEST(Engine, StagesOfAPipelineAreEngines) {
  constexpr int kMicro = 4, kSteps = 3;
  torch::manual_seed(1);
  std::vector<Data> data(kMicro);
  PairNet start, reference;
  copy(reference, start);
  torch::optim::AdamW optimizer(reference.parameters(), torch::optim::AdamWOptions(0.01).weight_decay(0.1));
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    for (const Data& micro : data)
      (std::get<0>(reference.forward(micro.x, micro.y)) / kMicro).backward();
    torch::nn::utils::clip_grad_norm_(reference.parameters(), 0.05);
    optimizer.step();
  }
  const Config config = Config::from_json(R"({"gradient_clipping": 0.05, "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}})");
  const auto train = [&](auto& engine, const comm::GroupPtr& group, const auto& forward, const auto& backward) {
    for (int step = 0; step < kSteps; ++step) {
      for (int micro = 0; micro < kMicro; ++micro)
        forward(micro);
      for (int micro = 0; micro < kMicro; ++micro) {
        backward(micro);
        if (micro + 1 < kMicro) engine.step();
      }
      const at::Tensor square = torch::full({1}, engine.core().norm_contribution(), torch::kDouble);
      group->all_reduce(square, comm::ReduceOp::Sum).wait();
      EXPECT_TRUE(engine.step(std::sqrt(square.item<double>())));
    }
  };
  testing::run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
    PairNet net;
    copy(net, start);
    std::vector<at::Tensor> made(kMicro), losses(kMicro);
    if (rank == 0) {
      auto engine = initialize(net.blocks, config, comm::Mesh());
      train(
          engine, group,
          [&](int micro) {
            made[micro] = engine.forward(data[micro].x);
            group->broadcast(made[micro].detach().clone(), 0).wait();
          },
          [&](int micro) {
            at::Tensor gradient = torch::empty({8, 7});
            group->broadcast(gradient, 1).wait();
            made[micro].backward(gradient);
          });
      EXPECT_TRUE(at::allclose(net.blocks->parameters()[0], reference.blocks->parameters()[0], 1e-4, 1e-6));
    } else {
      auto engine = initialize(net.head, config, comm::Mesh());
      train(
          engine, group,
          [&](int micro) {
            made[micro] = torch::empty({8, 7});
            group->broadcast(made[micro], 0).wait();
            made[micro].requires_grad_(true);
            losses[micro] = torch::mse_loss(engine.forward(made[micro]), data[micro].y);
          },
          [&](int micro) {
            losses[micro].backward();
            group->broadcast(made[micro].grad(), 1).wait();
          });
      EXPECT_TRUE(at::allclose(net.head->weight, reference.head->weight, 1e-4, 1e-6));
    }
  });
}

struct LeavingNet : PairNet {
  void forward(const at::Tensor& x, const at::Tensor& y) { left = std::get<0>(PairNet::forward(x, y)); }
  at::Tensor left;
};

TEST(Engine, AForwardThatReturnsNothingTrainsAsOneThatReturnsTheLoss) {
  for (int stage = 0; stage < 4; ++stage) {
    SCOPED_TRACE(c10::str("stage ", stage));
    testing::run_ranks(2, [&](int, const comm::GroupPtr& group) {
      const Config config = adamw_config(stage, 2, stage == 3 ? R"(, "stage3_param_persistence_threshold": 0)" : "");
      const at::Tensor x = torch::ones({4, 5}), y = torch::zeros({4, 3});
      auto plain = std::make_shared<PairNet>();
      auto leaving = std::make_shared<LeavingNet>();
      {
        const torch::NoGradGuard no_grad;
        for (size_t i = 0; i < plain->parameters().size(); ++i) {
          plain->parameters()[i].fill_(0.1 * static_cast<double>(i + 1));
          leaving->parameters()[i].copy_(plain->parameters()[i]);
        }
      }
      auto engine = initialize(plain, config, comm::Mesh(group));
      auto other = initialize(leaving, config, comm::Mesh(group));
      for (int step = 0; step < 2; ++step) {
        std::get<0>(engine.forward(x, y)).backward();
        EXPECT_TRUE(engine.step());
        other.forward(x, y);
        leaving->left.backward();
        EXPECT_TRUE(other.step());
      }
      for (int i = 0; i < 4; ++i)
        EXPECT_TRUE(engine.core()
                        .states()
                        .get_full(i, zero::Quantity::Master)
                        .equal(other.core().states().get_full(i, zero::Quantity::Master)));
    });
  }
}

TEST(Engine, SequentialAndTheCallOperator) {
  torch::nn::Sequential net(torch::nn::Linear(5, 4), torch::nn::ReLU(), torch::nn::Linear(4, 1));
  auto engine = initialize(net, adamw_config(2, 1), comm::Mesh());
  const at::Tensor before = net->parameters()[0].clone();
  engine(torch::ones({4, 5})).sum().backward();
  EXPECT_TRUE(engine.step());
  EXPECT_FALSE(at::equal(before, engine.module().parameters()[0]));
}

TEST(Engine, AForwardThatThrowsLeavesTheEngineUsable) {
  auto net = std::make_shared<PairNet>();
  auto engine = initialize(net, adamw_config(1, 1), comm::Mesh());
  net->fail = true;
  EXPECT_THROW(engine.forward(torch::ones({4, 5}), torch::ones({4, 3})), std::runtime_error);
  net->fail = false;
  std::get<0>(engine.forward(torch::ones({4, 5}), torch::ones({4, 3}))).backward();
  EXPECT_TRUE(engine.step());
}

// Both ranks have the same batch, in values whose gradients' mean needs no rounding: a plain loop has the same bits.
// Calls inside a forward, from another thread. Those of its own thread are as they were, and so is all afterwards.
TEST(Engine, CallsComeFromOneThreadAtATime) {
  struct Calls : torch::nn::Module {
    Calls() : layer(register_module("layer", torch::nn::Linear(2, 2))) {}
    at::Tensor forward(const at::Tensor& x) {
      if (inside) inside();
      return layer(x).sum();
    }
    torch::nn::Linear layer;
    std::function<void()> inside;
  };
  for (const int stage : {0, 1, 3}) {
    const auto model = std::make_shared<Calls>();
    auto engine = initialize(model, adamw_config(stage, 1), comm::Mesh());
    const io::TempFolder dir;
    const at::Tensor x = at::ones({4, 2}), loss = engine.forward(x), plain_loss = engine.forward(x);
    const at::Tensor weight = model->layer->weight;
    const std::vector<std::function<void()>> calls{[&] { engine.forward(x); },
                                                   [&] { engine.backward(loss); },
                                                   [&] { engine.step(); },
                                                   [&] { engine.zero_grad(); },
                                                   [&] { const auto held = engine.no_sync(); },
                                                   [&] { engine.save_checkpoint(dir.path()); },
                                                   [&] { std::ignore = engine.load_checkpoint(dir.path()); },
                                                   [&] { std::ignore = engine.save_16bit_model(dir.path()); },
                                                   [&] { std::ignore = engine.module_state_dict(); },
                                                   [&] { engine.load_module_state_dict(NamedTensors()); },
                                                   [&] { engine.core().grad_norm(); },
                                                   [&] { engine.core().finish_update(); },
                                                   [&] { engine.core().join(); },
                                                   [&] { engine.core().reload_states(); },
                                                   [&] { plain_loss.backward(); },
                                                   [&] { const GatheredParameters region(engine, {weight}); },
                                                   [&] { const GatheredParameters region(engine, {weight}, 0); },
                                                   [&] { engine.states().full_param(weight); },
                                                   [&] { engine.states().set_full_param(weight, at::ones({2, 2})); },
                                                   [&] { engine.set_gradient_accumulation_steps(2); },
                                                   [&] { engine.set_gradient_accumulation_boundary(false); },
                                                   [&] { engine.set_micro_batch_size(3); },
                                                   [&] { engine.count_empty_steps(); },
                                                   [&] { engine.mean(x); },
                                                   [&] { engine.register_external_parameter(*model, weight); },
                                                   [&] { engine.wait_for_checkpoint(); },
                                                   [&] { engine.destroy(); }};
    for (const auto& call : calls) {
      std::string other;
      model->inside = [&] { std::thread([&] { other = testing::error_of<UsageError>(call); }).join(); };
      engine.forward(x);
      EXPECT_HAS(other, ": another thread is in forward of this engine; calls come from one thread at a time");
    }
    model->inside = [&] {  // what reads, and this thread's own calls
      std::thread([&] { EXPECT_EQ(engine.gradient_accumulation_steps() + engine.global_steps(), 1); }).join();
      engine.zero_grad();
    };
    engine.forward(x);
    std::thread([&] {
      engine.backward(loss);
      EXPECT_TRUE(engine.step());
    }).join();
  }
}

// A node whose backward runs a backward of its own, and so on. From some depth on, autograd runs them on threads of a pool.
struct Nested : torch::autograd::Function<Nested> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const std::function<at::Tensor(at::Tensor)>* body, int64_t depth) {
    context->save_for_backward({x});
    context->saved_data["body"] = reinterpret_cast<int64_t>(body);
    context->saved_data["depth"] = depth;
    return (*body)(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const c10::AutoGradMode with_grad(true);
    const auto* body =
        reinterpret_cast<const std::function<at::Tensor(at::Tensor)>*>(context->saved_data["body"].toInt());
    const int64_t depth = context->saved_data["depth"].toInt();
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    const at::Tensor y = depth > 0 ? apply(x, body, depth - 1) : (*body)(x);
    y.backward(grads[0]);
    return {x.grad(), {}, {}};
  }
};

TEST(Engine, AutogradsOwnThreadsWorkForABackward) {
  struct Deep : torch::nn::Module {
    Deep() : layer(register_module("layer", torch::nn::Linear(2, 2))) {}
    at::Tensor forward(const at::Tensor& x) { return Nested::apply(x, &body, 100).sum(); }
    torch::nn::Linear layer;
    std::set<std::thread::id> threads;
    const std::function<at::Tensor(at::Tensor)> body = [this](const at::Tensor& x) {
      threads.insert(std::this_thread::get_id());
      return layer(x);
    };
  };
  for (const int stage : {0, 1, 3}) {
    const auto model = std::make_shared<Deep>();
    auto engine = initialize(model, adamw_config(stage, 1), comm::Mesh());
    engine.backward(engine.forward(at::ones({4, 2}).requires_grad_()));
    EXPECT_GT(model->threads.size(), 1U);
    EXPECT_TRUE(engine.step());
  }
}

// Rank 0 saves in a thread while all train: no rank waits for what does not come.
TEST(Engine, ASaveOfAnotherThreadIsAnErrorOfAllRanks) {
  for (const bool amid : {false, true})  // between a forward and its backward
    for (const int stage : {0, 1, 2, 3})
      testing::run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
        auto engine = initialize(std::make_shared<PairNet>(), adamw_config(stage, 2), comm::Mesh(group));
        const io::TempFolder dir;
        const auto forward = [&] { return std::get<0>(engine.forward(at::ones({4, 5}), at::ones({4, 3}))); };
        at::Tensor loss = amid ? forward() : at::Tensor();
        std::string of_saver;
        std::thread saver;
        if (rank == 0) {
          saver = std::thread([&] { of_saver = testing::error_of([&] { engine.save_checkpoint(dir.path()); }); });
          std::this_thread::sleep_for(std::chrono::milliseconds(100));
        }
        const std::string error = testing::error_of([&] {
          for (int step = 0; step < 3; ++step) {
            if (!loss.defined()) loss = forward();
            std::exchange(loss, at::Tensor()).backward();
            engine.step();
          }
        });
        const char* const says = "another thread is in save_checkpoint of this engine; calls come from one thread";
        EXPECT_HAS(error, says);
        if (rank > 0) return;
        saver.join();
        EXPECT_HAS(of_saver, says);
      });
}

// C++ lets p.grad be of any shape.
TEST(Engine, GradientsOfAnotherShapeAreNamed) {
  for (const int ranks : {1, 2})
    for (const int stage : {0, 1, 2, 3})
      for (const bool after : {false, true})  // a backward
        testing::run_ranks(ranks, [&](int, const comm::GroupPtr& group) {
          auto net = std::make_shared<PairNet>();
          auto engine = initialize(net, adamw_config(stage, ranks), comm::Mesh(group));
          const auto backward = [&] { std::get<0>(engine.forward(at::ones({4, 5}), at::ones({4, 3}))).backward(); };
          if (after) backward();
          net->head->bias.mutable_grad() = at::ones({7});
          const std::string error = testing::error_of([&] {
            if (!after) backward();
            engine.step();
          });
          EXPECT_HAS(error, "the gradient of 'head.bias' has shape [7], and the parameter [3]");
          net->head->bias.mutable_grad().reset();
          engine.zero_grad();
          backward();
          EXPECT_TRUE(engine.step());
        });
}

TEST(Engine, WhatWasMovedFromSaysSo) {
  auto engine = initialize(torch::nn::Linear(2, 2), adamw_config(1, 1), comm::Mesh());
  auto other = std::move(engine);
  other.forward(at::ones({4, 2})).sum().backward();
  EXPECT_TRUE(other.step());
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { engine.forward(at::ones({4, 2})); }, [&] { engine.step(); }, [&] { engine.core(); },
           [&] { engine.module(); }, [&] { engine.module_ptr(); }, [&] { engine.expect(1); },
           [&] { engine.write_metrics({}); }, [&] { engine.on_metric({}); }, [&] { engine.zero_grad(); },
           [&] { std::ignore = engine.lr(); }, [&] { std::ignore = engine.device(); }, [&] { engine.comm_summary(); },
           [&] { engine.cast_forward_inputs(true); }, [&] { std::ignore = engine.drops_last_batch(); },
           [&] { std::ignore = engine.step_seconds(); }, [&] { std::ignore = engine.parallel_plan(); },
           [&] { engine.destroy(); }})  // NOLINT
    EXPECT_HAS(testing::error_of<UsageError>(call), "[engine] this object was moved from");
}

TEST(Engine, AutocastAsByHand) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (int stage = 0; stage <= 3; ++stage) {
      torch::manual_seed(1);
      const Data data;
      PairNet start;
      PairNet reference;
      copy(reference, start);
      const double scale = dtype == at::kHalf ? 1024 : 1;
      torch::optim::SGD optimizer(reference.parameters(), torch::optim::SGDOptions(0.125));
      for (int i = 0; i < 3; ++i) {
        optimizer.zero_grad();
        const amp::AutocastRegion region({true, dtype}, at::kCPU);
        const at::Tensor loss = std::get<0>(reference.forward(data.x, data.y));
        region.leave();
        (loss * scale).backward();
        for (const auto& item : reference.named_parameters())
          item.value().mutable_grad() = item.value().grad().to(dtype).to(at::kFloat) / scale;
        optimizer.step();
      }
      const auto config = Config::from_json(
          R"({"gradient_clipping": 0, "train_micro_batch_size_per_gpu": 8, "train_batch_size": 16,
              "optimizer": {"type": "SGD", "params": {"lr": 0.125}}, "torch_autocast": {"enabled": true, "dtype": ")" +
          std::string(dtype == at::kHalf ? "fp16" : "bf16") +
          R"("}, "zero_optimization": {"stage3_param_persistence_threshold": 0, "stage": )" + std::to_string(stage) +
          "}}");
      auto groups = comm::thread_groups(2);
      std::vector<std::thread> threads;
      for (int rank = 0; rank < 2; ++rank) {
        threads.emplace_back([&, rank] {
          auto net = std::make_shared<PairNet>();
          copy(*net, start);
          auto engine = initialize(net, config, comm::Mesh(groups[rank]));
          if (dtype == at::kHalf) {
            EXPECT_EQ(engine.loss_scale(), 65536);
            EXPECT_THROW(std::get<0>(engine.forward(data.x, data.y)).backward(), std::exception);
            engine.core().scaling().set_scale(scale);
          }
          for (int i = 0; i < 3; ++i) {
            const auto [loss, hidden] = engine.forward(data.x, data.y);
            EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
            EXPECT_EQ(hidden.scalar_type(), dtype);
            engine.scale(loss).backward();
            EXPECT_TRUE(engine.step());
          }
          int number = 0;
          for (const auto& item : reference.named_parameters()) {
            EXPECT_TRUE(engine.core().states().get_full(number++, engine::Quantity::Master).equal(item.value()))
                << item.key() << " in stage " << stage;
          }
        });
      }
      for (auto& thread : threads)
        thread.join();
    }
  }
}

TEST(Engine, RegionsOfTheCallerAreSwitchedOff) {
  auto net = std::make_shared<PairNet>();
  auto engine = initialize(net, adamw_config(1, 1), comm::Mesh());
  const amp::AutocastRegion region({true, at::kBFloat16}, at::kCPU);
  for (int i = 0; i < 2; ++i) {
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(std::get<1>(engine.forward(torch::ones({4, 5}), torch::ones({4, 3}))).scalar_type(), at::kFloat);
    const std::string said = ::testing::internal::GetCapturedStderr();
    EXPECT_EQ(said.find("torch_autocast") != std::string::npos, i == 0) << said;
    EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCPU));
  }
  net->fail = true;
  EXPECT_THROW(engine.forward(torch::ones({4, 5}), torch::ones({4, 3})), std::runtime_error);
  EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCPU));
  region.leave();
}

TEST(Engine, EngineBackwardIsBackward) {
  auto net = std::make_shared<PairNet>();
  auto engine = initialize(net, adamw_config(0, 1), comm::Mesh());
  const auto loss = std::get<0>(engine.forward(torch::ones({4, 5}), torch::ones({4, 3})));
  EXPECT_TRUE(at::equal(engine.backward(loss), loss));
  EXPECT_TRUE(engine.step());
  EXPECT_EQ(engine.core().global_steps(), 1);
}

}  // namespace
// LibTorch keeps the tensor that was registered: `head->weight = token->weight` ties nothing in named_parameters().
TEST(Engine, AWeightThatNothingUsesAnyMoreIsNamedOnce) {
  struct TiedImpl : torch::nn::Module {
    TiedImpl() { head->weight = token->weight; }
    at::Tensor forward(const at::Tensor& ids) { return head(token(ids)); }
    torch::nn::Embedding token = register_module("token", torch::nn::Embedding(5, 3));
    torch::nn::Linear head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(3, 5).bias(false)));
  };
  for (int stage = 0; stage < 4; ++stage) {
    testing::run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
      const testing::KeptWarnings kept;
      const auto config = Config::from_json(c10::str(
          R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": )",
          stage, "}}"));
      auto engine = initialize(std::make_shared<TiedImpl>(), config, comm::Mesh(group));
      for (int step = 0; step < 3; ++step) {
        engine.forward(at::arange(2)).sum().backward();
        engine.step();
      }
      ASSERT_EQ(kept.lines.size(), rank == 0 ? 1U : 0U) << ::testing::PrintToString(kept.lines);
      if (rank == 0) {
        EXPECT_HAS(kept.lines[0], "'head.weight': trained, and without a gradient in the first step");
      }
    });
  }
}

TEST(Engine, HasWhatProgramsReadOfTheCore) {
  ::testing::internal::CaptureStderr();
  auto engine = initialize(torch::nn::Linear(2, 1), Config::from_json(R"({"train_micro_batch_size_per_gpu": 3,
      "gradient_accumulation_steps": 2, "dump_state": true, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}})"));
  const std::string shown = ::testing::internal::GetCapturedStderr();
  EXPECT_HAS(shown, "[tessera] configuration\n");
  EXPECT_HAS(shown, "gradient_accumulation_steps");
  EXPECT_HAS(shown, "[tessera] param group 0: 2 parameters, lr 0.5, momentum 0");
  for (int pass = 0; pass < 2; ++pass) {
    engine.backward(engine.forward(at::ones({3, 2})).sum());
    engine.step();
  }
  engine.finish_update();
  EXPECT_EQ(engine.micro_steps(), 2);
  EXPECT_EQ(engine.global_samples(), 6);
  const auto& seen = engine;
  EXPECT_EQ(seen.groups().front().lr, 0.5);
  EXPECT_EQ(seen.states().full_param("bias").sizes(), at::IntArrayRef({1}));
  EXPECT_FALSE(seen.offload_plan().text().empty());
  EXPECT_EQ(seen.module_state_dict()["bias"].sizes(), at::IntArrayRef({1}));
  EXPECT_HAS(testing::error_of<UsageError>([&] { std::ignore = seen.comm_summary(); }), "set comms_logger.enabled");
  engine.backward(engine.forward(at::ones({3, 2})).sum());
  EXPECT_NEAR(seen.grad_norm(), std::sqrt(27.0) / 2, 1e-5);  // of a half of the gradients (3, 3) and 3
}

// A rank that leaves by an error waits for none, and the other never comes to its own end before; nothing is lost.
TEST(Engine, AnErrorLeavesACoalescedReductionWithoutWaiting) {
  testing::run_ranks(2, [](int rank, const comm::GroupPtr& group) {
    auto engine = initialize(torch::nn::Linear(5, 1), adamw_config(2, 2), comm::Mesh(group));
    const auto start = std::chrono::steady_clock::now();
    const auto pass = [&] { engine.backward(engine.forward(torch::ones({4, 5})).sum() / 4); };
    const std::string text = testing::error_of([&] {
      auto held = engine.coalesce();
      pass();
      if (rank == 0) throw std::runtime_error("the caller's own");
      std::this_thread::sleep_for(std::chrono::seconds(3));
      held.end();
    });
    EXPECT_EQ(text, rank == 0 ? "the caller's own" : "");
    EXPECT_TRUE(rank != 0 || std::chrono::steady_clock::now() - start < std::chrono::seconds(2));
    if (rank == 0) engine.coalesce().end();
    EXPECT_TRUE(engine.step());
    EXPECT_NEAR(engine.core().global_grad_norm().value_or(0), std::sqrt(6.0), 1e-5) << "of all contributions";
  });
}

}  // namespace tessera::nn
