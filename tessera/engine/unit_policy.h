// Which parameters are gathered, reduced and freed together: the rules of both front ends, over names.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/config/zero_section.h"

namespace tessera::engine {

// A model as a front end lists it. Paths are those of named_parameters(); "" is the model itself.
struct Outline {
  struct Module {
    std::string path;
    std::vector<std::string> classes;  // names of its class; the first one tells classes apart
    bool repeats = false;              // a ModuleList or Sequential, whose children may be blocks
    bool runs = true;                  // the module has a forward: no ModuleList or ModuleDict
  };
  struct Param {
    std::string path;
    int64_t elements = 0;
    int64_t identity = 0;  // one tensor, one number
  };
  std::vector<Module> modules;  // parents before children; a module in two places under the first path only
  std::vector<Param> params;    // tied parameters under all their names
};

// From the name of a parameter to its unit. A parameter that is absent joins the root unit.
using UnitNames = std::map<std::string, std::string>;

// Every block that a ModuleList or Sequential repeats (two children of one class that hold parameters) is a unit, named
// by its path; the outermost container that repeats wins. Pure.
UnitNames default_units(const Outline& outline);

// For partitioned parameters: a leaf module is one unit, and what `units` leaves to the root is one unit with its module, so
// that it is whole only while that module runs. Parameters of the model itself stay in the root. `leaves`: paths. Pure.
UnitNames partition_units(const Outline& outline, const UnitNames& units, const std::vector<std::string>& leaves);

// Leaf modules (gathered and reduced as one, however their forward uses them). All are pure; modules are numbers in
// outline.modules, ascending.
enum class LeafBy { Class, Name, Suffix };  // one of the module's class names, its path, the end of its path
std::vector<int> modules_matching(const Outline& outline, LeafBy by, const std::string& text);

struct Leaves {
  std::vector<int> modules;
  std::vector<std::string> warnings;  // names that a user gave and that match nothing
};
// The leaves of zero_optimization.leaf_module and stage3_module_granularity_threshold. The latter names modules with no more
// elements than that for each module inside, their own included; neither the model, nor what does not run, nor what has no
// modules inside.
Leaves configured_leaves(const Outline& outline, const config::ZeroOptimization& zero);

// Paths of the modules that are inside no other one of `modules`.
std::vector<std::string> outermost(const Outline& outline, const std::vector<int>& modules);

}  // namespace tessera::engine
