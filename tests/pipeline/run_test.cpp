// Batches over an abstract stage: results of the whole model, and errors of one rank, without any engine.
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/comm/backends.h"
#include "tessera/pipeline/runner.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera::pipeline {
namespace {

using testing::error_of;

constexpr int64_t kWidth = 4;

at::Tensor weight_of(int part) {
  return at::randn({kWidth, kWidth}, at::make_generator<at::CPUGeneratorImpl>(part), at::kFloat);
}
at::Tensor input_of(int micro) {
  return at::randn({3, kWidth}, at::make_generator<at::CPUGeneratorImpl>(100 + micro), at::kFloat);
}
at::Tensor layer(const at::Tensor& x, const at::Tensor& weight) {
  return at::tanh(at::linear(x, weight));
}

// A weight for each chunk; `fails`: in that forward of the stage.
class Matrices final : public Stage {
 public:
  Matrices(const Shape& shape, int stage, int fails = -1) : shape_(shape), stage_(stage), fails_(fails) {
    for (int chunk = 0; chunk < shape.chunks; ++chunk)
      weights.push_back(weight_of(shape.part(stage, chunk)).requires_grad_());
  }

  Made forward(int chunk, int micro, Message inputs) override {
    TESSERA_CHECK_VALUE(forwards_++ != fails_, "layer", "no luck");
    const at::Tensor y = layer(shape_.is_first(stage_, chunk) ? input_of(micro) : inputs.tensors[0], weights[chunk]);
    if (!shape_.is_last(stage_, chunk)) return {{{y}}};
    return {{}, y.square().sum()};
  }
  void backward(const at::Tensor& loss) override { loss.backward(); }
  void backward(const Tensors& outputs, const Tensors& gradients) override {
    torch::autograd::backward(outputs, gradients);
  }
  void count_micro_batch() override { ++counted; }
  void join() override {}
  void set_boundary(bool boundary) override { boundaries += boundary ? 1 : 0; }
  const amp::GradScaler& scaler() const override { return scaler_; }
  at::Tensor scale(const at::Tensor& output) override { return output; }
  const std::vector<zero::ParamSpec>& params() const override { return params_; }
  zero::StateAccess& states() override { TESSERA_ASSERT(false, "there is no engine"); }
  int64_t read(int64_t wanted) override { return has.value_or(wanted); }
  void end_of_data() override { TESSERA_FAIL(UsageError, "the end"); }
  void set_loss(double) override {}
  void step(const std::vector<int>&) override { ++steps; }
  void forget_gradients() override { ++forgotten; }

  std::optional<int64_t> has;  // micro-batches; unset: all
  int steps = 0, forgotten = 0;
  Tensors weights;
  int counted = 0, boundaries = 0;

 private:
  const Shape shape_;
  const int stage_, fails_;
  int forwards_ = 0;
  const amp::GradScaler scaler_{amp::ScalerOptions::fixed(1)};
  const std::vector<zero::ParamSpec> params_;
};

// body(runner) on a thread for each stage.
void run_stages(const Shape& shape, const std::function<void(Runner&)>& body) {
  const auto groups = comm::thread_groups(shape.stages, std::chrono::seconds(30));
  const auto p2p = comm::thread_point_to_point(shape.stages, std::chrono::seconds(30));
  testing::run_threads(groups, [&](int rank, const comm::GroupPtr& group) {
    Ranks ranks{shape.stages, 1, rank, group, at::kCPU, p2p[rank], p2p[rank]};
    for (int stage = 0; stage < shape.stages; ++stage)
      ranks.peers.push_back(stage);
    Runner runner(ranks, std::make_shared<Ties>(ranks, std::vector<Tied>(), Building(group, "a rank")), shape.chunks,
                  at::kCPU, {});
    body(runner);
  });
}

}  // namespace

TEST(Run, GradientsAreThoseOfTheWholeModel) {
  for (const auto& [name, shape] : std::vector<std::pair<std::string, Shape>>{
           {"1f1b", {3, 9, 1}}, {"gpipe", {2, 5, 2}}, {"interleaved", {2, 8, 3}}}) {
    Tensors weights;
    for (int part = 0; part < shape.stages * shape.chunks; ++part)
      weights.push_back(weight_of(part).requires_grad_());
    double expected = 0;
    for (int micro = 0; micro < shape.micro_batches; ++micro) {
      at::Tensor x = input_of(micro);
      for (const at::Tensor& weight : weights)
        x = layer(x, weight);
      x.square().sum().backward();
      expected += x.square().sum().item<double>() / shape.micro_batches;
    }
    run_stages(shape, [&, name = name, shape = shape](Runner& runner) {
      const int stage = runner.ranks().stage();
      Matrices matrices(shape, stage);
      const auto result = runner.run(matrices, training(name, shape, stage), shape, /*trains=*/true);
      EXPECT_NEAR(result.loss.value(), expected, 1e-4);
      for (int chunk = 0; chunk < shape.chunks; ++chunk)
        EXPECT_TRUE(at::equal(matrices.weights[chunk].grad(), weights[shape.part(stage, chunk)].grad()));
      EXPECT_EQ(matrices.counted, shape.micro_batches - 1);
      EXPECT_EQ(matrices.boundaries, 1);
      EXPECT_EQ(result.most_live, live_bound(name, shape, stage));
      const at::NoGradGuard no_grad;
      const auto evaluated = runner.run(matrices, forward_only(shape, stage), shape, /*trains=*/false);
      EXPECT_NEAR(evaluated.loss.value(), expected, 1e-4);
      EXPECT_LE(evaluated.most_under_way, kAhead);
    });
  }
}

TEST(Run, AnErrorOfOneStageIsOneOfAll) {
  const Shape shape{4, 6, 1};
  for (const bool trains : {true, false}) {
    run_stages(shape, [&](Runner& runner) {
      const int stage = runner.ranks().stage();
      Matrices matrices(shape, stage, /*fails=*/stage == 1 ? 2 : -1);
      const at::AutoGradMode mode(trains);
      const Table table = trains ? training("1f1b", shape, stage) : forward_only(shape, stage);
      try {
        runner.run(matrices, table, shape, trains);
        FAIL();
      } catch (const StageFailed& failed) {
        EXPECT_NE(stage, 1);
        EXPECT_HAS(std::string(failed.what()), "stage 1 (rank 1) failed in this batch: [layer] no luck");
      } catch (const c10::ValueError&) {
        EXPECT_EQ(stage, 1);
      }
    });
  }
}

// One call at a time; after an error amid messages, or of a lost rank, none.
TEST(Run, CallsAndWhatEndsThem) {
  const Shape shape{2, 4, 1};
  const auto refused = [](Runner& runner) { return error_of<UsageError>([&] { runner.begin("eval_batch"); }); };
  const auto ends = [&](Runner& runner, int stage, bool amid, bool lost) {
    Matrices matrices(shape, stage, amid && stage == 1 ? 2 : -1);
    try {
      runner.in_call("train_batch", matrices, [&]() -> int {
        EXPECT_EQ(runner.call(), "train_batch");
        EXPECT_HAS(error_of<UsageError>([&] { runner.begin("eval_batch"); }), "eval_batch: inside train_batch");
        runner.run(matrices, training("1f1b", shape, stage), shape, /*trains=*/true);
        TESSERA_CHECK_DIST(!lost, "comm", "a lost rank");
        TESSERA_FAIL(UsageError, "no step");
      });
    } catch (const std::exception&) {
      EXPECT_EQ(runner.call(), "");
    }
  };
  run_stages(shape, [&](Runner& runner) {
    const int stage = runner.ranks().stage();
    ends(runner, stage, false, false);
    EXPECT_EQ(refused(runner), "") << "behind the messages";
    runner.end();
    ends(runner, stage, true, false);
    EXPECT_HAS(refused(runner), "eval_batch: a batch has failed before (");
  });
  run_stages(shape, [&](Runner& runner) {
    ends(runner, runner.ranks().stage(), false, true);
    EXPECT_HAS(refused(runner), "a lost rank");
  });
}

TEST(Run, ABatchBeginsWhereAllRanksHaveTheirData) {
  const Shape shape{3, 4, 1};
  struct Row {
    std::array<int64_t, 3> has;
    std::string text;
  };
  const std::vector<Row> rows{{{4, -1, 4}, ""},
                              {{0, -1, 0}, "the end"},
                              {{3, -1, 4}, "the data of stage 0 (rank 0) ended after 3 of 4 micro-batches"},
                              {{4, -1, 0}, "the data of rank 2 has ended, that of other ranks has not"},
                              {{4, 4, 4}, ""}};
  run_stages(shape, [&](Runner& runner) {
    const int stage = runner.ranks().stage();
    int steps = 0;
    for (const Row& row : rows) {
      Matrices matrices(shape, stage);
      matrices.has = row.has[stage];
      const std::string text =
          error_of<UsageError>([&] { runner.train_batch(matrices, training("1f1b", shape, stage), shape); });
      EXPECT_EQ(text.empty(), row.text.empty()) << text;
      EXPECT_HAS(text, row.text);
      EXPECT_EQ(matrices.steps, row.text.empty() ? 1 : 0);
      EXPECT_EQ(matrices.forgotten, 0);
      steps += matrices.steps;
    }
    EXPECT_EQ(steps, 2);
    Matrices matrices(shape, stage);
    matrices.has = stage;  // of another batch
    const Shape other{3, 3 + stage, 1};
    EXPECT_HAS(error_of<UsageError>([&] { runner.train_batch(matrices, training("1f1b", other, stage), other); }),
               "micro-batches for this batch, ");
  });
}

// Each rank in turn: it throws its own error, others the same in its words, and the next exchange finds all at one place.
TEST(Run, WhatOneRankCannotMakeIsAnErrorOfAll) {
  const Shape shape{3, 1, 1};
  run_stages(shape, [](Runner& runner) {
    const Ranks& ranks = runner.ranks();
    for (int bad = 0; bad <= 3; ++bad) {
      std::vector<std::vector<double>> rows;
      const std::string text = error_of([&] {
        rows = agreed_rows(
            ranks, "count", failure_of, 1,
            [&] {
              TESSERA_CHECK(ranks.rank != bad, "test", "no fingers");
              return std::vector<double>{1.0 * ranks.rank};
            },
            "fingers");
      });
      const std::string named = c10::str("[pipeline] stage ", bad, " (rank ", bad, ") could not count: [test] no fing");
      EXPECT_EQ(text.find(named) == 0, bad < 3 && bad != ranks.rank) << text;
      EXPECT_EQ(text.empty(), bad == 3) << text;
      if (bad == 3) {
        EXPECT_EQ(rows, (std::vector<std::vector<double>>{{0}, {1}, {2}}));
      }
    }
  });
}

TEST(Run, WhatRanksAnnounceHasAnyLength) {
  testing::run_ranks(3, [](int rank, const comm::GroupPtr& group) {
    const auto texts = texts_of(*group, std::string(static_cast<size_t>(rank), 'x'), "texts");
    EXPECT_EQ(texts, (std::vector<std::string>{"", "x", "xx"}));
    EXPECT_EQ(texts_of(*group, "", "nothing"), std::vector<std::string>(3));
    EXPECT_EQ(rows_of(*group, {1.0 * rank, 7}, "numbers")[2], (std::vector<double>{2, 7}));
  });
}

}  // namespace tessera::pipeline
