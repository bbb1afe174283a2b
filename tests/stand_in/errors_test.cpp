// Errors in a forward or backward that all ranks meet: the engine goes on, whenever each rank's graph task dies.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <atomic>
#include <chrono>
#include <list>
#include <string>
#include <thread>
#include <vector>

#include "tests/stand_in/trainee.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera::testing {
namespace {

using Flag = std::atomic<bool>;

void wait_for(const Flag& flag) {
  using namespace std::chrono_literals;
  for (const auto end = std::chrono::steady_clock::now() + 20s; !flag && std::chrono::steady_clock::now() < end;)
    std::this_thread::sleep_for(1ms);
}

// Its backward says that it runs, and waits.
struct Waits : torch::autograd::Function<Waits> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, int64_t runs, int64_t until) {
    ctx->saved_data["runs"] = runs;
    ctx->saved_data["until"] = until;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    *reinterpret_cast<Flag*>(ctx->saved_data["runs"].toInt()) = true;
    wait_for(*reinterpret_cast<Flag*>(ctx->saved_data["until"].toInt()));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // what set the flag goes on to throw
    return {grads[0], {}, {}};
  }
};

// A backward that throws in the device's thread while the caller's thread runs a node, so that the caller has the error at
// once, and while the thread of another device runs one, which holds the graph task until `over`.
struct LateDeath {
  Flag slow = false, holds = false, failed = false, over = false;

  static at::Tensor waiting(c10::Device device, Flag& runs, Flag& until) {
    const at::Tensor leaf = at::ones({1}).to(device).requires_grad_(true);
    return Waits::apply(leaf, reinterpret_cast<int64_t>(&runs), reinterpret_cast<int64_t>(&until)).sum().cpu();
  }
  at::Tensor around(const at::Tensor& loss, int other_device) {
    const at::Tensor last = waiting(at::kCPU, slow, failed);  // made first: the caller's thread runs it last
    return loss.cpu() + last + waiting(device_for_limits(other_device), holds, over);
  }
  void fail() {
    wait_for(holds);
    wait_for(slow);
    failed = true;
    throw std::runtime_error("all ranks fail");
  }
};

struct Failing {
  Limited row;
  bool in_forward = false;
  int layer = 0;               // of the toy, in the order of the forward
  int after = 0;               // micro-batches
  int times = 1;               // in a row
  bool late = false;           // on rank 0 the graph task of a backward lives on
  bool dropped_before = true;  // gradients, before the next forward; else after it
};

std::string text_of(const Failing& f) {
  return text_of(f.row) + (f.in_forward ? ", forward" : ", backward") + " of layer " + std::to_string(f.layer) +
         ", after " + std::to_string(f.after) + ", " + std::to_string(f.times) + " times" + (f.late ? ", late" : "") +
         (f.dropped_before ? "" : ", gradients dropped after the next forward");
}

void fail_in_forward(Trainee& trainee, const Failing& f, const at::Tensor& x) {
  const auto forward = [&] {
    trainee.engine->pre_forward();
    auto& modules = trainee.engine->modules();
    const int whole = trainee.toy.whole;
    if (whole >= 0) modules.enter(whole);
    for (int layer = 0; layer <= f.layer; ++layer)
      trainee.toy.module(trainee.engine.get(), layer, x, [&]() -> at::Tensor {
        if (layer == f.layer) throw std::runtime_error("all ranks fail");
        return x;
      });
  };
  EXPECT_HAS(error_of(forward), "all ranks fail");
  if (trainee.toy.whole >= 0) trainee.engine->modules().abort(trainee.toy.whole);
  trainee.engine->abort_forward();
}

void fail_in_backward(Trainee& trainee, const Failing& f, const at::Tensor& x, int rank, std::list<LateDeath>& deaths) {
  at::Tensor loss = toy_forward(*trainee.engine, trainee.toy, x);
  const bool late = f.late && rank == 0;
  if (late) loss = deaths.emplace_back().around(loss, 1 + static_cast<int>(deaths.size()));
  constexpr std::array<size_t, 3> kWeights{3, 4, 0};
  const at::Tensor& weight = trainee.toy.tensors[kWeights[static_cast<size_t>(f.layer)]];
  const unsigned hook = weight.register_hook([&](const at::Tensor& grad) -> at::Tensor {
    if (late) deaths.back().fail();
    TORCH_CHECK(grad.numel() < 0, "all ranks fail");
    return grad;
  });
  EXPECT_HAS(error_of([&] { loss.backward(); }), "all ranks fail") << text_of(f);
  weight.remove_hook(hook);
}

// What the states are after six micro-batches, with errors amid them or without any.
std::vector<at::Tensor> trained(const Failing& f, bool fails, int rank, const comm::GroupPtr& group) {
  Trainee trainee(f.row, rank, /*builds=*/false);
  trainee.build(group);
  std::list<LateDeath> deaths;
  for (int number = 0; number < 6; ++number) {
    const at::Tensor x = toy_batch(rank, number).to(trainee.device);
    const bool now = fails && number == f.after;
    for (int i = 0; now && i < f.times; ++i) {
      if (f.in_forward) {
        fail_in_forward(trainee, f, x);
      } else {
        fail_in_backward(trainee, f, x, rank, deaths);
      }
    }
    if (now && f.dropped_before) trainee.engine->zero_grad();
    const at::Tensor loss = toy_forward(*trainee.engine, trainee.toy, x);
    if (now && !f.dropped_before) trainee.engine->zero_grad();
    for (LateDeath& death : deaths)
      death.over = true;
    loss.backward();
    trainee.engine->step();
  }
  return trainee.states();
}

std::vector<Failing> rows_that_fail() {
  using enum Residence;
  const auto row = [](int stage, int accumulation = 1, Residence states = Device, Residence weights = Device) {
    return Limited{.run = {.stage = stage, .accumulation = accumulation, .clip = 0, .min_unit = 1, .persistence = 0},
                   .states = states,
                   .weights = weights};
  };
  std::vector<Failing> all;
  for (const Limited& where : {row(3), row(3, 2), row(3, 1, Host, Host), row(2), row(1, 2)}) {
    for (const int after : {0, 4}) {  // before there is an order, and with one
      for (const int layer : {0, 1, 2}) {
        all.push_back({.row = where, .in_forward = true, .layer = layer, .after = after, .times = 2});
        for (const bool late : {false, true})
          all.push_back({.row = where, .layer = layer, .after = after, .late = late, .dropped_before = layer != 1});
      }
      all.push_back({.row = where, .layer = 1, .after = after, .times = 2, .late = true});
    }
  }
  Limited early = row(3);  // the root's gradient comes first: nothing is updated before the error
  early.run.in_backward = true;
  for (const bool runs_on : {false, true}) {
    early.run.runs_on = runs_on;
    early.states = runs_on ? Host : Device;
    for (const int after : {0, 4})
      all.push_back({.row = early, .layer = 2, .after = after, .late = true});
  }
  return all;
}

}  // namespace

TEST(Errors, ThatAllRanksHaveLeaveTheEngineUsable) {
  for (const Failing& f : rows_that_fail()) {
    SCOPED_TRACE(text_of(f));
    try {
      run_ranks(
          2,
          [&](int rank, const comm::GroupPtr& group) {
            expect_same(trained(f, true, rank, group), trained(f, false, rank, group), text_of(f));
          },
          std::chrono::seconds(30));
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
  }
  EXPECT_STREQ(tessera_stand_in_races(), "");
}

}  // namespace tessera::testing
