// What connects a module to the engine that holds its parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/engine/engine.h"
#include "tessera/engine/flops_profile.h"

namespace torch::nn {
class Module;
}

namespace tessera::nn {

class Construction;

// A module's row in a profile of operations that counts.
struct ProfiledAs {
  std::weak_ptr<engine::FlopsProfile> profile;
  int row = 0;
};

// A module's number in an engine. Modules without an engine, or without partitioned parameters, have none.
struct ScopeHandle {
  std::weak_ptr<engine::Engine> engine;
  int module = -1;
  std::vector<ProfiledAs> profiles = {};
};

// What becomes of the first tensor that a module is given, and of the tensor that it returns; empty: nothing.
struct Borders {
  std::function<at::Tensor(const at::Tensor&)> enter = {}, leave = {};
};

// Base of modules that tell an engine when they run.
class ScopeHolder {
 public:
  virtual ~ScopeHolder() = default;
  const ScopeHandle& scope() const { return link_; }
  // Whether the module's forward has the border: its first argument, or its result, is a tensor.
  virtual bool enters_with_tensor() const { return false; }
  virtual bool leaves_with_tensor() const { return false; }
  const Borders& borders() const { return borders_; }
  void set_borders(Borders borders) { borders_ = std::move(borders); }
  void connect(const ScopeHandle& link) {
    link_.engine = link.engine;
    link_.module = link.module;
  }
  // Begins, and ends, to say to a profile when this runs.
  void join(ProfiledAs profiled) { link_.profiles.push_back(std::move(profiled)); }
  void leave(const std::shared_ptr<engine::FlopsProfile>& profile) {
    std::erase_if(link_.profiles, [&](const ProfiledAs& as) { return as.profile.lock() == profile; });
  }

 private:
  ScopeHandle link_;
  Borders borders_;
};

// One call of a module in the profiles that count.
class ProfiledCall {
 public:
  explicit ProfiledCall(const std::vector<ProfiledAs>& profiles);
  ~ProfiledCall();
  ProfiledCall(const ProfiledCall&) = delete;
  ProfiledCall& operator=(const ProfiledCall&) = delete;

 private:
  std::vector<std::pair<std::shared_ptr<engine::FlopsProfile>, int>> entered_;
};

// One call of a module: gathers its parameters now; ends with finish(), or as a call that threw.
class [[nodiscard]] ModuleScope {
 public:
  explicit ModuleScope(const ScopeHandle& link);
  ~ModuleScope();
  ModuleScope(const ModuleScope&) = delete;
  ModuleScope& operator=(const ModuleScope&) = delete;

  bool wants_tensors() const { return wants_; }
  void note_inputs(const std::vector<at::Tensor>& inputs);
  void finish(const std::vector<at::Tensor>& outputs, bool hides = false);  // as of zero::Modules::leave()

 private:
  const ProfiledCall profiled_;  // before the parameters are gathered, which takes time of the module
  std::shared_ptr<engine::Engine> engine_;
  int module_ = -1;
  bool wants_ = false;
};

// Connects every ScopeHolder in `module` with `engine`, whose parameters are those of param_specs(), but for those inside
// the modules of the paths `leaves`, which run as one. A layer of a plain Sequential (sequence_layers.h) has what belongs to no
// ScopeHolder in it, and to no module elsewhere. Returns the scope of the parameters that belong to none.
ScopeHandle connect_scopes(torch::nn::Module& module, const std::shared_ptr<engine::Engine>& engine,
                           const std::vector<std::string>& leaves);

// A text for reading: what is gathered together, and why, a line for each module with parameters of its own. `engine` is the one
// that connect_scopes() was called with.
std::string units_text(const torch::nn::Module& module, const engine::Engine& engine);

// Of a region's `modifier_rank`: -1 reads.
inline zero::Writes writes_of(int modifier_rank) {
  return modifier_rank == -1 ? zero::Writes::None : zero::Writes::FromRank;
}

// Inside the lifetime of a GatheredParameters these parameters are whole: for reading, or, with `modifier_rank` >= 0, for
// writing on that rank of the data-parallel group; value error for what is no rank of it. Collective, at the begin and at the end,
// also where an exception passes: what was written before it holds. Tensors that the engine does not have pass through. close()
// ends it and reports errors; the destructor warns of them. Where the engine is destroyed inside, or gone, they stay whole.
class [[nodiscard]] GatheredParameters {
 public:
  GatheredParameters(engine::Engine& engine, const std::vector<at::Tensor>& params, int modifier_rank = -1);
  template <class E>  // an nn::Engine or nn::Pipeline
    requires requires(E& engine) {
      { engine.core() } -> std::same_as<engine::Engine&>;
    }
  GatheredParameters(E& engine, const std::vector<at::Tensor>& params, int modifier_rank = -1)
      : GatheredParameters(engine.core(), params, modifier_rank) {}
  // Of a model that is being built.
  GatheredParameters(Construction& building, const std::vector<at::Tensor>& params, int modifier_rank = -1);
  ~GatheredParameters();
  GatheredParameters(const GatheredParameters&) = delete;
  GatheredParameters& operator=(const GatheredParameters&) = delete;
  void close();

 private:
  std::function<void()> close_;  // null: it was
};

}  // namespace tessera::nn
