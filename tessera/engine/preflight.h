// Preflight: what is checked before an engine touches a model, so that a refused model is as it was.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "tessera/engine/engine.h"
#include "tessera/zero/ranks.h"

namespace tessera::engine {

// Value error, by name, for a parameter that no engine can take: without values, given twice, with memory that
// another parameter has too, of a dtype that is not trained, or held by another live engine. Local.
void check_params(const std::vector<ParamSpec>& params, const amp::PrecisionPolicy& precision);
// Does the same for a parameter that comes later, beside those that are `present`. Local.
void check_added(std::span<const ParamSpec> present, const ParamSpec& param);

// The policy of a model that no precision section casts: its own dtype, with the states torch would have; `grad`: the
// dtype gradients accumulate in, if another. Value error for trained parameters of several dtypes, or one that is not
// trained. Local.
amp::PrecisionPolicy precision_of_model(const std::vector<ParamSpec>& params, std::optional<at::ScalarType> grad);

// What no configuration could have: "param group 1: lr must be >= 0, got -1"; empty where nothing is. `first`: the number of the
// first. check_bounds(): a value error. Local.
std::string wrong_in_groups(const Options& options, const std::vector<optim::GroupOptions>& groups, size_t first = 0);
void check_bounds(const Options& options, const std::vector<optim::GroupOptions>& groups, size_t first = 0);

// Value error that lists what excludes an update in the backward (zero/update_in_backward.h). Local.
void check_update_in_backward(const Options& options, const comm::Mesh& mesh);

// Compares what ranks have built: different engines would follow each their own course, silently. Value error on all ranks that
// says what differs and where: names, shapes, strides, order, units and groups of parameters, resolved options. Collective.
void check_alike(const zero::Ranks& ranks, const Options& options, const std::vector<ParamSpec>& params,
                 const std::vector<optim::GroupOptions>& groups);

}  // namespace tessera::engine
