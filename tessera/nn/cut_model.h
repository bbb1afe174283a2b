// Cuts a model of torch::nn by a tensor-parallel plan: what tensor_parallel of a configuration says (parallel/plan.h).
#pragma once

#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <vector>

#include "tessera/config/config.h"
#include "tessera/nn/construction.h"
#include "tessera/parallel/plan.h"

namespace tessera::nn {

// A model, or one attention module of it, that says how its heads lie, where its weights do not (key/value heads, several
// projections in one): what model.config says in Python. For classes that know nothing of Tessera Recipe::facts says it.
//   struct Gpt : torch::nn::Module, tessera::nn::HasFacts {
//     parallel::ModelFacts facts() const override { return {.heads = 32, .kv_heads = 8, .head_dim = 128}; }
class HasFacts {
 public:
  virtual ~HasFacts() = default;
  virtual parallel::ModelFacts facts() const = 0;
};

// Modules that a plan is made of. Classes go by the last part of Module::name() without "Impl"; a Sequential is a list of blocks
// as a ModuleList is; layers of tessera/nn/parallel.h, and those inside torch's attention and transformer layers, have no weight.
std::vector<parallel::Module> plan_modules(const torch::nn::Module& module);
// What classes of the model say, and over it what `given` does (Recipe::facts). Value error for a part that is no module, but for
// stages of a pipeline.
parallel::ModelFacts model_facts(const torch::nn::Module& module, const parallel::ModelFacts& given = {});

// The plan for `size` ranks; nothing is changed. Value errors of make_plan(). Local, pure.
parallel::Plan plan_for(const torch::nn::Module& module, const Config& config, int size,
                        const parallel::ModelFacts& given = {});

// Cuts `module` over `group` as tensor_parallel.autotp_size asks. Parameters stay the tensors that they are, with a slice of the
// first rank's values as data, and options of linear and embedding layers have this rank's sizes. Note [Cut layers of torch]. A
// model that is cut already gets `group`; one of layers that are cut by hand is left as it is, unless the configuration has
// rules. Value error for a model that was cut for other ranks, before anything is changed. Collective. `building`: who
// partitioned parameters before, or null. `given`: as of model_facts(). Returns the plan where one was made.
std::optional<parallel::Plan> cut_model(torch::nn::Module& module, const Config& config, const comm::GroupPtr& group,
                                        const Construction* building, const parallel::ModelFacts& given = {});

}  // namespace tessera::nn
