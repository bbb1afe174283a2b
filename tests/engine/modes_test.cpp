// Precision modes through an engine: what they hold, and that results do not depend on stage or world.
#include <gtest/gtest.h>

#include <cmath>

#include "tessera/engine/engine.h"
#include "tests/support/errors.h"
#include "tests/support/modes.h"
#include "tests/support/ranks.h"
#include "tests/support/training.h"

namespace tessera::testing {

using amp::Master;
using amp::PrecisionPolicy;
using engine::Engine;
using engine::Quantity;
using kernels::Rounding;

namespace {

const PrecisionPolicy kExact = mode(at::kBFloat16, Master::Split, at::kFloat);
const PrecisionPolicy kBalanced = mode(at::kBFloat16, Master::Split, at::kBFloat16);
const PrecisionPolicy kSmallest = mode(at::kBFloat16, Master::Weight, at::kBFloat16);

// Every rank has the same data, so the mean over ranks is each rank's gradient, whatever the world.
std::vector<at::Tensor> train(const PrecisionPolicy& policy, int stage, int world) {
  const auto batch = [](int, int number) { return toy_batch(0, number); };
  return train_toy({.stage = stage, .clip = 0, .precision = policy}, world, {.steps = 5, .batch = batch}).states;
}

// A model of one large parameter, for masters and steps that are told one by one.
struct Large {
  explicit Large(double value, int64_t n = 40'000) : weight(at::full({n}, value).requires_grad_(true)) {}
  at::Tensor weight;
};

Engine sgd_engine(const Large& model, const PrecisionPolicy& policy, double lr, int accumulation = 1) {
  engine::Options options;
  options.zero.precision = policy;
  options.rule = optim::Rule::Sgd;
  options.gradient_accumulation_steps = accumulation;
  options.gradient_clipping = 0;
  optim::GroupOptions group;
  group.lr = lr;
  return Engine(options, comm::Mesh(), {{"w", model.weight, 0, ""}}, {group});
}

}  // namespace

TEST(Modes, ResultsAreTheSameInEveryStageAndWorld) {
  for (const PrecisionPolicy& policy : {kExact, kBalanced, kSmallest}) {
    const auto expected = train(policy, 0, 1);
    for (const int world : {1, 2, 4}) {
      for (int stage = 0; stage <= 3; ++stage)
        expect_same(train(policy, stage, world), expected,
                    c10::str(policy.bytes_per_parameter(), " bytes, stage ", stage, ", world ", world));
    }
  }
}

TEST(Modes, AReplayIsBitEqualAndAnotherSeedIsNot) {
  const auto run = [](uint64_t seed) {
    const Toy toy;
    engine::Options options = toy_options({.precision = kSmallest});
    options.zero.seed = seed;
    Engine engine(options, comm::Mesh(), toy.specs(), {toy_adamw()});
    for (int step = 0; step < 3; ++step) {
      toy_forward(engine, toy, toy_batch(0, step)).backward();
      engine.step();
    }
    return engine.states().get_full(3, Quantity::Master);
  };
  EXPECT_TRUE(run(1).equal(run(1)));
  EXPECT_FALSE(run(1).equal(run(2)));
}

TEST(Modes, HoldTheBytesOfTheTable) {
  for (const PrecisionPolicy& policy : all_modes()) {
    for (const int world : {1, 2, 4}) {
      for (int stage = 0; stage <= 3; ++stage) {
        run_ranks(world, [&](int, const comm::GroupPtr& group) {
          at::Tensor big = at::zeros({300, 1000}).requires_grad_(true);
          ToyRun run{.stage = stage, .precision = policy};
          Engine engine(toy_options(run), comm::Mesh(group), {{"big", big, 0, ""}}, {toy_adamw()});
          const auto share = [&](int first_stage) { return stage >= first_stage ? 1.0 / world : 1.0; };
          const double param = static_cast<double>(at::elementSize(policy.param)), n = 300 * 1000;
          const double states = static_cast<double>(policy.bytes_per_parameter()) - 2 * param;
          const int module = engine.modules().add({0});
          if (module >= 0) engine.modules().enter(module);
          const at::Tensor loss = big.sum();
          if (module >= 0) engine.modules().leave(module, {loss});
          loss.backward();
          const auto m = engine.memory();
          const double expected = n * (param * share(3) + param * share(1) + states * share(1));
          EXPECT_NEAR(static_cast<double>(m.params + m.grads + m.master + m.states), expected, 0.01 * expected)
              << policy.bytes_per_parameter() << " bytes, stage " << stage << ", world " << world;
        });
      }
    }
  }
}

// 1 - 2^-12 is a sixteenth of the way from 1 to the next smaller bf16 number.
TEST(Modes, UpdatesBelowTheLastPlaceAreKeptInTheMean) {
  const double step = std::ldexp(1.0, -12);
  const auto mean_after = [&](const PrecisionPolicy& policy) {
    const Large model(1.0);
    Engine engine = sgd_engine(model, policy, step);
    model.weight.sum().backward();
    engine.step();
    return engine.states().get_full(0, Quantity::Master).to(at::kDouble).mean().item<double>();
  };
  EXPECT_EQ(mean_after(kExact), 1 - step);
  EXPECT_EQ(mean_after(mode(at::kBFloat16, Master::Weight, at::kBFloat16, Rounding::Nearest)), 1);
  const double deviation = std::ldexp(1.0, -8) * std::sqrt(15.0 / 256 / 40'000);  // of the mean of so many draws
  EXPECT_NEAR(mean_after(kSmallest), 1 - step, 5 * deviation);
}

// A micro-batch of gradient 1 and 255 of 1/256 each: nearest rounding drops all but the first.
TEST(Modes, GradientsOfManyMicroBatchesAddUp) {
  constexpr int kMicro = 256;
  const auto sum_of = [&](PrecisionPolicy policy) {
    const Large model(0.0);
    Engine engine = sgd_engine(model, policy, 0, kMicro);
    for (int micro = 0; micro < kMicro; ++micro) {
      (model.weight.sum() * (micro == 0 ? kMicro : 1)).backward();
      if (micro + 1 < kMicro) engine.step();
    }
    return engine.states().get_full(0, Quantity::Gradient).to(at::kDouble).mean().item<double>();
  };
  PrecisionPolicy stochastic = kExact, wide = kExact;
  stochastic.grad_rounding = Rounding::Stochastic;
  wide.grad = at::kFloat;
  EXPECT_EQ(sum_of(kExact), 1) << "as torch does";
  EXPECT_EQ(sum_of(wide), 2 - 1.0 / kMicro);
  EXPECT_NEAR(sum_of(stochastic), 2 - 1.0 / kMicro, 0.01);
}

TEST(Modes, StatesSpeakFp32AndTakeEveryBit) {
  over_stages({1, 2}, {.precision = kBalanced}, [](const ToyRank& on) {
    toy_forward(on.engine, on.toy, toy_batch(on.rank, 0)).backward();
    on.engine.step();
    EXPECT_EQ(on.engine.states().local_view(3, Quantity::State0).scalar_type(), at::kBFloat16);
    EXPECT_EQ(on.engine.states().get_full(3, Quantity::State0).scalar_type(), at::kFloat);
    EXPECT_EQ(on.engine.states().local_view(3, Quantity::Master).scalar_type(), at::kFloat);
    auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
    const at::Tensor value = at::randn({17, 5}, generator, at::kFloat);
    on.engine.states().set_full(3, Quantity::Master, value);
    on.engine.refresh_params();
    EXPECT_TRUE(on.engine.states().get_full(3, Quantity::Master).equal(value));
    on.engine.regions().open({3});
    EXPECT_TRUE(on.toy.tensors[3].detach().equal(bf16_half_up(value)));
    on.engine.regions().close({3});
    const auto mine = on.engine.states().local_view(3, Quantity::Master);
    on.engine.states().set_local(3, Quantity::Master, mine * 3);
    on.engine.refresh_params();
    EXPECT_TRUE(on.engine.states().get_full(3, Quantity::Master).equal(value * 3));
  });
}

TEST(Modes, RegionsKeepTheBitsOfWhatWasNotWritten) {
  over_stages({2}, {.precision = kExact}, [](const ToyRank& on) {
    toy_forward(on.engine, on.toy, toy_batch(on.rank, 0)).backward();
    on.engine.step();
    const at::Tensor kept = on.engine.states().get_full(3, Quantity::Master);
    EXPECT_FALSE(kept.equal(kept.to(at::kBFloat16).to(at::kFloat))) << "masters hold more than bf16";
    for (const auto writes : {zero::Writes::Own, zero::Writes::FromRank}) {
      on.engine.regions().open({3, 4});
      const at::Tensor weight = on.toy.tensors[4].detach();
      if (writes == zero::Writes::Own || on.rank == 1) weight.fill_(writes == zero::Writes::Own ? 2.0 : 3.0);
      on.engine.regions().close({3, 4}, writes, 1);
      EXPECT_TRUE(on.engine.states().get_full(3, Quantity::Master).equal(kept)) << "stage " << on.stage;
      EXPECT_TRUE(on.engine.states()
                      .get_full(4, Quantity::Master)
                      .equal(at::full({5, 3}, writes == zero::Writes::Own ? 2.0 : 3.0)))
          << "stage " << on.stage;
    }
  });
}

TEST(Modes, APolicyThatIsNoneIsRefusedBeforeAnythingIsMade) {
  const Toy toy;
  const auto* const kept = toy.tensors[0].data_ptr();
  for (const PrecisionPolicy& policy :
       {mode(at::kHalf, Master::Split, at::kFloat), mode(at::kHalf, Master::Weight, at::kBFloat16),
        mode(at::kFloat, Master::Fp32, at::kFloat), mode(at::kBFloat16, Master::Split, at::kHalf)}) {
    const auto make = [&] { Engine(toy_options({.precision = policy}), comm::Mesh(), toy.specs(), {toy_adamw()}); };
    EXPECT_HAS(error_of(make), "[amp.precision]");
    EXPECT_EQ(toy.tensors[0].data_ptr(), kept);
  }
}

TEST(Modes, AClientsOptimizerHasMastersThatAreTensors) {
  const Toy toy;
  engine::Options options = toy_options({.precision = kExact});
  options.rule = optim::Rule::External;
  Engine engine(options, comm::Mesh(), toy.specs(), {toy_adamw()});
  EXPECT_EQ(engine.options().zero.precision.master, Master::Fp32);
  toy_forward(engine, toy, toy_batch(0, 0)).backward();
  engine.step([&] {
    for (int i = 0; i < 5; ++i)
      engine.states().local_view(i, Quantity::Master).sub_(engine.states().local_view(i, Quantity::Gradient));
  });
  EXPECT_TRUE(toy.tensors[3].detach().equal(engine.states().get_full(3, Quantity::Master).to(at::kBFloat16)));
}

}  // namespace tessera::testing
