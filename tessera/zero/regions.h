// Regions: where a user reads or edits whole parameters. Parameters that are not partitioned are whole anyway; a writer's values
// hold for these too, in every stage.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tessera/zero/backward_driver.h"
#include "tessera/zero/rank_guard.h"

namespace tessera::zero {

class Regions {
 public:
  Regions(Units& units, BackwardDriver& driver);

  bool is_gathered(ParamId param) const;
  ParamPartition partition_of(ParamId param) const;
  // This rank's elements of a parameter, 1-D, for reading: a view where they live on the device, else a copy.
  at::Tensor held_values(ParamId param) const;
  // Collective, all ranks with the same `params`. State error for a parameter that is in an open region; value error for a
  // `writer` that is no rank. `writes` None: for reading; it spares shared parameters a private copy. Nothing is open after an error.
  void open(const std::vector<ParamId>& params, Writes writes = Writes::Own, int writer = 0);
  // Collective, also where an exception leaves the region: what was written before it holds, in every stage. `writer` counts as
  // Ranks::rank() does; of a parameter that differs along axes, the values of the rank hold that has the writer's place along the
  // others.
  void close(const std::vector<ParamId>& params, Writes writes = Writes::None, int writer = 0);
  // Copies of the partitioned parameters that are whole now, for who ends the engine. Local.
  std::vector<std::pair<ParamId, at::Tensor>> whole_copies() const;
  // open() and close() call these; a front end does where a region for reading has nothing to gather. Local.
  void note_begun(const std::vector<ParamId>& params);
  void note_ended(const std::vector<ParamId>& params);
  // Why nothing may be updated: a region that has parameters is open. Empty where none is. Local.
  std::string why_no_update() const;
  void check_none_open() const;  // throws it, a state error
  // There are more parameters. Local.
  void params_changed() { open_.resize(static_cast<size_t>(units_.count())); }

 private:
  struct Open {
    bool open = false;
    bool writable = false;
    at::Tensor before{};  // of whole parameters beside masters: their owned values when the region began
  };
  // Copies what must be there when the region of a parameter that is whole anyway ends. end() undoes it.
  void copy_before(ParamId id, bool writable);
  void end(ParamId id);
  void check_writer(Writes writes, int writer) const;
  void broadcast(const std::vector<ParamId>& params, int writer) const;
  void take_writes(const std::vector<ParamId>& params, Writes writes, int writer);
  bool has_masters(ParamId id) const;  // the parameter has masters beside its weights
  void take_write(ParamId id);
  bool any_elsewhere(const std::vector<ParamId>& ids) const;
  void agree_on_disks(const std::vector<ParamId>& ids, RankGuard& disks);

  Units& units_;
  BackwardDriver& driver_;
  std::vector<Open> open_;      // by parameter
  std::vector<ParamId> begun_;  // the first parameter of each region that is open
};

}  // namespace tessera::zero
