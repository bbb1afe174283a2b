#include "tessera/zero/updater.h"

#include <ATen/ops/empty.h>
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

// Consecutive parameters of an owned range that share group and step count; gaps between them hold zeros.
struct Segment {
  shard::Range range;  // in the coordinates of the owned range
  int group = 0;
  int64_t step = 0;
  uint64_t first = 0;  // number of the first element in the model, where it matters
};

// `numbered`: the elements of a segment are those of the whole model from `first` on, one after the other.
std::vector<Segment> segments_of(const Unit& unit, const std::vector<bool>& present, bool numbered) {
  std::vector<Segment> segments;
  bool open = false;
  for (const Param& p : unit.params) {
    const shard::Range mine = unit.owned_slice(p);
    if (mine.empty()) continue;
    if (!present[p.id]) {
      open = false;
    } else if (numbered) {
      const int64_t skipped = unit.owned.begin + mine.begin - p.range.begin;
      shard::for_stretches(p.cut, {skipped, skipped + mine.size()}, [&](shard::Range r, int64_t number) {
        const int64_t begin = mine.begin + r.begin - skipped;
        segments.push_back({{begin, begin + r.size()}, p.group, p.step + 1, p.first + static_cast<uint64_t>(number)});
      });
    } else if (open && segments.back().group == p.group && segments.back().step == p.step + 1) {
      segments.back().range.end = mine.end;
    } else {
      segments.push_back({mine, p.group, p.step + 1});
      open = true;
    }
  }
  return segments;
}

at::Tensor part(const at::Tensor& tensor, const shard::Range& range) {
  return tensor.defined() ? tensor.narrow(0, range.begin, range.size()) : at::Tensor();
}

// `segments` cut at multiples of kTile.
std::vector<Segment> in_tiles(const std::vector<Segment>& segments) {
  std::vector<Segment> pieces;
  for (const Segment& s : segments) {
    for (int64_t begin = s.range.begin; begin < s.range.end;) {
      Segment piece = s;
      piece.range = {begin, std::min((begin / kTile + 1) * kTile, s.range.end)};
      piece.first += static_cast<uint64_t>(begin - s.range.begin);
      pieces.push_back(piece);
      begin = piece.range.end;
    }
  }
  return pieces;
}

// A piece of a unit's update: its buffers' values on their way to the device, and back.
class Tile {
 public:
  // `range`: of the owned range. `last`: of its unit.
  Tile(Unit& unit, shard::Range range, std::vector<Segment> segments, bool last)
      : unit_(&unit), range_(range), segments_(std::move(segments)), last_(last) {
    for (const shard::Buffer* buffer : buffers())
      views_.push_back(buffer->defined() ? std::optional(buffer->fetch(range)) : std::nullopt);
  }

  void update(optim::Rule rule, const std::vector<optim::GroupOptions>& groups, const Options& options, double scale) {
    for (const Segment& segment : segments_)
      update(segment, rule, groups[segment.group], options, scale);
    for (size_t i = 0; i < views_.size(); ++i)
      if (views_[i]) buffers()[i]->store(range_, views_[i]->wait());
  }

  Unit& unit() const { return *unit_; }
  bool is_last() const { return last_; }

 private:
  std::array<const shard::Buffer*, 4> buffers() const { return unit_->state_buffers(); }
  at::Tensor arrived(size_t buffer, shard::Range range) {
    if (!views_[buffer]) return {};
    return views_[buffer]->wait().narrow(0, range.begin - range_.begin, range.size());
  }
  void update(const Segment& segment, optim::Rule rule, const optim::GroupOptions& group, const Options& options,
              double scale) {
    const at::Tensor weights = part(unit_->owned_weights(), segment.range);
    const bool fp32_weights = weights.scalar_type() == at::kFloat;  // then they are the master
    optim::UpdateSlice slice;
    slice.master = fp32_weights ? weights : arrived(0, segment.range);
    if (!fp32_weights) slice.weight = weights;
    slice.residual = arrived(1, segment.range);
    slice.grad = part(unit_->owned_grads(), segment.range);
    slice.state = {arrived(2, segment.range), arrived(3, segment.range)};
    slice.rounding = options.precision.rounding;
    slice.random = {options.seed, static_cast<uint64_t>(segment.step), segment.first};
    optim::update(rule, group, segment.step, slice, scale);
  }

  Unit* unit_;
  shard::Range range_;
  std::vector<Segment> segments_;
  bool last_;
  std::vector<std::optional<shard::PendingView>> views_;
};

// The gradients of `slice` (in the coordinates of the flat space, and owned here), without those of some parameters.
void add_pieces(std::vector<at::Tensor>& pieces, const Unit& unit, shard::Range slice,
                const std::vector<ParamId>& without) {
  const auto add = [&](int64_t begin, int64_t end) {
    if (begin < end) pieces.push_back(unit.owned_grads().narrow(0, begin - unit.owned.begin, end - begin));
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

bool lives_on_device(const Unit& unit) {
  return std::ranges::all_of(unit.state_buffers(), [](const shard::Buffer* b) {
    return !b->defined() || b->residence() == shard::Residence::Device;
  });
}

}  // namespace

Updater::Updater(Units& units, BackwardDriver& driver) : units_(units), driver_(driver) {}

// Squares of the gradients of units that all ranks share: one sum per slice and rank, added in rank order, so that the bits
// are the same whether a rank holds one slice or all. `rows`: a row for each rank of the shard group, the first column.
void Updater::add_squares(at::TensorAccessor<double, 2> rows, const std::vector<ParamId>& without) const {
  const Ranks& ranks = units_.ranks();
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
  for (const auto& unit : units_.all()) {
    const Ranks& ranks = unit->ranks;
    if (&ranks == &units_.ranks() || ranks.replicate->rank() > 0) continue;
    if (!ranks.varies_along_model && ranks.model->rank() > 0) continue;
    if (!units_.states_are_cut(ranks) && ranks.shard->rank() > 0) continue;
    add_pieces(slices, *unit, unit->owned, without);
  }
  double sum = 0;
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

double Updater::norm_contribution(const std::vector<ParamId>& without) {
  for (const ParamId id : without)
    units_.trained(id, "norm_contribution");
  const Ranks& ranks = units_.ranks();
  const at::Tensor late = at::full({1}, driver_.reducer().has_late() ? 1.0 : 0.0, at::kDouble);
  ranks.agree(late, comm::ReduceOp::Max, "late gradients");
  if (late.item<double>() > 0) reduce_late();
  const double own = varying_squares(without);
  if (ranks.replicate->rank() > 0 || ranks.model->rank() > 0) return own;
  const at::Tensor rows = at::zeros({ranks.shard->size(), 1}, at::kDouble);
  auto squares = rows.accessor<double, 2>();
  add_squares(squares, without);
  return squares[ranks.shard->rank()][0] + own;
}

GradientSummary Updater::summarize(std::optional<double> norm) {
  const int ranks = units_.ranks().shard->size(), me = units_.ranks().shard->rank();
  at::Tensor sums = at::zeros({ranks, 6}, at::kDouble);
  // rank: squares, parameters without a gradient, late gradients, scaled, largest and least given norm
  auto table = sums.accessor<double, 2>();
  if (!norm) add_squares(table);
  table[me][4] = given_norm(norm);
  table[me][5] = -given_norm(norm);
  for (const ParamId id : units_.trained_ids())
    table[me][1] += units_[id].param->has_grad ? 0 : 1;
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
  }
  if (late > 0) {  // on all ranks alike
    reduce_late();
    return summarize(norm);
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

void Updater::gather_unit(Unit& unit, std::vector<comm::Pending>& pending) {
  if (!units_.states_are_cut(unit.ranks) || unit.flat->sharded() || unit.flat->shares()) return;
  pending.push_back(
      unit.ranks.shard->all_gather(unit.flat->whole(), unit.owned_weights(), "parameters of unit '" + unit.name + "'"));
}

// A pipeline: the next tile is on its way to the device and the last one on its way back while one is updated. Where the
// states live on the device a unit is one tile, and nothing is on its way.
void Updater::update_units(const GradientSummary& summary, double scale, std::vector<comm::Pending>& pending) {
  const bool numbered = units_.options().precision.update_is_random();
  std::optional<Tile> next;
  std::string failure;  // of a disk; the collectives go on, or the other ranks would wait
  const auto guarded = [&](const auto& work) {
    try {
      if (failure.empty()) work();
    } catch (const IoError& error) {
      failure = error.what_without_backtrace();
    }
  };
  const auto finish = [&] {
    if (!next) return;
    guarded([&] { next->update(units_.rule(), units_.groups(), units_.options(), scale); });
    if (next->is_last()) gather_unit(next->unit(), pending);
    next.reset();
  };
  const auto add = [&](Unit& unit, shard::Range range, std::vector<Segment> segments, bool last) {
    std::optional<Tile> tile;
    guarded([&] { tile.emplace(unit, range, std::move(segments), last); });
    finish();
    if (tile) {
      next = std::move(tile);
    } else if (last) {
      gather_unit(unit, pending);
    }
  };
  for (const auto& unit : units_.all()) {
    std::vector<Segment> segments = segments_of(*unit, summary.present, numbered);
    if (lives_on_device(*unit)) {
      add(*unit, {0, unit->owned.size()}, std::move(segments), true);
      continue;
    }
    segments = in_tiles(segments);
    if (segments.empty()) {
      finish();
      gather_unit(*unit, pending);
    }
    for (auto begin = segments.begin(); begin != segments.end();) {
      const int64_t number = begin->range.begin / kTile;
      const auto end =
          std::find_if(begin, segments.end(), [&](const Segment& s) { return s.range.begin / kTile > number; });
      add(*unit, {number * kTile, std::min((number + 1) * kTile, unit->owned.size())}, {begin, end},
          end == segments.end());
      begin = end;
    }
  }
  finish();
  guarded([&] {
    for (const auto& unit : units_.all())
      for (const shard::Buffer* buffer : unit->state_buffers())
        if (buffer->defined()) buffer->flush();
  });
  agree_on_disks(failure);
}

// Where states live on a disk, an update is over when they are there, on all ranks or on none.
void Updater::agree_on_disks(const std::string& failure) {
  if (std::ranges::all_of(units_.all(), [](const auto& unit) { return lives_on_device(*unit); })) return;
  at::Tensor failed = at::zeros({1}, at::kDouble);
  if (!failure.empty()) failed[0] = units_.ranks().place() + 1;
  units_.ranks().agree(failed, comm::ReduceOp::Max, "state of the disks");
  const int who = static_cast<int>(failed.item<double>());
  if (who == 0) return;
  failure_ = failure.empty()
                 ? c10::str("rank ", who - 1, " of this engine could not move its model states; see its error")
                 : failure;
  check_disks();
}

void Updater::check_disks() const {
  TESSERA_CHECK_IO(
      failure_.empty(), "engine.step",
      "the last update did not come to its end, weights and states do not belong together: build a new engine "
      "and load a checkpoint (",
      failure_, ")");
}

void Updater::update(const GradientSummary& summary, double scale, const std::function<void()>& external) {
  check_disks();
  const std::lock_guard lock(driver_.hooks().mutex());
  const c10::AutoGradMode no_grad(false);
  driver_.hooks().hear_news();
  units_.unsharder().settle_before_update();
  check_no_region_writes();
  adopt_params(units_, /*compare=*/false);
  std::vector<comm::Pending> pending;
  if (units_.rule() == optim::Rule::External) {
    update_external(summary, scale, external);
    for (const auto& unit : units_.all())
      gather_unit(*unit, pending);
  } else {
    update_units(summary, scale, pending);
  }
  for (comm::Pending& p : pending)
    p.wait();
  units_.shared().written("an update");
  for (const ParamId id : units_.trained_ids()) {
    Param& p = *units_[id].param;
    if (!summary.present[p.id]) continue;
    ++p.step;
    // As an in-place update by torch would: a graph kept over the step cannot be used again silently.
    p.tensor.unsafeGetTensorImpl()->bump_version();
    p.version = p.tensor._version();
  }
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

void Updater::update_external(const GradientSummary& summary, double scale, const std::function<void()>& external) {
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
    external();
  } catch (...) {
    forget();
    throw;
  }
  forget();
  for (const auto& unit : units_.all())
    unit->refresh_weights();
}

void Updater::refresh_params() {
  const c10::AutoGradMode no_grad(false);
  units_.unsharder().settle_before_update();
  check_no_region_writes();
  adopt_params(units_, /*compare=*/false);
  units_.shared().readers_done("a refresh");
  std::vector<comm::Pending> pending;
  for (const auto& unit : units_.all()) {
    unit->refresh_weights();
    gather_unit(*unit, pending);
  }
  for (comm::Pending& p : pending)
    p.wait();
  units_.shared().written("a refresh");
}

// Shared parameters that are whole always: a region's private copies would undo what is written meanwhile.
void Updater::check_no_region_writes() const {
  if (!units_.shared().on()) return;
  for (ParamId id = 0; id < units_.count(); ++id) {
    const Place& place = units_[id];
    if (!place.held()) continue;
    TESSERA_CHECK(!place.flat->is_lent(place.item), "zero", "parameter '", place.name(),
                  "' is in use (inside GatheredParameters); leave that before it changes");
  }
}

}  // namespace tessera::zero
