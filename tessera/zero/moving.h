// Moving: sends what an engine has on the device elsewhere for a while, and brings it back, so that other engines have the room.
#pragma once

#include <vector>

#include "tessera/zero/backward_driver.h"

namespace tessera::zero {

inline std::vector<StateKind> all_state_kinds() {
  using enum StateKind;
  return {OptimizerStates, Masters, Weights, Gradients, Buckets};
}

class Moving {
 public:
  Moving(Units& units, BackwardDriver& driver);

  // Moves what of `kinds` lives on the device to what `home` makes for it; null: it stays. Parameters have no data meanwhile,
  // and an access says what to call; Units::check_here() throws. Returns true when something is away. Local. State error inside a
  // forward or a region, and for gradients of this rank alone that lie in buffers of their own (no_sync); value error for
  // shared parameters. What went before an error is away: come_back() ends that.
  bool leave(const std::vector<StateKind>& kinds, const HomeMaker& home);
  // Bring back all, or weights alone. Local. Nothing happens where nothing is away.
  void come_back();
  void weights_come_back();

 private:
  void check() const;

  Units& units_;
  BackwardDriver& driver_;
};

}  // namespace tessera::zero
