// ShardedModel: from reduced gradients to refreshed compute parameters.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <cmath>

#include "tessera/base/error.h"
#include "tessera/optim/norm.h"
#include "tessera/shard/device.h"
#include "tessera/shard/dtype.h"
#include "tessera/shard/storage.h"
#include "tessera/zero/sharded_model.h"

namespace tessera::zero {

namespace {

// Consecutive parameters of an owned range that share group and step count; gaps between them hold zeros.
struct Segment {
  shard::Range range;  // in the coordinates of the owned range
  int group = 0;
  int64_t step = 0;
  uint64_t first = 0;  // number of the first element in the model
};

// `each`: parameters are not joined, so that elements of a segment are numbered one after the other.
std::vector<Segment> segments_of(const Unit& unit, const std::vector<bool>& present, bool each) {
  std::vector<Segment> segments;
  bool open = false;
  for (const Param& p : unit.params) {
    const shard::Range mine = unit.owned_slice(p);
    if (mine.empty()) continue;
    if (!present[p.index]) {
      open = false;
      continue;
    }
    if (open && !each && segments.back().group == p.group && segments.back().step == p.step + 1) {
      segments.back().range.end = mine.end;
    } else {
      const int64_t skipped = unit.owned.begin + mine.begin - p.range.begin;
      segments.push_back({mine, p.group, p.step + 1, p.first + static_cast<uint64_t>(skipped)});
      open = true;
    }
  }
  return segments;
}

at::Tensor part(const at::Tensor& tensor, const shard::Range& range) {
  return tensor.defined() ? tensor.narrow(0, range.begin, range.size()) : at::Tensor();
}

}  // namespace

GradientSummary ShardedModel::summarize() {
  const int ranks = ranks_.shard->size(), me = ranks_.shard->rank();
  const bool sharded = placements_.states == shard::Placement::Shard;
  // One sum per slice and rank, added in rank order: the same bits whether a rank holds one slice or all.
  at::Tensor sums = at::zeros({ranks, 4}, at::kDouble);
  auto table = sums.accessor<double, 2>();  // rank: squares, parameters without a gradient, late gradients, scaled
  std::vector<at::Tensor> slices;
  std::vector<int> rank_of;
  for (const auto& unit : units_) {
    for (int r = 0; r < ranks; ++r) {
      if (sharded && r != me) continue;
      const shard::Range slice = unit->layout.shard(r);
      slices.push_back(unit->owned_grads().narrow(0, slice.begin - unit->owned.begin, slice.size()));
      rank_of.push_back(r);
    }
  }
  const std::vector<double> squares = optim::sums_of_squares(slices);
  for (size_t i = 0; i < squares.size(); ++i)
    table[rank_of[i]][0] += squares[i];
  for (const Slot& slot : slots_)
    table[me][1] += slot.param->has_grad ? 0 : 1;
  table[me][2] = reducer_->has_late() ? 1 : 0;
  table[me][3] = scaled_ ? 1 : 0;
  // Reduced gradients, and with them the squares, are the same in all replicas; the counts are of local gradients.
  ranks_.collect(sums, "gradient norm");

  GradientSummary summary;
  double total = 0, missing = 0, late = 0;
  for (int r = 0; r < ranks; ++r) {
    total += table[r][0];
    missing += table[r][1];
    late += table[r][2];
    summary.scaled = summary.scaled || table[r][3] > 0;
  }
  if (late > 0) {  // on all ranks alike
    reducer_->reduce_late();
    reduce_replicas();
    return summarize();
  }
  summary.norm = std::sqrt(total);
  summary.finite = std::isfinite(total);
  summary.present = agree_presence(static_cast<int64_t>(missing));
  return summary;
}

std::vector<bool> ShardedModel::agree_presence(int64_t missing_anywhere) {
  std::vector<bool> present(slots_.size(), true);
  if (missing_anywhere == 0) return present;
  at::Tensor seen = at::zeros({static_cast<int64_t>(slots_.size())}, at::kInt);
  int* flags = seen.data_ptr<int>();
  for (size_t i = 0; i < slots_.size(); ++i)
    flags[i] = slots_[i].param->has_grad ? 1 : 0;
  ranks_.agree(seen, comm::ReduceOp::Max, "parameters with gradients");
  for (size_t i = 0; i < slots_.size(); ++i)
    present[i] = flags[i] != 0;
  return present;
}

void ShardedModel::gather_unit(Unit& unit, std::vector<comm::Pending>& pending) {
  if (placements_.states == shard::Placement::Replicate || ranks_.shard->size() == 1) return;
  if (unit.flat->sharded() || unit.flat->shares()) return;
  pending.push_back(
      ranks_.shard->all_gather(unit.flat->whole(), unit.owned_weights(), "parameters of unit '" + unit.name + "'"));
}

void ShardedModel::update_unit(Unit& unit, const GradientSummary& summary, double scale) {
  const at::Tensor all = unit.owned_weights(), grads = unit.owned_grads();
  const bool fp32_weights = all.scalar_type() == at::kFloat;  // then they are the master
  const at::Tensor master = fp32_weights ? all : unit.master;
  const at::Tensor weights = fp32_weights ? at::Tensor() : all;
  for (const Segment& s : segments_of(unit, summary.present, options_.precision.update_is_random())) {
    optim::UpdateSlice slice;
    slice.master = part(master, s.range);
    slice.residual = part(unit.residual, s.range);
    slice.weight = part(weights, s.range);
    slice.grad = part(grads, s.range);
    for (size_t i = 0; i < unit.states.size(); ++i)
      slice.state[i] = part(unit.states[i], s.range);
    slice.rounding = options_.precision.rounding;
    slice.random = {options_.seed, static_cast<uint64_t>(s.step), s.first};
    optim::update(rule_, groups_[s.group], s.step, slice, scale);
  }
}

void ShardedModel::update(const GradientSummary& summary, double scale, const std::function<void()>& external) {
  const std::lock_guard lock(hooks_.mutex());
  const c10::AutoGradMode no_grad(false);
  hooks_.hear_news();
  unsharder_->settle_before_update();
  check_no_region_writes();
  adopt_params(/*compare=*/false);
  std::vector<comm::Pending> pending;
  if (rule_ == optim::Rule::External) update_external(summary, scale, external);
  for (const auto& unit : units_) {
    if (rule_ != optim::Rule::External) update_unit(*unit, summary, scale);
    gather_unit(*unit, pending);
  }
  for (comm::Pending& p : pending)
    p.wait();
  shared_.written("an update");
  for (const Slot& slot : slots_) {
    Param& p = *slot.param;
    if (!summary.present[p.index]) continue;
    ++p.step;
    // As an in-place update by torch would: a graph kept over the step cannot be used again silently.
    p.tensor.unsafeGetTensorImpl()->bump_version();
    p.version = p.tensor._version();
  }
}

// torch wants gradients in the dtype of what they update.
at::ScalarType ShardedModel::client_dtype() const {
  return options_.precision.master_is_param() ? options_.precision.param : at::kFloat;
}

bool ShardedModel::client_reads_gradients() const {
  return rule_ == optim::Rule::External && options_.precision.grad == client_dtype();
}

void ShardedModel::scale_gradients(double scale) {
  if (scale == 1.0) return;
  for (const auto& unit : units_)
    shard::scaled_copy(unit->owned_grads(), unit->owned_grads(), scale);
}

void ShardedModel::update_external(const GradientSummary& summary, double scale,
                                   const std::function<void()>& external) {
  TESSERA_CHECK_VALUE(external, "engine.step",
                      "this engine was built for a client's optimizer; step() needs its update");
  for (const auto& unit : units_) {
    at::Tensor grads = unit->owned_grads();
    if (!client_reads_gradients()) {
      grads = at::empty({unit->owned.size()}, grads.options().dtype(client_dtype()));
      shard::scaled_copy(grads, unit->owned_grads(), scale);
    }
    external_grads_.push_back(grads);
  }
  for (const Slot& slot : slots_)
    slot.param->has_grad = summary.present[slot.param->index];
  try {
    external();
  } catch (...) {
    external_grads_.clear();
    throw;
  }
  external_grads_.clear();
  for (const auto& unit : units_)
    unit->refresh_weights();
}

void ShardedModel::refresh_params() {
  const c10::AutoGradMode no_grad(false);
  unsharder_->settle_before_update();
  check_no_region_writes();
  adopt_params(/*compare=*/false);
  shared_.readers_done("a refresh");
  std::vector<comm::Pending> pending;
  for (const auto& unit : units_) {
    unit->refresh_weights();
    gather_unit(*unit, pending);
  }
  for (comm::Pending& p : pending)
    p.wait();
  shared_.written("a refresh");
}

// Shared parameters that are whole always: a region's private copies would undo what is written meanwhile.
void ShardedModel::check_no_region_writes() const {
  if (!shared_.on()) return;
  for (const Place& place : places_) {
    TESSERA_CHECK(!place.flat->is_lent(place.item), "zero", "parameter '", place.flat->items()[place.item].name,
                  "' is in use (inside GatheredParameters); leave that before it changes");
  }
}

bool ShardedModel::is_bound(const Param& param, const Unit& unit) {
  return shard::is_bound(param.tensor, unit.flat->whole(), param.range, param.form);
}

void ShardedModel::adopt_param(const Slot& slot, bool compare) {
  const c10::AutoGradMode no_grad(false);
  Param& p = *slot.param;
  Unit& unit = *slot.unit;
  // Written to in regions only, which take the values along.
  if (unit.flat->sharded() || unit.flat->is_lent(places_[p.index].item)) return;
  const at::Tensor& weights = unit.flat->whole();
  const bool bound = is_bound(p, unit);
  if (bound && p.tensor._version() == p.version && !(compare && unit.differs_from_master(p))) return;
  TESSERA_CHECK(p.tensor.sizes() == p.form.sizes && p.tensor.scalar_type() == weights.scalar_type(), "engine",
                "parameter '", p.name, "' became a tensor of shape ", p.tensor.sizes(), " and dtype ",
                p.tensor.scalar_type(), "; build a new engine for a changed model");
  TESSERA_CHECK(
      bound || !unit.flat->shares(), "zero", "the data of parameter '", p.name,
      "' was replaced (p.data = ..., module.to(...)), but all ranks share it (tessera.shared_parameters); write "
      "to it inside GatheredParameters(..., modifier_rank=0) instead");
  bool changed = true;
  if (!bound) {
    shard::check_device(p.tensor.device());
    const at::Tensor mine = shard::view_as_param(weights, p.range, p.form);
    changed = !mine.equal(p.tensor.detach());  // a conversion there and back leaves the master its bits
    if (changed) mine.copy_(p.tensor.detach());
  }
  if (changed && !unit.master_is_weight()) unit.set_master_from(p, p.tensor.detach());
  if (!bound) shard::bind(p.tensor, weights, p.range, p.form);
  p.version = p.tensor._version();
}

void ShardedModel::adopt_params(bool compare) {
  for (const Slot& slot : slots_)
    adopt_param(slot, compare);
}

}  // namespace tessera::zero
