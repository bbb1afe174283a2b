#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <map>
#include <mutex>

#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace tessera::testing {

using engine::Quantity;

constexpr ToyRun kBf16{.bf16 = true};

TEST(StateAccess, WhatIsSetIsRead) {
  over_stages({1, 3}, kBf16, [](const ToyRank& on) {
    const auto& [engine, toy, rank, stage, group] = on;
    for (const auto what : {Quantity::Master, Quantity::State0, Quantity::State1, Quantity::Gradient}) {
      for (int i = 0; i < 5; ++i) {
        const at::Tensor value = at::arange(toy.tensors[i].numel(), at::kFloat).view(toy.tensors[i].sizes()) + i;
        engine.states().set_full(i, what, value);
        EXPECT_TRUE(engine.states().get_full(i, what).equal(value));
      }
    }
    EXPECT_THROW(engine.states().set_full(0, Quantity::Master, at::zeros({2})), c10::ValueError);
    for (const int number : {-1, 17, 1'000'000}) {
      EXPECT_THROW(engine.states().get_full(number, Quantity::Master), c10::ValueError);
      EXPECT_THROW(engine.states().set_full(number, Quantity::Master, at::zeros({2})), c10::ValueError);
      EXPECT_THROW(engine.states().local_view(number, Quantity::Master), c10::ValueError);
      EXPECT_THROW(engine.states().set_local(number, Quantity::Master, at::zeros({2})), c10::ValueError);
    }
  });
}

// What number 0 of every shard's replicas has, put together by its description alone.
struct Whole {
  at::Tensor values, times;
};
using Wholes = std::map<std::pair<std::string, Quantity>, Whole>;

void put_together(Wholes& wholes, engine::Engine& engine) {
  for (const shard::NamedShard& shard : engine.states().named_shards()) {
    const at::Tensor values = engine.states().read_shard(shard);
    EXPECT_EQ(values.sizes(), at::IntArrayRef{shard.range.size()}) << shard.name;
    EXPECT_EQ(values.scalar_type(), shard.dtype) << shard.name;
    if (shard.replica != 0) continue;
    Whole& whole = wholes[{shard.name, shard.quantity}];
    const auto place = [&](at::Tensor& target) {
      const int64_t numel = c10::multiply_integers(shard.form.sizes);
      if (!target.defined()) target = shard::view_as_param(at::zeros({numel}), {0, numel}, shard.form);
      return shard::flatten_like_param(target, shard.form).narrow(0, shard.range.begin, shard.range.size());
    };
    place(whole.values).add_(values.detach());
    place(whole.times).add_(1);
  }
}

TEST(StateAccess, NamedShardsAreTheModelOnce) {
  constexpr std::array kQuantities{Quantity::Weight, Quantity::Master, Quantity::Gradient, Quantity::State0,
                                   Quantity::State1};
  for (int stage = 0; stage <= 3; ++stage) {
    for (const bool bf16 : {false, true}) {
      for (const auto& [replicas, shards] : {std::pair(1, 1), std::pair(1, 3), std::pair(2, 2)}) {
        Wholes wholes;
        std::mutex mutex;
        const auto body = [&](int rank, const comm::Mesh& mesh) {
          Toy toy;
          toy.tensors[2].requires_grad_(false);
          toy.tensors[3].set_data(toy.tensors[3].detach().t().contiguous().t());  // column by column
          auto specs = toy.specs();
          specs[2].group = -1;
          engine::Engine engine(toy_options({.stage = stage, .bf16 = bf16}), mesh, specs, {toy_adamw()});
          for (int step = 0; step < 2; ++step) {
            if (step > 0) engine.step();
            toy_forward(engine, toy, toy_batch(rank, step)).backward();
          }
          engine.grad_norm();  // gradients are reduced over replicas, too
          {
            const std::lock_guard lock(mutex);
            put_together(wholes, engine);
          }
          engine.states().agree_max(0);  // all ranks have put in theirs
          for (const int i : {0, 1, 3, 4}) {
            for (const Quantity what : kQuantities) {
              const bool is_master = what == Quantity::Master || what == Quantity::Weight;
              const at::Tensor full = engine.states().get_full(i, is_master ? Quantity::Master : what);
              const std::lock_guard lock(mutex);
              const auto whole = wholes.find({specs[i].name, what});
              EXPECT_EQ(whole != wholes.end(), what != Quantity::Master || bf16) << "the fp32 weight is the master";
              if (whole == wholes.end()) continue;
              EXPECT_TRUE(whole->second.times.eq(1).all().item<bool>());
              const bool rounded = what == Quantity::Weight && bf16;
              EXPECT_TRUE(whole->second.values.equal(rounded ? bf16_half_up(full).to(at::kFloat) : full))
                  << specs[i].name << " quantity " << static_cast<int>(what) << " stage " << stage;
            }
          }
        };
        run_meshes(replicas, shards, body);
        EXPECT_TRUE((wholes[{"c", Quantity::Weight}].times.eq(1).all().item<bool>()));
        EXPECT_EQ(wholes.count({"c", Quantity::State0}), 0U) << "frozen";
      }
    }
  }
}

TEST(StateAccess, MastersReachTheModuleWhenRefreshed) {
  over_stages({1, 3}, kBf16, [](const ToyRank& on) {
    const auto& [engine, toy, rank, stage, group] = on;
    engine.states().set_full(3, Quantity::Master, at::full({17, 5}, 0.75));
    const auto reached = [&engine = engine, &toy = toy] {
      engine.regions().open({3});
      const bool equal = toy.tensors[3].detach().equal(at::full({17, 5}, 0.75, at::kBFloat16));
      engine.regions().close({3});
      return equal;
    };
    engine.refresh_params();
    EXPECT_TRUE(reached());
  });
}

TEST(StateAccess, EditedParametersAreReadBackAndOthersKeepTheirMasters) {
  over_stages({1, 3}, {.bf16 = true, .last_stage = 2}, [](const ToyRank& on) {
    const auto& [engine, toy, rank, stage, group] = on;
    toy_forward(engine, toy, toy_batch(rank, 0)).backward();
    engine.step();
    const at::Tensor untouched = engine.states().get_full(3, Quantity::Master);
    {
      const at::NoGradGuard no_grad;
      at::Tensor(toy.tensors[4]).fill_(2.0);
    }
    EXPECT_TRUE(engine.states().get_full(4, Quantity::Master).equal(at::full({5, 3}, 2.0)));
    toy.tensors[2].variable_data().fill_(3.0);  // as p.data.fill_(): torch counts no version
    engine.adopt_params();
    // Such an edit leaves the residual of a split master: less than half a unit in the last place.
    EXPECT_LE((engine.states().get_full(2, Quantity::Master) - 3.0).abs().max().item<float>(), std::ldexp(1.0F, -7));
    EXPECT_TRUE(engine.states().get_full(3, Quantity::Master).equal(untouched));
  });
}

TEST(StateAccess, LocalViewsAreTheRanksPartOfTheFullTensor) {
  over_stages({1, 3}, kBf16, [](const ToyRank& on) {
    const auto& [engine, toy, rank, stage, group] = on;
    toy_forward(engine, toy, toy_batch(rank, 0)).backward();
    engine.step();
    for (int i = 0; i < 5; ++i) {
      const auto [begin, end] = engine.states().local_range(i);
      const at::Tensor full = engine.states().get_full(i, Quantity::State0);
      const at::Tensor local = engine.states().local_view(i, Quantity::State0);
      EXPECT_EQ(local.numel(), end - begin);
      EXPECT_TRUE(local.flatten().equal(full.flatten().narrow(0, begin, end - begin)));
      if (stage == 0) {
        EXPECT_EQ(local.sizes(), toy.tensors[i].sizes());
      }
    }
  });
}

TEST(StateAccess, PartsThatTheClientKeepsAreGatheredAlike) {
  over_stages({1, 3}, kBf16, [](const ToyRank& on) {
    const auto& [engine, toy, rank, stage, group] = on;
    for (int i = 0; i < 5; ++i) {
      const at::Tensor full = engine.states().get_full(i, Quantity::Master);
      const at::Tensor part = engine.states().local_part(i, full);
      EXPECT_EQ(part.sizes(), engine.states().local_view(i, Quantity::Master).sizes());
      EXPECT_TRUE(part.equal(engine.states().local_view(i, Quantity::Master)));
      EXPECT_TRUE(engine.states().gather_full(i, part).equal(full));
      EXPECT_THROW(engine.states().gather_full(i, at::zeros({part.numel() + 1})), c10::ValueError);
      EXPECT_THROW(engine.states().local_part(i, at::zeros({2})), c10::ValueError);
    }
    EXPECT_EQ(engine.states().agree_max(-1.0 - rank), -1.0);
  });
}

TEST(StateAccess, GradientsSetBetweenBackwardAndStepAreHonoured) {
  over_stages({1, 3}, kBf16, [](const ToyRank& on) {
    const auto& [engine, toy, rank, stage, group] = on;
    toy_forward(engine, toy, toy_batch(rank, 0)).backward();
    for (int i = 0; i < 5; ++i)
      engine.states().set_full(i, Quantity::Gradient, at::zeros_like(toy.tensors[i], at::kFloat));
    engine.states().set_full(1, Quantity::Gradient, at::full({3}, 2.0));
    engine.step();
    EXPECT_NEAR(*engine.global_grad_norm(), std::sqrt(12.0), 1e-6);
  });
}

TEST(StateAccess, ThereIsNoGradientBeforeABackwardAndAfterAStep) {
  over_stages({1, 3}, kBf16, [](const ToyRank& on) {
    const auto& [engine, toy, rank, stage, group] = on;
    EXPECT_FALSE(engine.states().get_full(0, Quantity::Gradient).defined());
    toy_forward(engine, toy, toy_batch(rank, 0)).backward();
    EXPECT_TRUE(engine.states().get_full(0, Quantity::Gradient).defined());
    engine.step();
    EXPECT_FALSE(engine.states().get_full(0, Quantity::Gradient).defined());
  });
}

}  // namespace tessera::testing
