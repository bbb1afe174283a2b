#include "tessera/zero/updater.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/optim/norm.h"
#include "tessera/shard/dtype.h"
#include "tessera/zero/adoption.h"

namespace tessera::zero {

namespace {

constexpr const char* kHalfDone = "a step ended with an error after it had updated a part of the model";

// The gradients of `slice` (in the coordinates of the flat space, and owned here), without those of some parameters.
void add_pieces(std::vector<at::Tensor>& pieces, const Unit& unit, shard::Range slice,
                const std::vector<ParamId>& without) {
  const auto add = [&](int64_t begin, int64_t end) {
    if (begin < end)
      pieces.push_back(unit.gradients().fetch({begin - unit.owned.begin, end - unit.owned.begin}).wait());
  };
  for (const Param& p : unit.params) {  // in the order of their places
    if (std::ranges::find(without, p.id) == without.end()) continue;
    add(slice.begin, std::min(p.range.begin, slice.end));
    slice.begin = std::max(slice.begin, p.range.end);
  }
  add(slice.begin, slice.end);
}

// What travels of a norm that step() was given: numbers that compare, and none is one of them.
double given_norm(std::optional<double> norm) {
  if (!norm) return -1;
  return std::isfinite(*norm) ? *norm : -2;
}

}  // namespace

Updater::Updater(Units& units, BackwardDriver& driver) : units_(units), driver_(driver) {}

// Squares of the gradients of units that all ranks share: one sum per slice and rank, added in rank order, so that the bits
// are the same whether a rank holds one slice or all. `rows`: a row for each rank of the shard group, the first column.
void Updater::add_squares(at::TensorAccessor<double, 2> rows, const std::vector<ParamId>& without) const {
  const Ranks& ranks = units_.ranks();
  if (units_.options().update_in_backward) {
    for (const auto& unit : units_.all())
      if (&unit->ranks == &ranks) rows[ranks.shard->rank()][0] += unit->squares;
    return;
  }
  std::vector<at::Tensor> slices;
  std::vector<int> rank_of;
  for (const auto& unit : units_.all()) {
    if (&unit->ranks != &ranks) continue;
    for (int r = 0; r < ranks.shard->size(); ++r) {
      if (units_.placements().states == shard::Placement::Shard && r != ranks.shard->rank()) continue;
      add_pieces(slices, *unit, unit->layout.shard(r), without);
      rank_of.resize(slices.size(), r);
    }
  }
  const std::vector<double> squares = optim::sums_of_squares(slices);
  for (size_t i = 0; i < squares.size(); ++i)
    rows[rank_of[i]][0] += squares[i];
}

// Those of the others: of equal ones, one rank counts.
double Updater::varying_squares(const std::vector<ParamId>& without) const {
  std::vector<at::Tensor> slices;
  double sum = 0;
  for (const auto& unit : units_.all()) {
    const Ranks& ranks = unit->ranks;
    if (&ranks == &units_.ranks() || ranks.replicate->rank() > 0) continue;
    if (!ranks.varies_along_model && ranks.model->rank() > 0) continue;
    if (!units_.states_are_cut(ranks) && ranks.shard->rank() > 0) continue;
    if (units_.options().update_in_backward) {
      sum += unit->squares;
    } else {
      add_pieces(slices, *unit, unit->owned, without);
    }
  }
  for (const double squares : optim::sums_of_squares(slices))
    sum += squares;
  return sum;
}

// Over all ranks.
double Updater::sum_of_varying_squares() const {
  if (units_.rank_sets().size() == 1) return 0;
  const at::Tensor sum = at::full({1}, varying_squares(), at::kDouble);
  units_.ranks().agree(sum, comm::ReduceOp::Sum, "gradient norm");
  return sum.item<double>();
}

void Updater::reduce_late() {
  driver_.reducer().reduce_late();
  driver_.reduce_replicas();
}

std::optional<double> Updater::norm_contribution(const std::vector<ParamId>& without, double said) {
  for (const ParamId id : without)
    units_.trained(id, "norm_contribution");
  const Ranks& ranks = units_.ranks();
  const at::Tensor late = at::tensor({driver_.reducer().has_late() ? 1.0 : 0.0, said, -said}, at::kDouble);
  ranks.agree(late, comm::ReduceOp::Max, "late gradients");
  if (late[1].item<double>() != said || late[2].item<double>() != -said) return {};
  if (late[0].item<double>() > 0) reduce_late();
  const double own = varying_squares(without);
  if (ranks.replicate->rank() > 0 || ranks.model->rank() > 0) return own;
  const at::Tensor rows = at::zeros({ranks.shard->size(), 1}, at::kDouble);
  auto squares = rows.accessor<double, 2>();
  add_squares(squares, without);
  return squares[ranks.shard->rank()][0] + own;
}

GradientSummary Updater::summarize(std::optional<double> norm, double said) {
  const int ranks = units_.ranks().shard->size(), me = units_.ranks().shard->rank();
  at::Tensor sums = at::zeros({ranks, 8}, at::kDouble);
  // rank: squares, parameters without a gradient, late gradients, scaled, largest and least given norm, and number said
  auto table = sums.accessor<double, 2>();
  if (!norm) add_squares(table);
  table[me][4] = given_norm(norm);
  table[me][5] = -given_norm(norm);
  table[me][6] = said;
  table[me][7] = -said;
  if (!units_.options().update_in_backward) {  // it has used them up
    for (const ParamId id : units_.trained_ids())
      table[me][1] += units_[id].param->has_grad ? 0 : 1;
  }
  table[me][2] = driver_.reducer().has_late() ? 1 : 0;
  table[me][3] = driver_.scaled() ? 1 : 0;
  // Reduced gradients, and with them the squares, are the same in all replicas; the counts are of local gradients.
  units_.ranks().collect(sums, "gradient norm");

  GradientSummary summary;
  double total = 0, missing = 0, late = 0;
  for (int r = 0; r < ranks; ++r) {
    TESSERA_CHECK_VALUE(table[r][4] == given_norm(norm) && table[r][5] == -given_norm(norm), "engine.step",
                        "ranks of this engine give different norms: one has ", norm.value_or(-1),
                        " (-1: none), others another; global_norm is the same on all of them");
    total += table[r][0];
    missing += table[r][1];
    late += table[r][2];
    summary.scaled = summary.scaled || table[r][3] > 0;
    summary.alike = summary.alike && table[r][6] == said && table[r][7] == -said;
  }
  if (!summary.alike) return summary;
  if (late > 0) {  // on all ranks alike
    reduce_late();
    return summarize(norm, said);
  }
  summary.norm = norm ? *norm : std::sqrt(total + sum_of_varying_squares());
  summary.finite = std::isfinite(summary.norm);
  summary.present = agree_presence(missing > 0);
  return summary;
}

std::vector<bool> Updater::agree_presence(bool any_missing) {
  std::vector<bool> present(units_.count(), true);
  if (!any_missing) return present;
  for (const Ranks* ranks : units_.rank_sets()) {
    std::vector<ParamId> ids;
    for (const ParamId id : units_.trained_ids())
      if (&units_[id].unit->ranks == ranks) ids.push_back(id);
    if (ids.empty()) continue;
    at::Tensor seen = at::zeros({static_cast<int64_t>(ids.size())}, at::kInt);
    int* flags = seen.data_ptr<int>();
    for (size_t i = 0; i < ids.size(); ++i)
      flags[i] = units_[ids[i]].param->has_grad ? 1 : 0;
    ranks->agree(seen, comm::ReduceOp::Max, "parameters with gradients");
    for (size_t i = 0; i < ids.size(); ++i)
      present[ids[i]] = flags[i] != 0;
  }
  return present;
}

void Updater::gather_unit(Unit& unit) {
  if (!units_.states_are_cut(unit.ranks) || unit.flat->sharded() || unit.flat->shares()) return;
  const PhaseScope scope(units_.phases(), Phase::Gather, unit.name);
  unit.on_this_stream();
  gathers_.push_back(unit.ranks.shard->all_gather(unit.flat->whole(), unit.weights().tensor(),
                                                  "parameters of unit '" + unit.name + "'"));
}

void Updater::finish_gathers() {
  if (gathers_.empty()) return;
  const PhaseScope scope(units_.phases(), Phase::Gather);
  for (comm::Pending& p : std::exchange(gathers_, {}))
    p.wait();
}

void Updater::update_units(const GradientSummary& summary, double scale, RankGuard& disks) {
  units_.set_broken(kHalfDone);  // until it is over
  TilePipeline pipeline(units_, ways_, scale, disks, [this](Unit& unit) {
    gather_unit(unit);
    driver_.used_up(unit);
  });
  for (const auto& unit : units_.all())
    pipeline.add(*unit, unit->gradients(), summary.present);
  pipeline.finish();
}

void Updater::update_unit(Unit& unit, const at::Tensor& grads, const std::vector<bool>& present, double scale,
                          RankGuard& disks) {
  const c10::AutoGradMode no_grad(false);
  TilePipeline pipeline(units_, ways_, scale, disks, [](Unit&) {});
  pipeline.add(unit, shard::Buffer(grads), present);
  pipeline.finish();
  count_updates(unit, present);
}

void Updater::launch_gathers() {
  for (const auto& unit : units_.all())
    gather_unit(*unit);
}

void Updater::finish_gathers(RankGuard& disks) {
  finish_gathers();
  agree_on_disks(disks);
}

RankGuard Updater::guard() const {
  return RankGuard(!std::ranges::all_of(units_.all(), [](const auto& unit) { return lives_on_device(*unit); }));
}

// Where states or weights live on a disk, an update is over when they are there, on all ranks or on none.
void Updater::agree_on_disks(RankGuard& disks) {
  if (!disks.agrees()) return;
  for (const auto& unit : units_.all())
    disks.run_always([&] { unit->flush(); });
  units_.check_came_to_end(disks.agree(units_.ranks()));
}

void Updater::update(const GradientSummary& summary, double scale, const std::function<void()>& external) {
  units_.check_whole();
  const std::lock_guard lock(driver_.hooks().mutex());
  const c10::AutoGradMode no_grad(false);
  driver_.hooks().hear_news();
  units_.unsharder().settle_before_update();
  prepare_update();
  RankGuard disks = guard();
  if (units_.rule() == optim::Rule::External) {
    update_external(summary, scale, external, disks);
    launch_gathers();
  } else {
    update_units(summary, scale, disks);
  }
  finish_gathers();
  units_.shared().written("an update");
  agree_on_disks(disks);
  for (const auto& unit : units_.all())
    count_updates(*unit, summary.present);
  units_.set_broken("");
}

void Updater::prepare_update() {
  check_no_region_writes();
  // A client's optimizer has passes of its own, and many.
  adopt_params(units_, /*compare=*/units_.rule() == optim::Rule::External);
}

void Updater::count_updates(Unit& unit, const std::vector<bool>& present) {
  bool all = true;
  for (Param& p : unit.params) {
    if (present[p.id]) count_update(p);
    all = all && present[p.id];
  }
  if (all) unit.note_master();
}

void Updater::count_update(Param& param) {
  ++param.step;
  param.ahead = false;
  // As an in-place update by torch would: a graph kept over the step cannot be used again silently.
  param.tensor.unsafeGetTensorImpl()->bump_version();
  param.writes.forget_own(param.tensor);
}

// torch wants gradients in the dtype of what they update.
at::ScalarType Updater::client_dtype() const {
  return units_.options().precision.master_is_param() ? units_.options().precision.param : at::kFloat;
}

bool Updater::client_reads_gradients() const {
  return units_.rule() == optim::Rule::External && units_.options().precision.grad == client_dtype();
}

void Updater::scale_gradients(double scale) {
  if (scale == 1.0) return;
  for (const auto& unit : units_.all())
    shard::scaled_copy(unit->owned_grads(), unit->owned_grads(), scale);
}

void Updater::update_external(const GradientSummary& summary, double scale, const std::function<void()>& external,
                              RankGuard& disks) {
  TESSERA_CHECK_VALUE(external, "engine.step",
                      "this engine was built for a client's optimizer; step() needs its update");
  for (const auto& unit : units_.all()) {
    at::Tensor grads = unit->owned_grads();
    if (!client_reads_gradients()) {
      grads = at::empty({unit->owned.size()}, grads.options().dtype(client_dtype()));
      shard::scaled_copy(grads, unit->owned_grads(), scale);
    }
    unit->client_grads = grads;
  }
  for (const ParamId id : units_.trained_ids())
    units_[id].param->has_grad = summary.present[id];
  const auto forget = [&] {
    for (const auto& unit : units_.all())
      unit->client_grads.reset();
  };
  try {
    const NamedRange range("update", "by the client's optimizer");
    external();
  } catch (...) {
    forget();
    throw;
  }
  forget();
  units_.set_broken(kHalfDone);
  for (const auto& unit : units_.all())
    disks.run([&] { unit->refresh_weights(); });
}

void Updater::refresh_params() {
  const c10::AutoGradMode no_grad(false);
  units_.unsharder().settle_before_update();
  check_no_region_writes();
  adopt_params(units_, /*compare=*/false);
  units_.shared().readers_done("a refresh");
  RankGuard disks = guard();
  for (const auto& unit : units_.all()) {
    disks.run([&] { unit->refresh_weights(); });
    gather_unit(*unit);
  }
  finish_gathers();
  units_.shared().written("a refresh");
  agree_on_disks(disks);
}

// Shared parameters that are whole always: a region's private copies would undo what is written meanwhile.
void Updater::check_no_region_writes() const {
  if (!units_.shared().on()) return;
  for (ParamId id = 0; id < units_.count(); ++id) {
    const Place& place = units_[id];
    if (!place.held()) continue;
    TESSERA_CHECK(!place.flat->has_private_copy(place.item), "zero", "parameter '", place.name(),
                  "' is in use (inside GatheredParameters); leave that before it changes");
  }
}

}  // namespace tessera::zero
