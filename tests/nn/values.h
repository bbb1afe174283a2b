// Values of a model by name, for tests that compare engines with each other and with a plain loop.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "tessera/nn/engine.h"
#include "tests/support/ranks.h"

namespace tessera::testing {

using Values = std::vector<std::pair<std::string, at::Tensor>>;

// In fp32, whole. Collective.
template <class M>
Values values_of(nn::Engine<M>& engine) {
  Values values;
  for (const auto& item : engine.module_state_dict())
    values.emplace_back(item.key(), item.value().to(at::kFloat, false, /*copy=*/true));
  return values;
}

inline Values values_of(const torch::nn::Module& module) {
  Values values;
  for (const auto& item : module.named_parameters())
    values.emplace_back(item.key(), item.value().detach().clone());
  return values;
}

inline void expect_close(const Values& found, const Values& want, double bound = 1e-6) {
  ASSERT_EQ(found.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i)
    EXPECT_LE((found[i].second - want[i].second).abs().max().item<double>(), bound) << want[i].first;
}

// f(stage, group) in every stage, on one rank and on two.
template <class F>
void everywhere(const std::string& name, const F& f) {
  for (int stage = 0; stage <= 3; ++stage)
    for (const int ranks : {1, 2})
      run_ranks(ranks, [&](int, const comm::GroupPtr& group) {
        SCOPED_TRACE(c10::str(name, ", stage ", stage, ", ", ranks, " ranks"));
        f(stage, group);
      });
}

}  // namespace tessera::testing
