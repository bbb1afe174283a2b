// Recipe: what a training needs that no configuration can say: units, parameter groups, an optimizer or a schedule of one's own.
//
//   tessera::nn::Recipe recipe;
//   recipe.groups = {{.takes = [](const std::string&, const at::Tensor& p) { return p.dim() < 2; },
//                     .set = [](tessera::optim::GroupOptions& group) { group.weight_decay = 0; }},
//                    {.params = model->tokens->parameters(), .frozen = true}};
//   auto engine = tessera::initialize(model, config, recipe);
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/engine/engine.h"
#include "tessera/nn/units.h"
#include "tessera/optim/types.h"
#include "tessera/parallel/plan.h"

namespace tessera::nn {

// Parameters with hyper-parameters of their own: those of the list, and those that the function takes, by their (first) name in
// named_parameters().
struct ParamGroup {
  std::function<bool(const std::string& name, const at::Tensor& param)> takes = {};
  std::vector<at::Tensor> params = {};
  // Changes the options that optimizer.params of the configuration give; empty: changes nothing.
  std::function<void(optim::GroupOptions& options)> set = {};
  // With optimizer.type Muon: true where the parameters are the matrices that Muon is for, false where AdamW updates them. Empty:
  // optim::is_muon_matrix() decides, which may make two groups of one, matrices first; `set` is called for each.
  std::optional<bool> use_muon = {};
  // The parameters are not trained: requires_grad goes, until the program sets it again.
  bool frozen = false;
};

// A schedule of one's own. After each update it gives the learning rates of the next one.
class Schedule {
 public:
  virtual ~Schedule() = default;
  // Returns the groups' rates after so many updates. `initial`: the rates that the groups were given. The rates must be as many,
  // finite, not negative and the same on all ranks; value error otherwise.
  virtual std::vector<double> rates(int64_t updates, const std::vector<double>& initial) = 0;
  // The text that load_state() gets after a resume, for checkpoints; rank 0's is kept.
  virtual std::string state() const { return {}; }
  virtual void load_state(const std::string& /*state*/) {}
};
// A schedule for all groups: the initial rate times factor(updates).
std::shared_ptr<Schedule> scaled_by(std::function<double(int64_t updates)> factor);

// True for a module that stage 3 gathers as one, however its forward uses what is in it: a mixture of experts, of which ranks run
// different ones. `path`: as in named_modules().
using LeafRule = std::function<bool(const std::string& path, const torch::nn::Module& module)>;

struct Recipe {
  UnitPolicy units = default_unit_policy;  // which parameters are gathered, reduced and freed together
  LeafRule leaf = {};                      // beside the modules that zero_optimization.leaf_module names
  // The first group that takes a parameter has it. Parameters that none takes are one more group, behind these, with the
  // configuration's own hyper-parameters: engine.lr() has its rate last.
  std::vector<ParamGroup> groups = {};
  // An optimizer built over the module's parameters, with its own groups, in place of the configuration's. It updates fp32
  // masters, in stages 1 to 3 those of this rank's slices, which take the parameters' places in its groups until destroy().
  // Parameters that it does not have are not trained.
  std::shared_ptr<torch::optim::Optimizer> optimizer = nullptr;
  std::shared_ptr<Schedule> schedule = nullptr;  // in the place of the configuration's schedule
  // What a tensor-parallel plan needs to know of heads, where no class of the model says it (HasFacts): what is not 0 or empty here
  // holds, for the model, and in `parts` for its modules by their paths; value error for a path that is none.
  parallel::ModelFacts facts = {};
  // True: along Axis::Sp the model treats each part of a sequence alone, as no attention does, or exchanges parts by itself.
  bool parts_alone = false;
};

// ---- for sessions
// Marks in `specs` (param_specs() of the module) the parameters' groups, and returns those. Value errors, which name group
// and parameter: a group that takes nothing (of the `whole` model; a stage may have none of one), a tensor that is no parameter,
// one that two groups list.
std::vector<optim::GroupOptions> group_params(const std::vector<ParamGroup>& groups,
                                              const optim::OptimizerOptions& optimizer, bool whole,
                                              std::vector<engine::ParamSpec>& specs);

}  // namespace tessera::nn
