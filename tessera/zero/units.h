// Units: every parameter that an engine holds, by number, and the units they lie in. What a step does with units is in the
// classes over it: BackwardDriver, Updater, StateAccess, Modules, Regions.
//
// Note [Captured streams]
//   A graph of a device replays kernels and nothing that the host did: hooks, gathers, counters, the look at the norm. So none
//   of an engine's calls is captured, where they would take place once for all replays. Parts of a model may be, since
//   trained parameters that are not partitioned stay where they are; hooks run behind a replay as behind any operator, and
//   gradients in memory of a graph, which the next replay writes, are copied (HookAccess::is_alone).
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/phases.h"
#include "tessera/optim/optimizer.h"
#include "tessera/zero/options.h"
#include "tessera/zero/param_spec.h"
#include "tessera/zero/planner.h"
#include "tessera/zero/rank_sets.h"
#include "tessera/zero/shared_params.h"
#include "tessera/zero/unit.h"
#include "tessera/zero/unsharder.h"

namespace tessera::zero {

// Where a parameter lies. Parameters that are neither optimized nor partitioned lie nowhere: they are the module's alone.
struct Place {
  FlatParams* flat = nullptr;
  int item = -1;                 // the parameter's number there
  int number = -1;               // number of the unit, in the unsharder
  Unit* unit = nullptr;          // null: frozen
  const Param* param = nullptr;  // there

  bool held() const { return flat != nullptr; }
  bool trained() const { return unit != nullptr; }
  const std::string& name() const { return flat->items()[item].name; }
};

struct Failure;
class UpdateLane;

class Units {
 public:
  // Collective: rank 0's values are broadcast. Parameters become views of flat buffers. `params` must outlive this.
  Units(const Options& options, const comm::Mesh& mesh, const std::vector<ParamSpec>& params, optim::Rule rule,
        const std::vector<optim::GroupOptions>& groups);
  ~Units();

  // The place of a parameter. Value error, which names `call`, for an unknown number; from trained(), also for one not optimized.
  const Place& at(ParamId id, const char* call) const;
  const Place& trained(ParamId id, const char* call) const;
  // Returns those of `ids` whose parameters are held.
  std::vector<ParamId> held(const std::vector<ParamId>& ids, const char* call) const;
  // The place without a check, for numbers that are our own.
  const Place& operator[](ParamId id) const { return places_[id]; }
  int count() const { return static_cast<int>(places_.size()); }
  const std::vector<ParamSpec>& params() const { return params_; }
  const std::vector<ParamId>& trained_ids() const { return trained_ids_; }
  // The unit by its number in the unsharder; null: frozen.
  Unit* of_number(int number) const { return unit_of_number_[number]; }
  const std::vector<std::unique_ptr<Unit>>& all() const { return units_; }  // in launch order
  const std::vector<std::unique_ptr<FlatParams>>& frozen() const { return frozen_; }

  const Options& options() const { return options_; }
  const shard::StagePlacements& placements() const { return placements_; }
  const RankSets& rank_sets() const { return *sets_; }
  const Ranks& ranks() const { return sets_->all().ranks; }  // of parameters that are the same everywhere
  const Ranks& ranks_of(ParamId id) const { return sets_->of(params_[id]).ranks; }
  const SharedParams& shared() const { return shared_; }
  optim::Rule rule() const { return rule_; }
  std::vector<optim::GroupOptions>& groups() { return groups_; }
  Unsharder& unsharder() { return *unsharder_; }
  const Unsharder& unsharder() const { return *unsharder_; }
  Phases& phases() { return phases_; }
  const Phases& phases() const { return phases_; }

  // Whether states lie in slices on several ranks.
  bool states_are_cut(const Ranks& ranks) const {
    return placements_.states == shard::Placement::Shard && ranks.shard->size() > 1;
  }
  // Whether other ranks' parts of the unit's weights come by an all-gather after each update.
  bool gathers_updates(const Unit& unit) const {
    return states_are_cut(unit.ranks()) && !unit.flat().sharded() && !unit.flat().shares();
  }
  // This rank's elements of a trained parameter, in the order of its memory.
  shard::Range local_range(const Place& place) const;
  // Throws IoError while weights and states do not belong together: an update that changed some of them did not come to its end.
  void check_whole() const;
  // Sets why weights and states do not belong together, the same on all ranks; empty once all of them were written.
  void set_broken(const std::string& why) { broken_ = why; }
  // Sets and throws what ranks agreed on. Nothing happens where all went well.
  void check_came_to_end(const Failure& failure);
  // Ends an error, while it is handled, amid a call that all ranks make; it goes on. Where only this rank has it, the others
  // would wait for this one in collectives, or take its next call for one that looks alike: all that these ranks have in
  // common ends with the reason.
  [[noreturn]] void fail_alone(c10::OutOfMemoryError& error) const;
  // State error where `call` needs what was moved off the device for a while (moving.h). Returns once no update of this rank
  // runs on: UpdateLane::settle().
  void check_here(const char* call) const;
  void check_not_away(const char* call) const;  // throws the state error alone
  UpdateLane& lane() const { return *lane_; }
  bool is_away() const { return away_; }
  // Throws a state error, before anything was done, where the current stream is captured: Note [Captured streams].
  void check_not_captured(const char* call) const;
  void set_away(bool away) {
    away_ = away;
    was_away_ = was_away_ || away;
  }
  // Gives the system page-locked memory that nothing needs any more, of what lives elsewhere or was moved.
  void return_host_memory() const noexcept;
  // Parameters without a group that would join one: see Note [Joining] in joining.h.
  const std::vector<ParamId>& may_join() const { return may_join_; }
  // Parameters of no group, frozen when the engine was built. Once they require gradients nobody here uses them.
  const std::vector<ParamId>& left_out() const { return left_out_; }
  // Throws a value error for a parameter that could not be trained beside those that are.
  void check_joins(const ParamSpec& param) const;
  // Takes note that params() has grown, or other parameters may join. Local.
  void params_changed();
  // Gives `ids`, which have a group now, units and states, by what builds them at construction. Partitioned ones stay so, the
  // others stay whole. Value error before anything is touched. Where it throws later the engine has ended. Collective.
  void join(const std::vector<ParamId>& ids);
  // Frees gradients, states and places; parameters without data say `message`. Local.
  void release(const std::string& message);

 private:
  bool update_is_there(int number, bool waits) const;
  bool has_homes() const { return options_.home || options_.weight_home; }
  SharedParams share(const std::vector<PlannedUnit>& units, const std::vector<ParamSpec>& params) const;
  at::Tensor space_of(const std::vector<const ParamSpec*>& members);
  void build(const std::vector<PlannedUnit>& units, const std::vector<ParamSpec>& params);
  void undo() noexcept;
  void take_host_memory(std::ptrdiff_t first);
  void check_client(const std::vector<ParamSpec>& params) const;
  StateResidence state_residence_of(const std::vector<const ParamSpec*>& members);
  void build_unit(const PlannedUnit& planned, const std::vector<const ParamSpec*>& originals);
  void build_frozen(const PlannedUnit& planned, const std::vector<const ParamSpec*>& originals,
                    std::vector<FlatParams::Item> items);
  void number_elements();
  void order_launches();
  void root_and_flush_last();
  std::vector<PlannedUnit> leave_frozen(const std::vector<ParamId>& ids);

  Options options_;
  Phases phases_;
  shard::StagePlacements placements_;
  std::optional<RankSets> sets_;  // there from the constructor on, as the planner is
  std::optional<Planner> planner_;
  optim::Rule rule_;
  std::vector<optim::GroupOptions> groups_;
  const std::vector<ParamSpec>& params_;
  SharedParams shared_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<std::unique_ptr<FlatParams>> frozen_;
  std::vector<Place> places_;
  std::vector<ParamId> trained_ids_, may_join_, left_out_;
  std::vector<std::unique_ptr<FlatParams>> left_;  // emptied ones of frozen_: the unsharder has their numbers
  bool built_ = false;                             // units that come now join
  ShareTaken away_states_, of_device_;             // Options::ratio and device_share
  std::vector<Unit*> unit_of_number_;
  std::unique_ptr<Unsharder> unsharder_;
  std::string broken_, ended_;
  bool away_ = false, was_away_ = false;
  std::unique_ptr<UpdateLane> lane_;  // first to go: it works on the units
};

}  // namespace tessera::zero
