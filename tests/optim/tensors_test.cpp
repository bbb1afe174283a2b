// Tensors as programs have them, against update() over flat ones, bit for bit.
#include "tessera/optim/tensors.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/errors.h"

namespace tessera::optim {
namespace {

constexpr int kTimes = 3;
constexpr uint64_t kBitsSeed = 5;

GroupOptions group_for(Rule rule) {
  GroupOptions group;
  group.weight_decay = 0.1;
  group.momentum = rule == Rule::Sgd ? 0.9 : 0;
  return group;
}

TensorUpdate tensors_of(const at::Tensor& param, int states) {
  TensorUpdate tensors;
  tensors.param = param;
  tensors.grad = at::randn_like(param) * 0.1;
  for (int s = 0; s < states; ++s)
    tensors.state.at(s) = at::zeros_like(param, param.options().dtype(at::kFloat));
  return tensors;
}

// The same in flat copies, elements in the order of the parameter's memory.
UpdateSlice flat_slice_of(const TensorUpdate& tensors, int states, kernels::Rounding rounding) {
  const auto flat = [](const at::Tensor& t) { return t.contiguous().view(-1).clone(); };
  UpdateSlice slice;
  (tensors.param.scalar_type() == at::kFloat ? slice.master : slice.weight) = flat(tensors.param);
  slice.grad = flat(tensors.grad);
  for (int s = 0; s < states; ++s)
    slice.state.at(s) = flat(tensors.state.at(s));
  slice.rounding = rounding;
  return slice;
}

TEST(UpdateTensors, IsTheUpdateOfFlatOnes) {
  at::manual_seed(3);
  for (const Rule rule : {Rule::Adam, Rule::Sgd, Rule::Lion, Rule::Adagrad}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const auto rounding : {kernels::Rounding::Nearest, kernels::Rounding::Stochastic}) {
        const GroupOptions group = group_for(rule);
        const int states = state_names(rule, {group}).count;
        std::vector<TensorUpdate> all{tensors_of(at::randn({67, 501}, dtype), states),
                                      tensors_of(at::randn({}, dtype), states)};
        all[1].first = 67 * 501;
        std::vector<UpdateSlice> slices;
        for (const TensorUpdate& one : all)
          slices.push_back(flat_slice_of(one, states, rounding));
        for (int step = 1; step <= kTimes; ++step) {
          for (size_t k = 0; k < all.size(); ++k) {
            all[k].step = step;
            slices[k].random = {kBitsSeed, static_cast<uint64_t>(step), all[k].first};
            update(rule, group, step, slices[k], 1);
          }
          update_tensors(rule, group, all, rounding, kBitsSeed);
        }
        for (size_t k = 0; k < all.size(); ++k) {
          const auto& flat = dtype == at::kFloat ? slices[k].master : slices[k].weight;
          EXPECT_TRUE(at::equal(all[k].param.view(-1), flat)) << "rule " << int(rule) << ", " << dtype;
          for (int s = 0; s < states; ++s)
            EXPECT_TRUE(at::equal(all[k].state.at(s).view(-1), slices[k].state.at(s)));
        }
      }
    }
  }
}

// Each layout gives what the contiguous one gives, and nothing beside the elements is touched.
TEST(UpdateTensors, AnyLayout) {
  at::manual_seed(4);
  const auto start = at::randn({6, 10}), grad = at::randn({6, 10});
  const auto run = [&](const at::Tensor& param, const at::Tensor& gradient, bool other_states) {
    param.copy_(start);
    TensorUpdate one = tensors_of(param, 2);
    if (other_states) one.state[1] = at::zeros({10, 6}).t();
    one.grad = gradient.copy_(grad);
    for (one.step = 1; one.step <= kTimes; ++one.step)
      update_tensors(Rule::Adam, {}, {one}, kernels::Rounding::Nearest, 0);
    return at::cat({param, one.state[0], one.state[1]});
  };
  const auto expected = run(at::empty({6, 10}), at::empty({6, 10}), false);
  EXPECT_FALSE(at::equal(expected.slice(0, 0, 6), start));
  const auto whole = at::ones({6, 30});
  EXPECT_TRUE(at::equal(run(at::empty({10, 6}).t(), at::empty({10, 6}).t(), false), expected));
  EXPECT_TRUE(at::equal(run(at::empty({10, 6}).t(), at::empty({6, 10}), false), expected));
  EXPECT_TRUE(at::equal(run(at::empty({6, 10}), at::empty({10, 6}).t(), true), expected));
  EXPECT_TRUE(at::equal(run(whole.slice(1, 10, 20), at::empty({1, 10}).expand({6, 10}).clone(), false), expected));
  EXPECT_TRUE(whole.slice(1, 0, 10).eq(1).all().item<bool>() && whole.slice(1, 20, 30).eq(1).all().item<bool>());
}

TEST(UpdateTensors, TheVersionOfAParameterCounts) {
  auto one = tensors_of(at::randn({4}).requires_grad_(), 2);
  const auto before = one.param._version();
  update_tensors(Rule::Adam, {}, {one}, kernels::Rounding::Nearest, 0);
  EXPECT_GT(one.param._version(), before);
}

TEST(UpdateTensors, ChecksAllBeforeItChangesOne) {
  const auto good = tensors_of(at::randn({4}), 2);
  const auto before = good.param.clone();
  const auto refused = [&](const std::function<void(TensorUpdate&)>& spoil, const char* says) {
    auto bad = tensors_of(at::randn({2, 3}), 2);
    spoil(bad);
    EXPECT_HAS(testing::error_of([&] { update_tensors(Rule::Adam, {}, {good, bad}, kernels::Rounding::Nearest, 0); }),
               says);
    EXPECT_TRUE(at::equal(good.param, before));
  };
  refused([](TensorUpdate& t) { t.grad = at::Tensor(); }, "parameter 1 has no gradient");
  refused([](TensorUpdate& t) { t.grad = at::zeros({3, 2}); }, "the gradient of parameter 1 has the shape [3, 2]");
  refused([](TensorUpdate& t) { t.grad = t.grad.to_sparse(); }, "not strided");
  refused([](TensorUpdate& t) { t.grad = t.grad.to(at::kDouble); }, "not float32, bfloat16 or float16");
  refused([](TensorUpdate& t) { t.state[1] = at::Tensor(); }, "has no state");
  refused([](TensorUpdate& t) { t.state[1] = t.state[1].to(at::kBFloat16); }, "a state of parameter 1");
}

}  // namespace
}  // namespace tessera::optim
