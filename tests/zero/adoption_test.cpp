#include "tessera/zero/adoption.h"

#include <gtest/gtest.h>

#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace tessera::testing {

using engine::Engine;
using engine::Quantity;

TEST(Adoption, AUsersEditOfAComputeParameterReachesTheMaster) {
  over_stages({2}, {.bf16 = true, .last_stage = 2}, [](const ToyRank& on) {
    const auto& [engine, toy, rank, stage, group] = on;
    {
      const at::NoGradGuard no_grad;
      at::Tensor edited = toy.tensors[4];
      edited.fill_(2.0);  // in place
      at::Tensor replaced = toy.tensors[1];
      replaced.set_data(at::full({3}, -1.0, at::kBFloat16));  // p.data = t
    }
    engine.groups()[0].lr = 0;
    toy_forward(engine, toy, toy_batch(rank, 0)).backward();
    engine.step();
    EXPECT_TRUE(engine.states().get_full(4, Quantity::Master).equal(at::full({5, 3}, 2.0)));
    EXPECT_TRUE(engine.states().get_full(1, Quantity::Master).equal(at::full({3}, -1.0)));
    EXPECT_TRUE(toy.tensors[1].detach().equal(at::full({3}, -1.0, at::kBFloat16)));
  });
}

TEST(Adoption, AChangedDtypeIsAnErrorThatNamesTheParameter) {
  const Toy toy;
  Engine engine = toy_engine({}, toy, comm::single_group());
  toy_forward(engine, toy, toy_batch(0, 0)).backward();
  at::Tensor changed = toy.tensors[1];
  changed.mutable_grad().reset();
  changed.set_data(changed.detach().to(at::kBFloat16));
  try {
    engine.step();
    FAIL();
  } catch (const c10::Error& e) {
    EXPECT_NE(std::string(e.what()).find("'b'"), std::string::npos) << e.what();
  }
}

}  // namespace tessera::testing
