// Several steps of every rule against torch's C++ optimizers and fused operators.
#include "tessera/optim/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/optim.h>

#include <functional>
#include <string>

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

TEST(OptimizerOptions, OfType) {
  EXPECT_TRUE(options_of_type("Adam").defaults.decoupled);
  EXPECT_FALSE(options_of_type("Adam", false).defaults.decoupled);
  EXPECT_TRUE(options_of_type("ADAMW", false).defaults.decoupled);
  EXPECT_EQ(options_of_type("sgd").rule, Rule::Sgd);
  EXPECT_EQ(options_of_type("lion").defaults.beta2, 0.99);
  EXPECT_EQ(options_of_type("Adagrad").defaults.eps, 1e-10);
  try {
    options_of_type("adamm");
    FAIL();
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what()).find("'adamm'; known are Adam"), std::string::npos);
  }
}

TEST(OptimizerOptions, StateNames) {
  EXPECT_STREQ(state_names(Rule::Adam, {{}}).name[1], "exp_avg_sq");
  EXPECT_EQ(state_names(Rule::Lion, {{}}).count, 1);
  EXPECT_STREQ(state_names(Rule::Adagrad, {{}}).name[0], "sum");
  EXPECT_EQ(state_names(Rule::External, {{}}).count, 0);
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
