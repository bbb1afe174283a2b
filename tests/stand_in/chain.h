// Test support: an engine on the stand-in over units of one weight each, one module after the other.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/stand_in/staged_group.h"
#include "tests/support/training.h"

namespace tessera::testing {

struct Chain {
  static constexpr int64_t kSize = 1 << 16;
  static constexpr int kUnits = 4;

  struct How {
    ToyRun run;
    bool unused = false;  // the first unit has a parameter without a gradient
    at::ScalarType dtype = at::kFloat;
    std::function<void(engine::Options&)> change = [](engine::Options&) {};
    std::atomic<int>* exchanges = nullptr;  // as of StagedGroup
  };

  Chain(const How& how, int rank, comm::GroupPtr group) : group_(std::move(group)) {
    const c10::Device device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(rank));
    for (int i = 0; i < kUnits; ++i)
      specs.push_back({"w" + std::to_string(i), at::ones({kSize}, at::TensorOptions(how.dtype).device(device)), 0,
                       "u" + std::to_string(i)});
    if (how.unused) specs.push_back({"unused", at::ones({3}, specs[0].tensor.options()), 0, "u0"});
    for (const engine::ParamSpec& spec : specs)
      spec.tensor.requires_grad_(true);
    const bool several = group_->size() > 1;
    const comm::GroupPtr mine = several ? std::make_shared<StagedGroup>(group_, nullptr, how.exchanges) : group_;
    engine::Options options = toy_options(how.run);
    how.change(options);
    engine.emplace(options, comm::Mesh(mine), specs, std::vector{toy_adamw()});
    whole = engine->modules().add({});
    for (int i = 0; i < kUnits; ++i)
      modules.push_back(engine->modules().add({i}));
  }
  // `computes`: before a unit does, there and in the backward.
  at::Tensor forward(const std::function<void(int)>& computes = [](int) {}) {
    engine->pre_forward();
    if (whole >= 0) engine->modules().enter(whole);
    at::Tensor x = at::ones({}, specs[0].tensor.options().dtype(at::kFloat));
    for (int i = 0; i < kUnits; ++i) {
      if (modules[i] >= 0) engine->modules().enter(modules[i]);
      computes(i);
      const at::Tensor product = specs[i].tensor * x;
      product.register_hook([computes, i](const at::Tensor&) { computes(i); });
      x = x + product.sum() * 1e-6;
      if (modules[i] >= 0) engine->modules().leave(modules[i], {x});
    }
    if (whole >= 0) engine->modules().leave(whole, {x});
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
    const engine::Engine::Memory memory = engine->memory();
    return memory.params + memory.master + memory.states + memory.buckets;
  }

  std::vector<engine::ParamSpec> specs;
  std::optional<engine::Engine> engine;
  int whole = -1;
  std::vector<int> modules;

 private:
  comm::GroupPtr group_;
};

}  // namespace tessera::testing
