// Contents: whether a model still has the parameters that its engine was built of.
//
// Note [Replaced parameters]
//   A parameter that takes the place of another one (Python's load_state_dict(assign=True), module.weight = nn.Parameter(..)),
//   and those of a module that is added or swapped, are used by the forward, and neither updated nor saved. So front ends compare
//   the objects of their modules with those that were there, before every update and save, which costs tens of nanoseconds an
//   object. Only where some differ this function looks at names: a parameter that is elsewhere in the model now
//   (torch's register_parametrization, a wrapper around its module) is the engine's as before. Frozen ones that came later are
//   only reported; once they require gradients they are what was added.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

namespace tessera::engine {

struct NamedParam {
  std::string name;
  int64_t id = 0;  // of the parameter object
  bool trained = true;
};

struct ContentsReport {
  std::string fault;    // what is wrong and what to do, without an origin; empty where nothing is
  std::string warning;  // frozen parameters that came later
};

// `built`: all names of all parameters when the engine was built; `now`: as they are; `known`: ids of the engine's parameters,
// and of those that are to join it.
ContentsReport compare_contents(const std::vector<NamedParam>& built, const std::vector<NamedParam>& now,
                                const std::unordered_set<int64_t>& known);

}  // namespace tessera::engine
