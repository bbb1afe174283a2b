// Gradients of engines on a device: the memory that they have and when, and what the host waits for.
#include <gtest/gtest.h>

#include <atomic>

#include "tessera/engine/engine.h"
#include "tests/stand_in/staged_group.h"
#include "tests/stand_in/stand_in.h"
#include "tests/support/ranks.h"
#include "tests/support/training.h"

namespace tessera::testing {

using amp::PrecisionPolicy;
using engine::Engine;

namespace {

constexpr int64_t kSize = 1 << 16, kUnits = 4;

// Units of one weight each, one module after the other.
struct Chain {
  Chain(const ToyRun& run, int rank, comm::GroupPtr group) : group_(std::move(group)) {
    const c10::Device device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(rank));
    for (int i = 0; i < kUnits; ++i)
      specs.push_back({"w" + std::to_string(i), at::ones({kSize}, device).requires_grad_(true), 0,
                       "u" + std::to_string(i)});
    const bool several = group_->size() > 1;
    const comm::GroupPtr mine = several ? std::make_shared<StagedGroup>(group_) : group_;
    engine.emplace(toy_options(run), comm::Mesh(mine), specs, std::vector{toy_adamw()});
    for (int i = 0; i < kUnits; ++i)
      modules.push_back(engine->modules().add({i}));
  }
  at::Tensor forward() {
    engine->pre_forward();
    at::Tensor x = at::ones({}, specs[0].tensor.device());
    for (int i = 0; i < kUnits; ++i) {
      engine->modules().enter(modules[i]);
      x = x + (specs[i].tensor * x).sum() * 1e-6;
      engine->modules().leave(modules[i], {x});
    }
    engine->post_forward({x});
    return x;
  }
  // All ranks' memory is a device's; what they have is looked at while none goes on.
  int64_t bytes() {
    group_->barrier("before a look");
    const int64_t found = tessera_stand_in_bytes() / group_->size();
    group_->barrier("after a look");
    return found;
  }
  // Of this engine, but for gradients.
  int64_t held() const {
    const Engine::Memory memory = engine->memory();
    return memory.params + memory.master + memory.states + memory.buckets;
  }

  std::vector<engine::ParamSpec> specs;
  std::optional<Engine> engine;
  std::vector<int> modules;

 private:
  comm::GroupPtr group_;
};

}  // namespace

// At the end of a forward there is none, at the end of a backward what the stage owes, after the update none again.
TEST(DeviceGradients, ExistFromTheBackwardToTheUpdate) {
  for (const int world : {1, 2}) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (const PrecisionPolicy& mode : {PrecisionPolicy::fp32(), PrecisionPolicy::bf16()}) {
        const std::string what = "stage " + std::to_string(stage) + ", world " + std::to_string(world);
        const int64_t before = tessera_stand_in_bytes();
        run_ranks(world, [&](int rank, const comm::GroupPtr& group) {
          const ToyRun run{.stage = stage, .accumulation = 2, .persistence = 0, .precision = mode};
          Chain chain(run, rank, group);
          const int64_t whole = kUnits * kSize * static_cast<int64_t>(at::elementSize(mode.grad));
          const auto gradients = [&] { return chain.bytes() - before / world - chain.held(); };
          const auto expect = [&](int64_t bytes, const char* when) {
            EXPECT_NEAR(static_cast<double>(gradients()), static_cast<double>(bytes), 4096) << what << ", " << when;
          };
          for (int step = 0; step < 2; ++step) {
            for (int micro = 0; micro < 2; ++micro) {
              const int64_t owed = stage < 2 && micro == 0 ? whole : stage == 0 ? whole : whole / world;
              at::Tensor loss = chain.forward();
              expect(micro == 0 ? 0 : stage < 2 ? whole : whole / world, "end of a forward");
              loss.backward();
              loss.reset();
              expect(owed, "end of a backward");
              EXPECT_EQ(chain.engine->memory().grads, owed) << what;
              chain.engine->step();
            }
            expect(0, "after a step");
          }
          chain.forward().backward();
          chain.engine->zero_grad();
          expect(0, "after zero_grad()");
        });
        EXPECT_STREQ(tessera_stand_in_races(), "") << what;
      }
    }
  }
}

}  // namespace tessera::testing
