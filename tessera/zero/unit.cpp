#include "tessera/zero/unit.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

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

}  // namespace

Unit::Unit(std::string name, std::vector<Param> params, const Options& options,
           const shard::StagePlacements& placements, bool resident, const Ranks& ranks, at::Tensor space,
           StateResidence states)
    : name_(std::move(name)), ranks_(ranks), params_(std::move(params)), options_(options), state_residence_(states) {
  const int rank = ranks_.shard->rank(), size = ranks_.shard->size();
  using shard::Placement;
  std::vector<int64_t> numels;
  numels.reserve(params_.size());
  for (const Param& p : params_)
    numels.push_back(p.tensor.numel());
  layout_ = shard::Layout(numels, size);
  const bool sharded = placements.states == Placement::Shard;
  owned_ = sharded ? layout_.shard(rank) : shard::Range{0, layout_.size()};
  grads_visible_ = placements.grads == Placement::Replicate;
  in_grads_ = size == 1 || grads_visible_ || placements.reduce_at == shard::ReduceAt::Boundary;

  const auto on_device = params_.front().tensor.options().requires_grad(false);
  const auto& policy = options.precision;
  using shard::Quantity;
  if (!options.update_in_backward) grads_ = shard::Buffer::without_memory(owned_.size(), on_device.dtype(policy.grad));
  if (policy.master == amp::Master::Fp32) master_ = make(Quantity::Master, on_device.dtype(at::kFloat));
  if (policy.master == amp::Master::Split) residual_ = make(Quantity::Master, on_device.dtype(at::kShort));
  travel_ = policy.grad;
  std::vector<FlatParams::Item> items;
  for (int i = 0; i < layout_.count(); ++i) {
    Param& p = params_[i];
    p.item = i;
    p.range = layout_.param(i);
    p.form = p.tensor;
    // Masters start from the cast weights: a step is that of a plain loop over the cast model.
    if (!master_is_weight()) set_master_from(p, p.tensor.detach().to(policy.param));
    items.push_back({p.name, p.tensor});
  }
  const bool partitions = placements.params == Placement::Shard;
  flat_ = std::make_unique<FlatParams>(name_, std::move(items), policy.param, rank, size, partitions && !resident,
                                       std::move(space), options.weight_home);
  if (flat_->sharded()) {
    launch_at_ = LaunchAt::Over;
  } else if (partitions && size > 1) {
    launch_at_ = LaunchAt::Flush;
  }
  for (Param& p : params_)
    p.writes.forget(p.tensor);
  note_master();
}

at::TensorOptions Unit::grad_options() const {
  return flat_->options().dtype(options_.precision.grad);
}

void Unit::begin_backward() {
  const auto trains = [](const Param& p) { return p.tensor.requires_grad(); };
  progress_.begin_backward(static_cast<int>(std::ranges::count_if(params_, trains)));
}

void Unit::accumulate_in(at::Tensor memory, bool pooled) {
  partial_ = std::move(memory);
  progress_.accumulate(pooled);
  if (ranks_.size() == 1 && has_sum()) return;  // contributions go on in the sum
  for (Param& p : params_)
    progress_.empty(p.grad);
}

at::Tensor Unit::launch() {
  progress_.launch();
  return give_partial();
}

at::Tensor Unit::launch_alone() {
  progress_.launch_alone();
  return give_partial();
}

void Unit::end_grads() {
  progress_.end();
  for (Param& p : params_)
    progress_.end(p.grad);
}

// Of a parameter without elements there is no memory, and no backward that a unit of such ones would be in.
void Unit::restore_grad(const Param& param, bool has, bool filled, uint64_t additions) {
  if (param.range.empty() && progress_.state() == GradState::Empty) return;
  progress_.restore(own(param).grad, has, filled, additions);
}

std::vector<const shard::Buffer*> Unit::grad_buffers() const {
  std::vector<const shard::Buffer*> all{&grads_};
  for (const Run& run : runs_)
    all.push_back(&run.grad);
  return all;
}

void Unit::drop_squares() {
  order_.keep(squares_);
  squares_.reset();
}

shard::Buffer Unit::make(shard::Quantity what, const at::TensorOptions& options) const {
  if (!options_.home || !state_residence_.away) return {owned_.size(), options};
  const bool pin = state_residence_.by_device && options_.pin_memory;
  return {owned_.size(), options, options_.home(what, owned_.size(), options.pinned_memory(pin))};
}

shard::Buffer Unit::gradients() const {
  return grads_.size() == owned_.size() ? grads_ : shard::Buffer(grads_.view(owned_));
}

at::Tensor Unit::owned_grads() const {
  return gradients().tensor();
}

void Unit::send_grads_to_host() {
  host_grads_ = std::make_shared<HostGrads>(owned_.size(), grad_options());
  grads_ = shard::Buffer(owned_.size(), grad_options(), host_grads_);
}

void Unit::make_grads(int64_t numel) {
  if (grads_.size() != numel) {
    drop_grads();
    grads_ = shard::Buffer::without_memory(numel, grads_.options());
  }
  memory_for([&] { grads_.make(); }, "the gradients of unit '", name_, "'");
}

// In pieces there is nothing to make.
void Unit::put_sums() {
  if (!in_pieces()) {
    make_grads(owned_.size());
    grads_.fill({0, owned_.size()}, 0);
  }
  progress_.put_sums();
}

void Unit::lie_in_pieces() {
  bool open = false;
  for (Param& p : params_) {
    const bool alone = p.range.size() >= kAlone;
    if (alone || !open) runs_.push_back({p.range, alone, shard::Buffer()});
    runs_.back().range.end = std::max(runs_.back().range.end, p.range.end);
    p.run = static_cast<int>(runs_.size()) - 1;
    open = !alone;
  }
  for (Run& run : runs_)
    run.grad = shard::Buffer::without_memory(run.range.size(), grad_options());
}

void Unit::make_run(const Param& param) {
  if (has_slot(param)) return;
  make_slot(param);
  shard::fill_zero(runs_[param.run].grad.tensor());
}

void Unit::make_slot(const Param& param) {
  if (has_slot(param)) return;
  Run& run = runs_[param.run];
  memory_for([&] { run.grad.make(); }, "the gradients of unit '", name_, "'");
  for (const shard::Range& gap : layout_.padding())
    if (const shard::Range r = shard::intersect(gap, run.range); !r.empty())
      shard::fill_zero(shard::part_of(run.grad.tensor(), {r.begin - run.range.begin, r.end - run.range.begin}));
}

shard::Memory Unit::slot(const Param& param) const {
  if (!in_pieces()) return shard::memory_of(partial_, param.range.begin);
  const Run& run = runs_[param.run];
  return shard::memory_of(run.grad.tensor(), param.range.begin - run.range.begin);
}

void Unit::keep_row(const Param& param, at::Tensor row) {
  Run& run = runs_[param.run];
  drop_run(run);
  run.grad = shard::Buffer(std::move(row));
}

void Unit::drop_run(Run& run) {
  if (!run.grad.has_memory()) return;
  on_this_stream();
  if (run.grad.is_here()) order_.keep(run.grad.tensor());
  run.grad = shard::Buffer::without_memory(run.range.size(), grad_options());
}

std::pair<shard::Buffer, shard::Range> Unit::gradient(const Param& param, shard::Range range) const {
  if (!in_pieces()) return {gradients(), range};
  const Run& run = runs_[param.run];
  if (range.empty()) return {run.grad, {}};
  return {run.grad, {range.begin - run.range.begin, range.end - run.range.begin}};
}

at::Tensor Unit::contribution(const Param& param) const {
  if (!in_pieces()) return partial_.narrow(0, param.range.begin, param.range.size());
  return runs_[param.run].grad.tensor().narrow(0, param.range.begin - runs_[param.run].range.begin, param.range.size());
}

at::Tensor Unit::visible(const Param& param) const {
  if (!in_pieces()) return shard::view_as_param(grads_.tensor(), param.range, param.form);
  const int64_t begin = param.range.begin - runs_[param.run].range.begin;
  return shard::view_as_param(runs_[param.run].grad.tensor(), {begin, begin + param.range.size()}, param.form);
}

std::vector<optim::Piece> Unit::pieces(shard::Range range) const {
  if (!in_pieces()) return {{0, gradients().fetch(range).wait()}};
  std::vector<optim::Piece> found;
  for (const Run& run : runs_) {
    const shard::Range part = shard::intersect(run.range, range);
    if (part.empty() || !run.grad.has_memory()) continue;
    const shard::Range there{part.begin - run.range.begin, part.end - run.range.begin};
    found.push_back({part.begin - range.begin, shard::part_of(run.grad.tensor(), there)});
  }
  return found;
}

void Unit::drop_grads() {
  for (Run& run : runs_)
    drop_run(run);
  if (!grads_.has_memory() || !grads_.is_here()) return;
  on_this_stream();
  order_.keep(grads_.tensor());
  grads_ = shard::Buffer::without_memory(owned_.size(), grads_.options());
}

shard::Buffer Unit::weights_to_write() {
  return owned_ == flat_->slice() ? flat_->slice_to_write() : weights();
}

at::Tensor Unit::owned_values(int item) const {
  return weights().read(owned_slice(params_[item]));
}

shard::Range Unit::owned_slice(const Param& param) const {
  const shard::Range r = shard::intersect(param.range, owned_);
  if (r.empty()) return {};
  return {r.begin - owned_.begin, r.end - owned_.begin};
}

void Unit::allocate_states(int count, const std::vector<optim::GroupOptions>& groups, optim::Rule rule) {
  for (int s = 0; s < count; ++s) {
    const auto what = s == 0 ? shard::Quantity::State0 : shard::Quantity::State1;
    states_[s] = make(what, grad_options().dtype(options_.precision.state));
    for (const Param& p : params_)  // states begin as zeros
      if (const double initial = optim::initial_state(rule, groups[p.group]); initial != 0) fill_state(s, p, initial);
  }
}

void Unit::fill_state(int state, const Param& param, double value) {
  states_[state].fill(owned_slice(param), value);
}

void Unit::flush() const {
  for (const shard::Buffer* buffer : state_buffers())
    if (buffer->defined()) buffer->flush();
  flat_->flush();
}

std::vector<shard::Buffer*> Unit::sendable() {
  std::vector<shard::Buffer*> all{&master_, &residual_, &states_[0], &states_[1], &grads_};
  for (Run& run : runs_)
    all.push_back(&run.grad);
  return all;
}

void Unit::send(StateKind kind, const HomeMaker& home) {
  on_this_stream();
  const auto send = [&](shard::Buffer& buffer, shard::Quantity what) {
    if (buffer.defined() && buffer.is_here()) buffer.send_to(home(what, buffer.size(), buffer.options()));
  };
  if (kind == StateKind::OptimizerStates) {
    send(states_[0], shard::Quantity::State0);
    send(states_[1], shard::Quantity::State1);
  } else if (kind == StateKind::Masters) {
    send(master_, shard::Quantity::Master);
    send(residual_, shard::Quantity::Master);
  } else if (kind == StateKind::Weights) {
    flat_->send(home);
  } else if (kind == StateKind::Gradients) {
    send(grads_, shard::Quantity::Gradient);
    for (Run& run : runs_)
      send(run.grad, shard::Quantity::Gradient);
    if (partial_.defined() && !grads_.is_here()) {
      partial_.reset();
      partial_is_sent_ = true;
    }
  }
}

void Unit::bring_back() {
  for (shard::Buffer* buffer : sendable())
    memory_for([&] { buffer->bring_back(); }, "the states of unit '", name_, "', which come back");
  note_master();
  if (std::exchange(partial_is_sent_, false)) partial_ = grads_.tensor();
}

bool Unit::is_sent() const {
  const auto sent = [](const shard::Buffer* buffer) { return buffer->is_sent(); };
  return std::ranges::any_of(state_buffers(), sent) || std::ranges::any_of(grad_buffers(), sent) || flat_->is_sent();
}

void Unit::drop_states() {
  let_go();
  partial_.reset();
  host_grads_.reset();
  runs_.clear();
  for (shard::Buffer* buffer : {&grads_, &master_, &residual_, &states_[0], &states_[1]})
    buffer->reset();
}

void Unit::let_go() noexcept {
  order_.end(flat_->options().device());
  order_.keep(partial_);
  for (const shard::Buffer* buffer : {&grads_, &master_, &residual_, &states_[0], &states_[1]})
    if (buffer->has_memory() && buffer->is_here()) order_.keep(buffer->tensor());
  for (const Run& run : runs_)
    if (run.grad.has_memory() && run.grad.is_here()) order_.keep(run.grad.tensor());
  if (flat_->residence() == shard::Residence::Device) order_.keep(weights().tensor());
}

}  // namespace tessera::zero
