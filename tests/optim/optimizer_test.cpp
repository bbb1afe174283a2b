// Several steps of every rule against torch's C++ optimizers and fused operators.
#include "tessera/optim/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/optim.h>

#include <functional>
#include <string>

#include "tessera/optim/types.h"
#include "tessera/shard/dtype.h"

namespace tessera::optim {
namespace {

constexpr int64_t kCount = 5003;
constexpr int kSteps = 6;

// Each step may round differently by a unit in the last place or two (torch fuses products and sums
// only in its wide versions); over a few steps that stays below 1e-6 of weights of size 1.
void expect_close(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_LE((actual - expected).abs().max().item<double>(), 1e-6);
}

UpdateSlice slice_of(const at::Tensor& master, int states) {
  UpdateSlice slice;
  slice.master = master.clone();
  for (int s = 0; s < states; ++s)
    slice.state[s] = at::zeros_like(master);
  return slice;
}

std::vector<at::Tensor> gradients() {
  std::vector<at::Tensor> list;
  for (int step = 0; step < kSteps; ++step)
    list.push_back(at::randn({kCount}) * 0.1);
  return list;
}

at::Tensor run(Rule rule, const GroupOptions& group, const at::Tensor& start, const std::vector<at::Tensor>& grads,
               double scale = 1) {
  auto slice = slice_of(start, state_names(rule, {group}).count);
  for (int step = 1; step <= kSteps; ++step) {
    slice.grad = grads[step - 1] / scale;
    update(rule, group, step, slice, scale);
  }
  return slice.master;
}

// Runs a torch optimizer over a copy of `start`.
template <class Optimizer, class Options>
at::Tensor run_torch(const Options& options, const at::Tensor& start, const std::vector<at::Tensor>& grads) {
  auto weight = start.clone().requires_grad_();
  Optimizer optimizer({weight}, options);
  for (const auto& grad : grads) {
    weight.mutable_grad() = grad.clone();
    optimizer.step();
  }
  return weight.detach();
}

class Optimizers : public ::testing::Test {
 protected:
  void SetUp() override {
    at::manual_seed(7);
    start_ = at::randn({kCount});
    grads_ = gradients();
  }
  at::Tensor start_;
  std::vector<at::Tensor> grads_;
};

TEST_F(Optimizers, AdamWIsTorchs) {
  GroupOptions group;
  group.weight_decay = 0.1;
  const auto options = torch::optim::AdamWOptions(group.lr).weight_decay(0.1);
  const auto expected = run_torch<torch::optim::AdamW>(options, start_, grads_);
  expect_close(run(Rule::Adam, group, start_, grads_), expected);
  expect_close(run(Rule::Adam, group, start_, grads_, 0.125), expected);  // unscaled in the pass
}

TEST_F(Optimizers, AdamIsTorchs) {
  GroupOptions group;
  group.decoupled = false;
  group.weight_decay = 0.1;
  group.beta1 = 0.8;
  group.beta2 = 0.95;
  const auto options = torch::optim::AdamOptions(group.lr).weight_decay(0.1).betas({0.8, 0.95});
  expect_close(run(Rule::Adam, group, start_, grads_), run_torch<torch::optim::Adam>(options, start_, grads_));
}

TEST_F(Optimizers, AdamWIsTheFusedOperator) {
  GroupOptions group;
  group.weight_decay = 0.01;
  auto weight = start_.clone(), m = at::zeros_like(start_), v = at::zeros_like(start_);
  auto step = at::zeros({});
  for (const auto& grad : grads_) {
    step += 1;
    at::_fused_adamw_({weight}, {grad}, {m}, {v}, {}, {step}, group.lr, group.beta1, group.beta2, group.weight_decay,
                      group.eps, false, false);
  }
  expect_close(run(Rule::Adam, group, start_, grads_), weight);
}

TEST_F(Optimizers, NoBiasCorrection) {
  GroupOptions group;
  group.bias_correction = false;
  auto w = start_.clone(), m = at::zeros_like(w), v = at::zeros_like(w);
  for (const auto& g : grads_) {
    m.lerp_(g, 0.1);
    v.mul_(0.999).addcmul_(g, g, 1 - 0.999);
    w.addcdiv_(m, v.sqrt().add_(1e-8), -1e-3);
  }
  expect_close(run(Rule::Adam, group, start_, grads_), w);
}

TEST_F(Optimizers, SgdIsTorchs) {
  for (double momentum : {0.0, 0.9}) {
    for (bool nesterov : {false, true}) {
      if (nesterov && momentum == 0) continue;
      GroupOptions group;
      group.lr = 0.1;
      group.momentum = momentum;
      group.dampening = nesterov ? 0 : 0.2;
      group.weight_decay = 0.01;
      group.nesterov = nesterov;
      const auto options = torch::optim::SGDOptions(0.1)
                               .momentum(momentum)
                               .dampening(group.dampening)
                               .weight_decay(0.01)
                               .nesterov(nesterov);
      expect_close(run(Rule::Sgd, group, start_, grads_), run_torch<torch::optim::SGD>(options, start_, grads_));
    }
  }
}

TEST_F(Optimizers, AdagradIsTorchs) {
  GroupOptions group = options_of_type("adagrad").defaults;
  group.weight_decay = 0.01;
  group.lr_decay = 0.05;
  const auto options = torch::optim::AdagradOptions(group.lr).weight_decay(0.01).lr_decay(0.05).eps(group.eps);
  expect_close(run(Rule::Adagrad, group, start_, grads_), run_torch<torch::optim::Adagrad>(options, start_, grads_));
}

TEST_F(Optimizers, LionIsThePapers) {
  GroupOptions group = options_of_type("Lion").defaults;
  group.weight_decay = 0.1;
  auto w = start_.clone(), m = at::zeros_like(w);
  for (const auto& g : grads_) {
    w.mul_(1 - group.lr * 0.1).add_(m.mul(0.9).add_(g, 1 - 0.9).sign(), -group.lr);
    m.mul_(0.99).add_(g, 1 - 0.99);
  }
  expect_close(run(Rule::Lion, group, start_, grads_), w);
}

TEST_F(Optimizers, MaximizeNegatesTheGradient) {
  std::vector<at::Tensor> negated;
  for (const auto& grad : grads_)
    negated.push_back(-grad);
  for (Rule rule : {Rule::Adam, Rule::Sgd, Rule::Lion, Rule::Adagrad}) {
    GroupOptions group;
    group.momentum = 0.9;
    GroupOptions maximize = group;
    maximize.maximize = true;
    EXPECT_TRUE(at::equal(run(rule, maximize, start_, grads_), run(rule, group, start_, negated)));
  }
}

TEST_F(Optimizers, ComputeWeightsAreTheRoundedMaster) {
  for (auto dtype : {at::kBFloat16, at::kHalf}) {
    auto slice = slice_of(start_, 2);
    slice.weight = at::zeros({kCount}, dtype);
    slice.grad = grads_[0].to(dtype);
    update(Rule::Adam, {}, 1, slice, 1);
    EXPECT_TRUE(at::equal(slice.weight, slice.master.to(dtype)));
    EXPECT_FALSE(at::equal(slice.master, start_));
  }
}

// ---- low-precision model states

struct RuleCase {
  Rule rule;
  GroupOptions group;
};
std::vector<RuleCase> rule_cases() {
  GroupOptions adam, l2, momentum, lion = options_of_type("lion").defaults,
                                   adagrad = options_of_type("adagrad").defaults;
  adam.weight_decay = l2.weight_decay = momentum.weight_decay = lion.weight_decay = 0.1;
  l2.decoupled = false;
  momentum.momentum = 0.9;
  return {{Rule::Adam, adam},    {Rule::Adam, l2},   {Rule::Sgd, {}},
          {Rule::Sgd, momentum}, {Rule::Lion, lion}, {Rule::Adagrad, adagrad}};
}

UpdateSlice low_slice(const at::Tensor& start, at::ScalarType state, kernels::Rounding rounding) {
  UpdateSlice slice;
  for (at::Tensor& s : slice.state)
    s = at::zeros({start.numel()}, state);
  slice.rounding = rounding;
  return slice;
}

UpdateSlice split_slice(const at::Tensor& start, at::ScalarType state, kernels::Rounding rounding) {
  UpdateSlice slice = low_slice(start, state, rounding);
  slice.weight = at::empty({start.numel()}, at::kBFloat16);
  slice.residual = at::empty({start.numel()}, at::kShort);
  shard::split_master(slice.weight, slice.residual, start);
  return slice;
}

// fp32 states: the exact mode. bf16 states: the same split beside an fp32 master with the same states.
TEST_F(Optimizers, SplitMasterIsTheFp32MasterBitForBit) {
  for (const RuleCase& c : rule_cases()) {
    for (const auto state : {at::kFloat, at::kBFloat16}) {
      UpdateSlice split = split_slice(start_, state, kernels::Rounding::Stochastic);
      UpdateSlice whole = low_slice(start_, state, kernels::Rounding::Stochastic);
      whole.master = start_.clone();
      whole.weight = start_.to(at::kBFloat16);
      at::Tensor joined = at::empty_like(start_);
      for (int step = 1; step <= 100; ++step) {
        split.grad = whole.grad = (at::randn({kCount}) * 0.1).to(at::kBFloat16);
        split.random = whole.random = {5, static_cast<uint64_t>(step), 1000};
        update(c.rule, c.group, step, split, 0.5);
        update(c.rule, c.group, step, whole, 0.5);
        shard::join_master(joined, split.weight, split.residual);
        ASSERT_TRUE(at::equal(joined, whole.master)) << "rule " << static_cast<int>(c.rule) << ", step " << step;
        ASSERT_TRUE(at::equal(split.state[0], whole.state[0]));
        const auto tie = joined.view(at::kInt).bitwise_and(0xffff) == 0x8000;
        ASSERT_TRUE((split.weight == whole.weight).logical_or(tie).all().item<bool>());
      }
      EXPECT_FALSE(at::equal(joined, start_));
    }
  }
}

// A 16-bit weight as its own master: nearest loses updates below half a unit, stochastic keeps them in the mean.
TEST_F(Optimizers, StochasticWeightsMoveWhereNearestOnesStand) {
  GroupOptions group;
  group.lr = 1e-5;
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const auto run_alone = [&](kernels::Rounding rounding) {
      const auto state = dtype == at::kHalf ? at::kFloat : at::kBFloat16;
      UpdateSlice slice = low_slice(start_, state, rounding);
      slice.weight = at::ones({kCount}, dtype);
      slice.grad = at::ones({kCount});
      for (int step = 1; step <= 50; ++step) {
        slice.random = {1, static_cast<uint64_t>(step), 0};
        update(Rule::Adam, group, step, slice, 1);
      }
      return slice.weight.to(at::kDouble).mean().item<double>();
    };
    EXPECT_EQ(run_alone(kernels::Rounding::Nearest), 1.0);
    EXPECT_NEAR(run_alone(kernels::Rounding::Stochastic), 1 - 50 * group.lr, 1e-4);
  }
}

// A second moment of bf16 that cannot fall by nearest rounding follows the gradients stochastically.
TEST_F(Optimizers, StochasticStatesDecay) {
  GroupOptions group;
  const auto mean_square = [&](kernels::Rounding rounding) {
    UpdateSlice slice = low_slice(start_, at::kBFloat16, rounding);
    slice.master = start_.clone();
    slice.state[1].fill_(1.0);
    slice.grad = at::zeros({kCount});
    for (int step = 1; step <= 500; ++step) {
      slice.random = {1, static_cast<uint64_t>(step), 0};
      update(Rule::Adam, group, step, slice, 1);
    }
    return slice.state[1].to(at::kDouble).mean().item<double>();
  };
  EXPECT_EQ(mean_square(kernels::Rounding::Nearest), 1.0);
  EXPECT_NEAR(mean_square(kernels::Rounding::Stochastic), std::pow(0.999, 500), 0.01);
}

TEST(OptimizerThreads, StochasticBitsDoNotDependOnThreadsOrSlices) {
  at::manual_seed(4);
  constexpr int64_t n = 200007;
  const auto start = at::randn({n}), grad = at::randn({n});
  const int before = at::get_num_threads();
  const auto step = [&](int threads, const std::vector<int64_t>& cuts) {
    at::set_num_threads(threads);
    UpdateSlice all = low_slice(start, at::kBFloat16, kernels::Rounding::Stochastic);
    all.weight = start.to(at::kBFloat16);
    all.grad = grad;
    int64_t begin = 0;
    for (const int64_t end : cuts) {
      UpdateSlice slice = all;
      for (at::Tensor* tensor : {&slice.weight, &slice.grad, &slice.state[0], &slice.state[1]})
        *tensor = tensor->narrow(0, begin, end - begin);
      slice.random = {3, 1, 50 + static_cast<uint64_t>(begin)};
      update(Rule::Adam, {}, 1, slice, 0.5);
      begin = end;
    }
    return all;
  };
  const auto expected = step(1, {n});
  EXPECT_FALSE(at::equal(expected.weight, start.to(at::kBFloat16)));
  for (const auto& actual : {step(3, {n}), step(2, {1, 70001, n})}) {
    EXPECT_TRUE(at::equal(actual.weight, expected.weight));
    EXPECT_TRUE(at::equal(actual.state[0], expected.state[0]));
    EXPECT_TRUE(at::equal(actual.state[1], expected.state[1]));
  }
  at::set_num_threads(before);
}

TEST(OptimizerThreads, SameBitsForEveryCount) {
  at::manual_seed(3);
  constexpr int64_t n = 300007;
  const auto start = at::randn({n});
  const auto grad = at::randn({n}).to(at::kBFloat16);
  const auto step = [&](int threads) {
    at::set_num_threads(threads);
    auto slice = slice_of(start, 2);
    slice.weight = at::zeros({n}, at::kBFloat16);
    slice.grad = grad;
    update(Rule::Adam, {}, 1, slice, 0.5);
    return slice;
  };
  const int before = at::get_num_threads();
  const auto expected = step(1);
  for (int threads : {2, 3, 5}) {
    const auto actual = step(threads);
    EXPECT_TRUE(at::equal(actual.master, expected.master));
    EXPECT_TRUE(at::equal(actual.weight, expected.weight));
    EXPECT_TRUE(at::equal(actual.state[1], expected.state[1]));
  }
  at::set_num_threads(before);
}

TEST(OptimizerOptions, StateNames) {
  EXPECT_STREQ(state_names(Rule::Adam, {{}}).name[1], "exp_avg_sq");
  EXPECT_EQ(state_names(Rule::Lion, {{}}).count, 1);
  EXPECT_STREQ(state_names(Rule::Adagrad, {{}}).name[0], "sum");
  EXPECT_EQ(state_names(Rule::External, {{}}).count, 0);
  EXPECT_STREQ(state_names(Rule::Muon, {{}}).name[0], "momentum_buffer");
  EXPECT_STREQ(state_names(Rule::Muon, {{.use_muon = false}}).name[0], "exp_avg");
  GroupOptions momentum;
  momentum.momentum = 0.9;
  EXPECT_EQ(state_names(Rule::Sgd, {{}, {}}).count, 0);
  EXPECT_STREQ(state_names(Rule::Sgd, {{}, momentum}).name[0], "momentum_buffer");
}

TEST(OptimizerErrors, SayWhatIsWrong) {
  const auto expect_error = [](const char* text, const std::function<void(UpdateSlice&)>& spoil, int64_t step = 1) {
    UpdateSlice slice = slice_of(at::ones({8}), 2);
    slice.grad = at::ones({8});
    spoil(slice);
    try {
      update(Rule::Adam, {}, step, slice, 1);
      ADD_FAILURE() << "no error: " << text;
    } catch (const c10::ValueError& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  expect_error("grad is missing", [](UpdateSlice& s) { s.grad = at::Tensor(); });
  expect_error("master is missing", [](UpdateSlice& s) { s.master = at::Tensor(); });
  expect_error("state is missing", [](UpdateSlice& s) { s.state[1] = at::Tensor(); });
  expect_error("grad has 7 elements", [](UpdateSlice& s) { s.grad = at::ones({7}); });
  expect_error("contiguous 1-D", [](UpdateSlice& s) { s.grad = at::ones({16}).slice(0, 0, 16, 2); });
  expect_error("contiguous 1-D", [](UpdateSlice& s) { s.master = at::ones({2, 4}); });
  expect_error("master must be Float", [](UpdateSlice& s) { s.master = s.master.to(at::kHalf); });
  expect_error("state must be float32 or bfloat16", [](UpdateSlice& s) { s.state[0] = s.state[0].to(at::kHalf); });
  expect_error("weight must be bfloat16", [](UpdateSlice& s) { s.weight = at::ones({8}); });
  expect_error("states must have one dtype", [](UpdateSlice& s) { s.state[1] = s.state[1].to(at::kBFloat16); });
  expect_error("beside float16 weights states must be float32", [](UpdateSlice& s) {
    s.weight = s.master.to(at::kHalf);
    for (at::Tensor& state : s.state)
      state = state.to(at::kBFloat16);
  });
  const auto split = [](UpdateSlice& s) {
    s.weight = s.master.to(at::kBFloat16);
    s.residual = s.master.to(at::kShort);
    s.master = at::Tensor();
  };
  expect_error("a residual goes without a master", [](UpdateSlice& s) {
    s.weight = s.master.to(at::kBFloat16);
    s.residual = s.master.to(at::kShort);
  });
  expect_error("beside a residual must be BFloat16", [&](UpdateSlice& s) {
    split(s);
    s.weight = s.weight.to(at::kHalf);
  });
  expect_error("residual must be Short", [&](UpdateSlice& s) {
    split(s);
    s.residual = s.residual.to(at::kInt);
  });
  expect_error("residual has 7 elements", [&](UpdateSlice& s) {
    split(s);
    s.residual = s.residual.narrow(0, 0, 7);
  });
  expect_error("steps count from 1", [](UpdateSlice&) {}, 0);
}

TEST(OptimizerErrors, TypesWithoutKernels) {
  UpdateSlice slice = slice_of(at::ones({8}), 2);
  slice.grad = at::ones({8}, at::kDouble);
  EXPECT_THROW(update(Rule::Adam, {}, 1, slice, 1), c10::NotImplementedError);
}

TEST(OptimizerErrors, ExternalHasNoKernel) {
  UpdateSlice slice = slice_of(at::ones({8}), 0);
  slice.grad = at::ones({8});
  EXPECT_THROW(update(Rule::External, {}, 1, slice, 1), c10::Error);
}

TEST(OptimizerErrors, EmptySlicesAreFine) {
  UpdateSlice slice = slice_of(at::ones({0}), 2);
  slice.grad = at::ones({0});
  EXPECT_NO_THROW(update(Rule::Adam, {}, 1, slice, 1));
}

}  // namespace
}  // namespace tessera::optim
