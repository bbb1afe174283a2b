// What an engine tells of steps that are no error and train less than it seems.
#pragma once

#include <string>
#include <vector>

#include "tessera/zero/units.h"

namespace tessera::engine {

// Each is told once. Of the first rank only: the others have nothing to say.
class Notices {
 public:
  // `mute`: says nothing, ever. `some_unused`: says nothing of unused parameters.
  void settle(bool mute, bool some_unused);
  // step() without a backward since the last one.
  void no_backward();
  // After an update: trained parameters whose gradient is missing on all ranks, at the first update that had any.
  void updated(const zero::Units& units, const std::vector<bool>& present);
  std::vector<std::string> take();

 private:
  void add(bool& told, const std::string& text);

  bool mute_ = false, told_of_step_ = false, told_of_unused_ = false;
  std::vector<std::string> texts_;
};

// Of the parameters with these names: those that were not used, `used` being parallel to `names`, without those of a list
// (experts, layers) another member of which had its like used, as they may be used in other steps.
std::vector<std::string> never_used(const std::vector<std::string>& names, const std::vector<bool>& used);

}  // namespace tessera::engine
