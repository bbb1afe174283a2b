// Joining: frozen parameters that begin to be trained while an engine lives.
//
// Note [Joining]
//   A parameter without a group, whose spec says which one it would join, waits from the first forward on that finds it
//   requiring a gradient. What it gets stays in p.grad, of this rank and scaled as the others' are, since nothing that the
//   ranks do together may begin before all of them are known to have the same parameters. They compare these where they
//   compare what they step by anyway (Note [What ranks step by] in engine/agreement.h), and before a save or a load. Then
//   units are built of those that wait by what builds units at construction, what stands in p.grad becomes this rank's
//   contribution, and the update that found them takes them along: as if they had been trained from that step's first
//   micro-batch on.
//   A partitioned parameter leaves its frozen unit, the rest of which is built anew, and stays partitioned; all others stay
//   whole, as no module gathers them. With tessera.shared_parameters what is built then is each rank's own.
#pragma once

#include <vector>

#include "tessera/zero/modules.h"
#include "tessera/zero/regions.h"
#include "tessera/zero/update_in_backward.h"

namespace tessera::zero {

class Joining {
 public:
  Joining(Units& units, BackwardDriver& driver, Modules& modules, Regions& regions, UpdateInBackward& early)
      : units_(units), driver_(driver), modules_(modules), regions_(regions), early_(early) {}

  // See Units::params_changed(). Local.
  void params_changed();
  // See Units::join() and BackwardDriver::take_joined(). Collective.
  void join(const std::vector<ParamId>& ids);

 private:
  Units& units_;
  BackwardDriver& driver_;
  Modules& modules_;
  Regions& regions_;
  UpdateInBackward& early_;
};

}  // namespace tessera::zero
