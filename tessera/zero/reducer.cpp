#include "tessera/zero/reducer.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/shard/dtype.h"
#include "tessera/shard/storage.h"

namespace tessera::zero {

namespace {
// While backward fills the bucket of one unit, that of the unit before travels: more would be memory without gain. But
// how long the other ranks take to come is not known: Note [Waits].
constexpr size_t kUnitsInFlight = 1;
constexpr size_t kReplicasInFlight = 2;
constexpr unsigned kRankShift = 48;  // local contributions: random bits of rank r are those of elements from r << 48
constexpr unsigned kStepShift = 16;  // additions of one step are numbered from step << 16,
constexpr uint64_t kSums = 1 << 15;  // those of sums from here on
}  // namespace

Reducer::Reducer(DataParallel ranks, std::vector<Unit*> units, const Options& options)
    : ranks_(std::move(ranks)),
      units_(std::move(units)),
      op_(options.average ? comm::ReduceOp::Avg : comm::ReduceOp::Sum),
      overlap_(options.overlap),
      stochastic_(options.precision.grad_rounding == kernels::Rounding::Stochastic &&
                  at::elementSize(options.precision.grad) == 2),
      seed_(options.seed) {
  begin_backward();
}

void Reducer::acquire_partial(Unit& unit) {
  const bool persistent = unit.grads.numel() == unit.layout.size();
  if (persistent && (one_rank() || (!unit.reduced && unit.in_flight == 0))) {
    unit.partial = unit.grads;
    unit.partial_pooled = false;
  } else {
    unit.partial = pool_.acquire(unit.layout.size(), unit.grads.options());
    unit.partial_pooled = true;
    for (const shard::Range& gap : unit.layout.padding())
      shard::fill_zero(unit.partial.narrow(0, gap.begin, gap.size()));
  }
  if (!(one_rank() && unit.reduced)) {
    for (Param& p : unit.params)
      p.filled = false;
  }
}

void Reducer::release_partial(Unit& unit) {
  if (unit.partial_pooled) pool_.give_back(unit.partial);
  unit.partial.reset();
  unit.partial_pooled = false;
}

// See Note [Waits].
bool Reducer::comes_soon(InFlight& work) {
  const bool came = work.pending.wait_for(patience_);
  patience_ = came ? std::min(patience_ + kLeastPatience, kMostPatience) : std::max(patience_ / 2, kLeastPatience);
  return came;
}

// Room for one more unit: by waiting for the oldest one, but not long.
void Reducer::make_room() {
  while (in_flight_.size() >= kUnitsInFlight && comes_soon(in_flight_.front()))
    finish_oldest();
}

void Reducer::accumulate(Unit& unit, Param& param, const at::Tensor& grad, double scale) {
  if (unit.grad_state() != GradState::Accumulating) {
    acquire_partial(unit);
    unit.move_to(GradState::Accumulating);
  }
  // Forms are dense, so equal strides mean equal order in memory.
  at::Tensor source = grad;
  if (grad.strides() != param.form.strides) source = shard::flatten_like_param(grad, param.form);
  if (source.scalar_type() == at::kDouble) source = source.to(at::kFloat);
  const shard::Memory slot = shard::memory_of(unit.partial, param.range.begin);
  const int64_t n = param.range.size();
  if (!param.filled) {
    shard::scaled_copy(slot, shard::memory_of(source), scale, n);
  } else if (stochastic_) {
    const auto rank = static_cast<uint64_t>(ranks_.rank());
    shard::scaled_add(slot, shard::memory_of(source), scale, n, key_of(param, rank << kRankShift, param.additions++));
  } else {
    shard::scaled_add(slot, shard::memory_of(source), scale, n);
  }
  param.filled = true;
  param.has_grad = true;
}

// Random bits for addition `number` of this step to `param`, from its element `first` on.
kernels::RandomKey Reducer::key_of(const Param& param, uint64_t first, uint64_t number) const {
  return {seed_, (static_cast<uint64_t>(param.step) << kStepShift) + number, param.first + first};
}

void Reducer::add_sum(Unit& unit, const at::Tensor& from) {
  const at::Tensor to = unit.owned_grads();
  if (!stochastic_) {
    shard::scaled_add(to, from);
    return;
  }
  const uint64_t number = kSums + unit.sums++;  // what ranks added before differs: it must not count
  for (const Param& p : unit.params) {
    const shard::Range r = unit.owned_slice(p);
    if (r.empty()) continue;
    const auto skipped = static_cast<uint64_t>(unit.owned.begin + r.begin - p.range.begin);
    shard::scaled_add(shard::memory_of(to, r.begin), shard::memory_of(from, r.begin), 1.0, r.size(),
                      key_of(p, skipped, number));
  }
}

void Reducer::clear(Unit& unit, Param& param) {
  if (unit.reduced && !one_rank()) {
    const shard::Range r = unit.owned_slice(param);
    shard::fill_zero(unit.owned_grads().narrow(0, r.begin, r.size()));
  }
  param.filled = false;
  param.has_grad = false;
}

void Reducer::begin_backward() {
  for (Unit* unit : units_) {
    unit->fired = unit->expected = 0;
    unit->launched = unit->over = false;
    if (unit->grad_state() != GradState::Accumulating) unit->refired = false;
    for (Param& p : unit->params) {
      p.fired = false;
      if (p.tensor.requires_grad()) ++unit->expected;
    }
  }
  next_ = 0;
}

void Reducer::fired(Unit& unit, Param& param, bool may_launch) {
  if (unit.launched) unit.refired = true;
  if (!param.fired) {
    param.fired = true;
    ++unit.fired;
  }
  if (may_launch && overlap_ && !one_rank()) launch_complete();
}

void Reducer::over(Unit& unit, bool may_launch) {
  unit.over = true;
  if (may_launch && overlap_ && !one_rank()) launch_complete();
}

void Reducer::launch_complete() {
  while (next_ < units_.size()) {
    Unit& unit = *units_[next_];
    const bool ready = unit.launch_at() == LaunchAt::Complete ? unit.fired >= unit.expected
                                                              : unit.launch_at() == LaunchAt::Over && unit.over;
    if (!ready) return;
    launch(unit);
    ++next_;
  }
}

void Reducer::zero_unfilled(Unit& unit) {
  for (const Param& p : unit.params) {
    if (!p.filled) shard::fill_zero(unit.partial.narrow(0, p.range.begin, p.range.size()));
  }
}

void Reducer::finish_oldest_replica() {
  InFlight work = std::move(replicas_in_flight_.front());
  replicas_in_flight_.pop_front();
  work.pending.wait();
  if (!work.sent.defined()) return;
  shard::scaled_copy(work.unit->owned_grads(), work.sent);
  travel_pool_.give_back(work.sent);
}

void Reducer::launch_replicas() {
  if (replicas_agree()) return;
  for (Unit* unit : units_) {
    if (!unit->reduced) continue;
    if (replicas_in_flight_.size() >= kReplicasInFlight && comes_soon(replicas_in_flight_.front()))
      finish_oldest_replica();
    const std::string label = "gradients of unit '" + unit->name + "' over replicas";
    const at::Tensor sent = cast_to_travel(*unit, unit->owned_grads());
    const at::Tensor& sum = sent.defined() ? sent : unit->owned_grads();
    replicas_in_flight_.push_back({unit, ranks_.replicate->all_reduce(sum, op_, label), sent, {}, {}});
  }
  replicas_agree_ = true;
}

void Reducer::finish_replicas() {
  while (!replicas_in_flight_.empty())
    finish_oldest_replica();
}

// More gradients after reduce_replicas(): what is there must count once in the next one. The mean of equal values is
// that value; of a sum one replica keeps it.
void Reducer::reopen_replicas() {
  if (!replicas_agree_) return;
  replicas_agree_ = false;
  if (op_ == comm::ReduceOp::Avg || ranks_.replicate->rank() == 0) return;
  for (Unit* unit : units_) {
    if (unit->reduced) shard::fill_zero(unit->owned_grads());
  }
}

// Undefined where the unit travels as it is.
at::Tensor Reducer::cast_to_travel(const Unit& unit, const at::Tensor& values) {
  if (unit.travel == values.scalar_type()) return {};
  at::Tensor sent = travel_pool_.acquire(values.numel(), values.options().dtype(unit.travel));
  shard::scaled_copy(sent, values);
  return sent;
}

void Reducer::launch(Unit& unit) {
  reopen_replicas();
  if (unit.grad_state() != GradState::Accumulating) {
    acquire_partial(unit);
    unit.move_to(GradState::Accumulating);
  }
  zero_unfilled(unit);
  unit.launched = true;
  unit.refired = false;
  if (one_rank()) {
    unit.move_to(GradState::Reduced);
    unit.reduced = true;
    unit.partial.reset();
    return;
  }
  make_room();
  unit.move_to(GradState::Reducing);
  const std::string label = "gradients of unit '" + unit.name + "'";
  const at::Tensor sent = cast_to_travel(unit, unit.partial);
  const at::Tensor& source = sent.defined() ? sent : unit.partial;
  at::Tensor sum = source.narrow(0, unit.owned.begin, unit.owned.size());
  comm::Pending pending;
  if (unit.grads_are_visible()) {
    pending = ranks_.shard->all_reduce(source, op_, label);
  } else {
    const bool first = !unit.reduced && unit.in_flight == 0 && !sent.defined();
    if (first && unit.partial_pooled) sum = unit.owned_grads();
    pending = ranks_.shard->reduce_scatter(sum, source, op_, label);
  }
  in_flight_.push_back({&unit, std::move(pending), sent, std::move(sum), std::exchange(unit.partial, at::Tensor()),
                        std::exchange(unit.partial_pooled, false)});
  ++unit.in_flight;
}

void Reducer::finish_oldest() {
  InFlight work = std::move(in_flight_.front());
  in_flight_.pop_front();
  Unit& unit = *work.unit;
  // Whatever happens, the unit leaves Reducing: after an error only zero_grad() and destroy() remain.
  --unit.in_flight;
  if (unit.grad_state() == GradState::Reducing && unit.in_flight == 0) unit.move_to(GradState::Reduced);
  work.pending.wait();
  if (unit.reduced && work.pooled) {
    add_sum(unit, work.sum);
  } else if (work.sum.data_ptr() != unit.owned_grads().data_ptr()) {
    shard::scaled_copy(unit.owned_grads(), work.sum);
  }
  if (work.sent.defined()) travel_pool_.give_back(work.sent);
  if (work.pooled) pool_.give_back(work.bucket);
  unit.reduced = true;
}

// Which units got gradients after their launch, on any rank.
void Reducer::launch_agreement() {
  late_ = at::zeros({static_cast<int64_t>(units_.size())}, at::kInt);
  for (size_t i = 0; i < units_.size(); ++i)
    late_.data_ptr<int>()[i] = units_[i]->refired ? 1 : 0;
  late_ = late_.to(ranks_.device);
  agreement_ = ranks_.shard->all_reduce(late_, comm::ReduceOp::Max, "units with late gradients");
}

void Reducer::launch_late() {
  if (!late_.defined()) return;
  agreement_.wait();
  const at::Tensor late = std::exchange(late_, at::Tensor()).cpu();
  for (size_t i = 0; i < units_.size(); ++i) {
    if (late.const_data_ptr<int>()[i] != 0) launch(*units_[i]);
  }
}

void Reducer::launch_rest(bool all_visible) {
  for (; next_ < units_.size(); ++next_)
    launch(*units_[next_]);
  if (all_visible && ranks_.shard->size() > 1) launch_agreement();
}

void Reducer::finish() {
  drain();
  begin_backward();
}

bool Reducer::has_late() const {
  return std::any_of(units_.begin(), units_.end(),
                     [](const Unit* u) { return u->refired && u->grad_state() == GradState::Accumulating; });
}

void Reducer::reduce_late() {
  if (ranks_.shard->size() > 1) launch_agreement();
  launch_late();
  finish();
}

void Reducer::drain() {
  while (!in_flight_.empty())
    finish_oldest();
}

void Reducer::abandon() {
  agreement_ = {};
  replicas_in_flight_.clear();
  in_flight_.clear();
}

void Reducer::reset() {
  agreement_ = {};
  late_.reset();
  finish_replicas();
  drain();
  for (Unit* unit : units_) {
    if (unit->partial.defined()) release_partial(*unit);
    unit->move_to(GradState::Empty);
    unit->reduced = false;
    unit->sums = 0;
    for (Param& p : unit->params) {
      p.filled = p.has_grad = false;
      p.additions = 0;
    }
  }
  replicas_agree_ = false;
  begin_backward();
}

}  // namespace tessera::zero
