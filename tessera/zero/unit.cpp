#include "tessera/zero/unit.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/shard/dtype.h"
#include "tessera/shard/part.h"
#include "tessera/shard/storage.h"
#include "tessera/zero/memory_for.h"

namespace tessera::zero {

namespace {

// Elements from which on a copy of a gradient costs more than a norm and an update of its own.
constexpr int64_t kAlone = 1 << 15;

bool may_move(GradState from, GradState to) {
  using enum GradState;
  if (to == Empty) return from != Reducing;
  switch (from) {
    case Empty:
      return to == Accumulating || to == Reduced;  // Reduced: gradients set by the user
    case Accumulating:
    case Late:
      return to == Late || to == Reducing || to == Reduced;  // Reduced at once where there is one rank
    case Reducing:
      return to == Reduced || to == Accumulating;
    case Reduced:
      return to == Accumulating;
  }
  return false;
}

// Where new values of `range` are made, on the device, to be stored.
at::Tensor place_for(const shard::Buffer& buffer, shard::Range range) {
  return buffer.is_here() ? buffer.view(range) : at::empty({range.size()}, buffer.options());
}

bool may_move(Turn from, Turn to) {
  using enum Turn;
  return to == Waiting || to == Launched || (to == Over && from != Launched);
}

}  // namespace

const char* grad_state_name(GradState state) {
  constexpr std::array names{"Empty", "Accumulating", "Late", "Reducing", "Reduced"};
  return names[static_cast<size_t>(state)];
}

Unit::Unit(std::string unit_name, std::vector<Param> unit_params, const Options& options,
           const shard::StagePlacements& placements, bool resident, const Ranks& unit_ranks, at::Tensor space,
           StatePlace states)
    : name(std::move(unit_name)),
      ranks(unit_ranks),
      params(std::move(unit_params)),
      options_(options),
      state_place_(states) {
  const int rank = ranks.shard->rank(), size = ranks.shard->size();
  using shard::Placement;
  std::vector<int64_t> numels;
  numels.reserve(params.size());
  for (const Param& p : params)
    numels.push_back(p.tensor.numel());
  layout = shard::Layout(numels, size);
  const bool sharded = placements.states == Placement::Shard;
  owned = sharded ? layout.shard(rank) : shard::Range{0, layout.size()};
  grads_visible_ = placements.grads == Placement::Replicate;
  in_grads_ = size == 1 || grads_visible_ || placements.reduce_at == shard::ReduceAt::Boundary;

  const auto on_device = params.front().tensor.options().requires_grad(false);
  const auto& policy = options.precision;
  using shard::Quantity;
  if (!options.update_in_backward) grads = shard::Buffer::without_memory(owned.size(), on_device.dtype(policy.grad));
  if (policy.master == amp::Master::Fp32) master = make(Quantity::Master, on_device.dtype(at::kFloat));
  if (policy.master == amp::Master::Split) residual = make(Quantity::Master, on_device.dtype(at::kShort));
  travel = policy.grad;
  std::vector<FlatParams::Item> items;
  for (int i = 0; i < layout.count(); ++i) {
    Param& p = params[i];
    p.range = layout.param(i);
    p.form = p.tensor;
    // From the cast weights: a step is that of a plain loop over the cast model.
    if (!master_is_weight()) set_master_from(p, p.tensor.detach().to(policy.param));
    items.push_back({p.name, p.tensor});
  }
  const bool partitions = placements.params == Placement::Shard;
  flat = std::make_unique<FlatParams>(name, std::move(items), policy.param, rank, size, partitions && !resident,
                                      std::move(space), options.weight_home);
  if (flat->sharded()) {
    launch_at_ = LaunchAt::Over;
  } else if (partitions && size > 1) {
    launch_at_ = LaunchAt::Flush;
  }
  for (Param& p : params)
    p.writes.forget(p.tensor);
  note_master();
}

at::TensorOptions Unit::grad_options() const {
  return flat->options().dtype(options_.precision.grad);
}

void Unit::move_to(GradState next) {
  TORCH_INTERNAL_ASSERT(may_move(grad_state_, next), "unit '", name, "': gradients cannot go from ",
                        grad_state_name(grad_state_), " to ", grad_state_name(next));
  grad_state_ = next;
  if (next != GradState::Empty) return;
  has_sum_ = false;
  sums = 0;
}

void Unit::move_to(Turn next) {
  TORCH_INTERNAL_ASSERT(may_move(turn_, next), "unit '", name, "': its calls are over after its launch");
  turn_ = next;
}

shard::Buffer Unit::make(shard::Quantity what, const at::TensorOptions& options) const {
  if (!options_.home || !state_place_.away) return {owned.size(), options};
  const bool pin = state_place_.by_device && options_.pin_memory;
  return {owned.size(), options, options_.home(what, owned.size(), options.pinned_memory(pin))};
}

shard::Buffer Unit::gradients() const {
  return grads.size() == owned.size() ? grads : shard::Buffer(grads.view(owned));
}

at::Tensor Unit::owned_grads() const {
  return gradients().tensor();
}

void Unit::send_grads_to_host() {
  host_grads = std::make_shared<HostGrads>(owned.size(), grad_options());
  grads = shard::Buffer(owned.size(), grad_options(), host_grads);
}

void Unit::make_grads(int64_t numel) {
  if (grads.size() != numel) {
    drop_grads();
    grads = shard::Buffer::without_memory(numel, grads.options());
  }
  memory_for([&] { grads.make(); }, "the gradients of unit '", name, "'");
}

void Unit::make_sums() {
  if (in_pieces()) return;
  make_grads(owned.size());
  grads.fill({0, owned.size()}, 0);
}

void Unit::lie_in_pieces() {
  bool open = false;
  for (Param& p : params) {
    const bool alone = p.range.size() >= kAlone;
    if (alone || !open) runs.push_back({p.range, alone, shard::Buffer()});
    runs.back().range.end = std::max(runs.back().range.end, p.range.end);
    p.run = static_cast<int>(runs.size()) - 1;
    open = !alone;
  }
  for (Run& run : runs)
    run.grad = shard::Buffer::without_memory(run.range.size(), grad_options());
}

void Unit::make_run(const Param& param) {
  Run& run = run_of(param);
  if (run.grad.has_memory()) return;
  memory_for([&] { run.grad.make(); }, "the gradients of unit '", name, "'");
  shard::fill_zero(run.grad.tensor());
}

void Unit::drop_run(Run& run) {
  if (!run.grad.has_memory()) return;
  on_this_stream();
  if (run.grad.is_here()) order.keep(run.grad.tensor());
  run.grad = shard::Buffer::without_memory(run.range.size(), grad_options());
}

std::pair<shard::Buffer, shard::Range> Unit::gradient(const Param& param, shard::Range range) const {
  if (!in_pieces()) return {gradients(), range};
  const Run& run = runs[param.run];
  if (range.empty()) return {run.grad, {}};
  return {run.grad, {range.begin - run.range.begin, range.end - run.range.begin}};
}

at::Tensor Unit::contribution(const Param& param) const {
  if (!in_pieces()) return partial.narrow(0, param.range.begin, param.range.size());
  return runs[param.run].grad.tensor().narrow(0, param.range.begin - runs[param.run].range.begin, param.range.size());
}

at::Tensor Unit::visible(const Param& param) const {
  if (!in_pieces()) return shard::view_as_param(grads.tensor(), param.range, param.form);
  const int64_t begin = param.range.begin - runs[param.run].range.begin;
  return shard::view_as_param(runs[param.run].grad.tensor(), {begin, begin + param.range.size()}, param.form);
}

std::vector<optim::Piece> Unit::pieces(shard::Range range) const {
  if (!in_pieces()) return {{0, gradients().fetch(range).wait()}};
  std::vector<optim::Piece> found;
  for (const Run& run : runs) {
    const shard::Range part = shard::intersect(run.range, range);
    if (part.empty() || !run.grad.has_memory()) continue;
    const shard::Range there{part.begin - run.range.begin, part.end - run.range.begin};
    found.push_back({part.begin - range.begin, shard::part_of(run.grad.tensor(), there)});
  }
  return found;
}

void Unit::drop_grads() {
  for (Run& run : runs)
    drop_run(run);
  if (!grads.has_memory() || !grads.is_here()) return;
  on_this_stream();
  order.keep(grads.tensor());
  grads = shard::Buffer::without_memory(owned.size(), grads.options());
}

shard::Buffer Unit::weights_to_write() {
  return owned == flat->slice() ? flat->slice_to_write() : weights();
}

at::Tensor Unit::owned_values(int item) const {
  return weights().read(owned_slice(params[item]));
}

shard::Range Unit::owned_slice(const Param& param) const {
  const shard::Range r = shard::intersect(param.range, owned);
  if (r.empty()) return {};
  return {r.begin - owned.begin, r.end - owned.begin};
}

void Unit::allocate_states(int count, const std::vector<optim::GroupOptions>& groups, optim::Rule rule) {
  for (int s = 0; s < count; ++s) {
    const auto what = s == 0 ? shard::Quantity::State0 : shard::Quantity::State1;
    states[s] = make(what, grad_options().dtype(options_.precision.state));
    for (const Param& p : params)  // they begin as zeros
      if (const double initial = optim::initial_state(rule, groups[p.group]); initial != 0) fill_state(s, p, initial);
  }
}

void Unit::fill_state(int state, const Param& param, double value) {
  states[state].fill(owned_slice(param), value);
}

bool Unit::adopts(const Param& param) const {
  return master.defined() && !flat->sharded() && !param.ahead && master_version() == known_master_;
}

void Unit::adopt_written(const Param& param) {
  if (!adopts(param)) return;
  for (const shard::Range tile : shard::tiles_of(owned_slice(param))) {
    const at::Tensor old = master.read(tile), written = weights().read(tile).to(old.device());
    adopt_tile(tile, old.to(written.scalar_type()) == written, written);
  }
}

void Unit::adopt_changed(const Param& param, const at::Tensor& before) {
  if (!master_is_weight()) adopt_changed(param, before, weights().read(owned_slice(param)));
}

void Unit::adopt_replaced(const Param& param, const at::Tensor& before) {
  const shard::Range mine = shard::intersect(param.range, owned);
  if (mine.empty()) return;
  const at::Tensor now = shard::flatten_like_param(param.tensor.detach(), param.form);
  adopt_changed(param, before, now.narrow(0, mine.begin - param.range.begin, mine.size()));
}

void Unit::adopt_changed(const Param& param, const at::Tensor& before, const at::Tensor& now) {
  const shard::Range range = owned_slice(param);
  for (const shard::Range tile : shard::tiles_of(range)) {
    const auto part = [&](const at::Tensor& all) { return all.narrow(0, tile.begin - range.begin, tile.size()); };
    adopt_tile(tile, part(now) == part(before), part(now));
  }
}

void Unit::adopt_beside_residual(Param& param) {
  const bool first = !param.known.defined();
  const at::Tensor known = first ? weights().read(owned_slice(param)).clone() : param.known;
  if (first) {
    set_master_from(param, param.tensor.detach());
  } else {
    adopt_changed(param, known);
  }
  param.known = known;
  param.unwritten = 0;
  note_weights(param);
}

void Unit::note_updated(const std::vector<bool>& present) {
  for (Param& p : params)
    if (present[p.id]) note_updated(p);
  if (std::ranges::all_of(params, [&](const Param& p) { return present[p.id]; })) note_master();
}

void Unit::note_updated(Param& param) {
  constexpr int64_t kFollowed = 100;
  if (!param.known.defined()) return;
  if (++param.unwritten > kFollowed) return param.known.reset();
  note_weights(param);
}

void Unit::follow(Param& param, std::optional<int64_t> unwritten) {
  if (!unwritten) return param.known.reset();
  if (!residual.defined() || flat->sharded()) return;
  if (!param.known.defined()) param.known = weights().read(owned_slice(param)).clone();
  param.unwritten = *unwritten;
}

void Unit::note_weights(Param& param) {
  param.known.copy_(weights().read(owned_slice(param)));
}

// Of a device nothing is waited for; what lives elsewhere is written where it must be.
void Unit::adopt_tile(shard::Range tile, const at::Tensor& same, const at::Tensor& now) {
  const shard::Buffer& kept = master.defined() ? master : residual;
  const at::Tensor old = kept.read(tile), stays = same.to(old.device());
  if (old.is_cpu() && stays.all().item<bool>()) return;
  if (residual.defined()) return residual.write(tile, at::where(stays, old, at::zeros_like(old)));
  write_master(tile, at::where(stays, old, now.to(old.device(), at::kFloat)));
}

void Unit::note_master() {
  if (master.defined()) known_master_ = master_version();
}

void Unit::set_master_from(const Param& param, const at::Tensor& values) {
  const shard::Range mine = shard::intersect(param.range, owned);
  if (mine.empty()) return;
  const shard::Range r{mine.begin - owned.begin, mine.end - owned.begin};
  const at::Tensor flat_values = shard::flatten_like_param(values, param.form);
  write_master(r, flat_values.narrow(0, mine.begin - param.range.begin, mine.size()));
}

at::Tensor Unit::read_master(shard::Range range) const {
  if (master.defined()) return master.read(range);
  at::Tensor values = weights().read(range);
  if (!residual.defined()) return values;
  at::Tensor joined = at::empty({range.size()}, values.options().dtype(at::kFloat));
  shard::join_master(joined, values, residual.read(range));
  return joined;
}

void Unit::write_master(shard::Range range, const at::Tensor& values) {
  if (master.defined()) {
    const bool known = master_version() == known_master_;
    master.write(range, values);
    if (known) note_master();
    return;
  }
  if (!residual.defined()) return weights_to_write().write(range, values);
  // Before there are flat parameters: their constructor makes the weights.
  const shard::Buffer to = flat ? weights_to_write() : shard::Buffer();
  for (const shard::Range tile : shard::tiles_of(range)) {
    const at::Tensor rest = place_for(residual, tile);
    const at::Tensor weight =
        flat ? place_for(to, tile) : at::empty({tile.size()}, residual.options().dtype(at::kBFloat16));
    const at::Tensor part = values.narrow(0, tile.begin - range.begin, tile.size());
    shard::split_master(weight, rest, part.to(rest.device(), at::kFloat).contiguous());
    residual.store(tile, rest);
    if (flat) to.store(tile, weight);
  }
}

void Unit::flush() const {
  for (const shard::Buffer* buffer : state_buffers())
    if (buffer->defined()) buffer->flush();
  flat->flush();
}

void Unit::drop_states() {
  let_go();
  partial.reset();
  host_grads.reset();
  runs.clear();
  for (shard::Buffer* buffer : {&grads, &master, &residual, &states[0], &states[1]})
    buffer->reset();
}

void Unit::let_go() noexcept {
  order.end(flat->options().device());
  order.keep(partial);
  for (const shard::Buffer* buffer : {&grads, &master, &residual, &states[0], &states[1]})
    if (buffer->has_memory() && buffer->is_here()) order.keep(buffer->tensor());
  for (const Run& run : runs)
    if (run.grad.has_memory() && run.grad.is_here()) order.keep(run.grad.tensor());
  if (flat->residence() == shard::Residence::Device) order.keep(weights().tensor());
}

void Unit::refresh_weights() {
  if (!master.defined()) return;
  const shard::Buffer to = weights_to_write();
  for (const shard::Range tile : shard::tiles_of({0, owned.size()})) {
    const at::Tensor weight = place_for(to, tile);
    shard::scaled_copy(weight, master.read(tile));
    to.store(tile, weight);
  }
  for (Param& p : params)
    p.ahead = false;
  note_master();
}

}  // namespace tessera::zero
