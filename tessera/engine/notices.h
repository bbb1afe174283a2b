// Notices: what an engine says of steps that are no error and train less than they seem.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "tessera/zero/units.h"

namespace tessera::engine {

// Each notice is logged once, by the first rank only.
class Notices {
 public:
  // `mute`: says nothing, ever. `some_unused`: says nothing of unused parameters.
  void settle(bool mute, bool some_unused);
  // step() came without a backward since the last one.
  void no_backward();
  // After an update: notes trained parameters whose gradient is missing on all ranks. The first update with gradients says which,
  // and so does update kWatched which were missing in all so far.
  void updated(const zero::Units& units, const std::vector<bool>& present);
  // Notes parameters that were frozen and require gradients now, and that no param group has.
  void thawed(const zero::Units& units);
  std::vector<std::string> take();

  static constexpr int kWatched = 10;

 private:
  struct Use {
    int trained = 0, used = 0;  // in so many updates
  };
  void add(const std::string& text);
  void warn_of_unused(const std::vector<std::string>& names, const std::string& when);

  bool mute_ = false, warned_of_step_ = false, watches_ = true;
  int updates_ = 0;
  std::vector<Use> uses_;  // by parameter
  std::set<zero::ParamId> thawed_;
  std::vector<std::string> texts_;
};

// A warning that an engine which should train has no parameter to do it with, and why; empty where it has one.
std::string nothing_trained(const std::vector<zero::ParamSpec>& params);

// A warning, of a forward inside an autocast region around an engine that does not enable it.
inline constexpr const char* kWithoutAutocast =
    "[engine] forward runs without autocast: its configuration does not enable torch_autocast, so the autocast region "
    "around it is switched off inside";

// What is wrong with a mesh whose ranks along sp have exchanged no parts of a sequence so far; empty where they have, or are one.
std::string sequence_fault(const comm::Mesh& mesh);

// Returns those of the named parameters that no step used; `used` says in how many of `steps` steps each was. Members of a list
// (experts, layers; also numbered names as expert_3) are left out where their disuse may be meant: for one step, if another
// member was used; for several, if another member was used in only some of them.
std::vector<std::string> never_used(const std::vector<std::string>& names, const std::vector<int>& used, int steps);

}  // namespace tessera::engine
