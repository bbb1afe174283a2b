// Passes and steps of a Session whose module is any.
#pragma once

#include <gtest/gtest.h>

#include "tessera/nn/session.h"

namespace tessera::testing {

inline void pass(nn::Session& s) {
  s.core().pre_forward();
  at::Tensor loss = at::zeros({});
  for (const auto& spec : s.core().params())
    loss = loss + spec.tensor.sum();
  s.core().post_forward({loss});
  loss.backward();
}

inline void train_step(nn::Session& s) {
  pass(s);
  EXPECT_TRUE(s.step());
}

}  // namespace tessera::testing
