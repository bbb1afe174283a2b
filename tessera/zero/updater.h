// Updater: from reduced gradients to refreshed compute parameters.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "tessera/zero/backward_driver.h"
#include "tessera/zero/rank_guard.h"
#include "tessera/zero/tile_pipeline.h"

namespace tessera::zero {

struct GradientSummary {
  double norm = 0;  // global L2 norm; not finite if a gradient is not
  // Numbers whose sum is the norm's square, where the backward has updated one rank's model: not waited for. Else undefined.
  at::Tensor unread;
  bool finite = true;
  bool scaled = false;        // some backward on some rank carried a loss scale
  bool alike = true;          // all ranks announced the same number; else nothing else is known
  std::vector<bool> present;  // per parameter: some rank has a gradient
};

class Updater {
 public:
  Updater(Units& units, BackwardDriver& driver);

  // Norm, finite check and presence, agreed on all ranks. Collective. Gradients must be reduced. `norm`: the caller's, with the
  // gradients' scale, instead of the norm of these gradients; value error, on all ranks, where ranks give different ones.
  // `announced`: a finite number that ranks compare; `shown`: a number on the device in its place, or undefined. `counts`: false
  // for a rank whose gradients nobody will use.
  GradientSummary summarize(std::optional<double> norm = {}, double announced = 0, const at::Tensor& shown = {},
                            bool counts = true);
  // The squares of the gradients that count on this rank: summed over all ranks they are the square of the norm, whatever
  // is replicated or cut. Not finite if a gradient is not. `without`: parameters that do not count. Collective. Gradients
  // must be reduced.
  // `announced`: a finite number that ranks compare; without a value where it differs. `counts`: as for summarize().
  std::optional<double> norm_contribution(const std::vector<ParamId>& without, double announced, bool counts = true);
  // Gradients are multiplied by `scale` (unscale and clip). Parameters without a gradient on any rank are left alone.
  // `external` (Rule::External) updates the masters. Collective: refreshes the compute parameters.
  void update(const GradientSummary& summary, double scale, const std::function<void()>& external);
  // The part of update() that is this rank's own, for one unit after the other: its gradients of the owned range are `grads`,
  // undefined where they lie in pieces, in use until the event, which is null where the current stream uses them. Until
  // finish_units() or drop_units().
  std::shared_ptr<c10::Event> update_unit(Unit& unit, const at::Tensor& grads, const std::vector<bool>& present,
                                          double scale, RankGuard& disks);
  void finish_units(const std::vector<bool>& present);
  void drop_units() { pipeline_.reset(); }
  // update_unit() for a unit that UpdateLane::takes(), which goes on with it: `grads` are in use until `release` is called.
  void leave_unit(Unit& unit, const shard::Buffer& grads, const std::vector<bool>& present, double scale,
                  decltype(ArrivedSum::release) release = {});
  // Opens the lane before the first of `units`, in the order in which the next forward uses them; `disks` has what failed so far.
  void open_lane(const std::vector<Unit*>& units, RankGuard& disks);
  // The part of update() that ranks share, for all that update_unit() has updated: their weights on all ranks. Collective.
  void launch_gathers();
  // finish_gathers() also makes what went wrong with any rank's disk an error on all of them, later where an update runs on.
  void finish_gathers(RankGuard& disks);
  // A guard of an update; it agrees where states or weights do not live on the device.
  RankGuard guard() const;
  // Units whose states or weights do not live on the device, in the order in which a forward uses them.
  std::vector<Unit*> elsewhere() const;
  // Takes in what the user did to parameters since the last update, as far as the update itself does not (adoption.h). State
  // error where a region holds them. Local.
  void prepare_update();
  // Units that stay on the device, which nothing waits for, come first, then those that pass through it beside those of the host;
  // each in the order of the next forward. The order is the same on all ranks, as gathers follow it. Local.
  std::vector<Unit*> in_order_of_update() const;

  // Whether a client's optimizer is given the gradients themselves, and no copy in another dtype.
  bool client_reads_gradients() const;
  void scale_gradients(double scale);  // this rank's part of them; local
  // Drops gathers in flight, of an update that threw; only destroy may follow.
  void abandon();
  // Writes masters back into the compute parameters (after masters were edited). Collective for sharded states.
  void refresh_params();

 private:
  std::vector<at::Tensor> squares_of_shared(const std::vector<ParamId>& without = {}) const;
  std::vector<at::Tensor> squares_of_varying(const std::vector<ParamId>& without = {}) const;
  double total(const std::vector<std::vector<double>>& rows, size_t first) const;
  double total_of_varying(const std::vector<std::vector<double>>& rows, size_t place) const;
  void reduce_late();
  std::vector<double> presence_flags() const;
  std::vector<bool> presence(const std::vector<std::vector<double>>& rows) const;
  void agree_presence(const Ranks& ranks, std::vector<bool>& present) const;
  comm::Pending gather(Unit& unit);
  void gather_unit(Unit& unit);
  void finish_gathers();
  void update_units(const std::vector<Unit*>& units, const GradientSummary& summary, double scale, RankGuard& disks);
  void run_on(const std::vector<Unit*>& units, const GradientSummary& summary, double scale, RankGuard disks);
  void complete_pieces(const std::vector<bool>& present);
  static void count_updates(Unit& unit, const std::vector<bool>& present);
  void agree_on_disks(RankGuard& disks);
  void make_room();
  void update_external(const GradientSummary& summary, double scale, const std::function<void()>& external,
                       RankGuard& disks);
  at::ScalarType client_dtype() const;
  void check_no_region_writes() const;

  Units& units_;
  BackwardDriver& driver_;
  std::vector<comm::Pending> gathers_;
  Lanes lanes_;
  std::optional<TilePipeline> pipeline_;  // of a backward that updates
};

}  // namespace tessera::zero
