#include "tessera/zero/reducer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/shard/dtype.h"
#include "tessera/shard/part.h"
#include "tessera/shard/storage.h"
#include "tessera/zero/memory_for.h"

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

Reducer::Reducer(const Ranks& ranks, std::vector<Unit*> units, const Options& options, Phases& phases)
    : ranks_(ranks),
      phases_(phases),
      units_(std::move(units)),
      factor_(options.gradient_factor.value_or(1.0 / ranks.size())),
      overlap_(options.overlap &&
               (options.update_in_backward ||
                std::ranges::any_of(units_, [](const Unit* u) { return !one_rank(*u) || u->host_grads; }))),
      stochastic_(options.precision.grad_rounding == kernels::Rounding::Stochastic &&
                  at::elementSize(options.precision.grad) == 2),
      seed_(options.seed) {
  begin_backward();
}

Reducer::Mean Reducer::mean_of(const Unit& unit) const {
  const int n = unit.ranks.size();
  if (factor_ == 1.0 / n) return {comm::ReduceOp::Avg, 1.0};
  if (factor_ == 1.0) return {comm::ReduceOp::Sum, 1.0};
  return {comm::ReduceOp::Avg, factor_ * n};
}

void Reducer::begin(Unit& unit) {
  if (unit.accumulates()) return;
  if (!unit.in_pieces()) {
    acquire_partial(unit);
  } else if (!unit.has_sum()) {
    for (Param& p : unit.params)
      p.filled = false;
  }
  unit.move_to(GradState::Accumulating);
}

void Reducer::acquire_partial(Unit& unit) {
  const bool in_grads = unit.accumulates_in_grads() && (one_rank(unit) || (!unit.has_sum() && unit.in_flight == 0));
  if (in_grads) {
    unit.make_grads(unit.layout.size());
    unit.partial = unit.grads.tensor();
  } else {
    unit.partial = memory_for([&] { return pool_.acquire(unit.layout.size(), unit.grad_options()); },
                              "the gradients of unit '", unit.name, "'");
  }
  unit.partial_pooled = !in_grads;
  if (one_rank(unit) && unit.has_sum()) {  // it goes on there
    if (unit.host_grads) shard::come_after(*copies_.come_back(*unit.host_grads, unit.partial), unit.partial.device());
    return;
  }
  for (const shard::Range& gap : unit.layout.padding())
    shard::fill_zero(shard::part_of(unit.partial, gap));
  for (Param& p : unit.params)
    p.filled = false;
}

void Reducer::release_partial(Unit& unit) {
  unit.on_this_stream();
  if (unit.partial_pooled) pool_.release(unit.partial);
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

// Where contributions to `param` add up: `row` itself where that is defined, which then is the first of them.
shard::Memory Reducer::slot(Unit& unit, const Param& param, const at::Tensor& row) {
  if (!unit.in_pieces()) return shard::memory_of(unit.partial, param.range.begin);
  Run& run = unit.run_of(param);
  if (row.defined()) {
    unit.drop_run(run);
    run.grad = shard::Buffer(row);
  } else if (!run.grad.has_memory()) {
    memory_for([&] { run.grad.make(); }, "the gradients of unit '", unit.name, "'");
    for (const shard::Range& gap : unit.layout.padding())
      if (const shard::Range r = shard::intersect(gap, run.range); !r.empty())
        shard::fill_zero(shard::part_of(run.grad.tensor(), {r.begin - run.range.begin, r.end - run.range.begin}));
  }
  return shard::memory_of(run.grad.tensor(), param.range.begin - run.range.begin);
}

void Reducer::accumulate(Unit& unit, Param& param, const at::Tensor& grad, double scale, bool ours) {
  TESSERA_CHECK(sink_ == nullptr || unit.turn() != Turn::Launched, "zero", "parameter '", param.name,
                "' got a gradient after its unit was updated in this backward (tessera.update_in_backward): it is used "
                "in several nested backwards, as with reentrant checkpointing of shared layers; use "
                "use_reentrant=False, or switch update_in_backward off");
  unit.on_this_stream();
  begin(unit);
  // Forms are dense, so equal strides mean equal order in memory.
  at::Tensor source = grad;
  if (grad.strides() != param.form.strides) source = shard::flatten_like_param(grad, param.form);
  if (source.scalar_type() == at::kDouble) source = source.to(at::kFloat);
  at::Tensor row;  // that may be kept as it is
  if (unit.in_pieces() && unit.run_of(param).alone && !param.filled && (ours || !source.is_alias_of(grad)) &&
      source.dtype() == unit.grad_options().dtype())
    row = source.dim() == 1 ? source : shard::flatten_like_param(source, param.form);
  const int64_t n = param.range.size();
  if (one_rank(unit)) scale *= mean_of(unit).rest;
  const shard::Memory to = slot(unit, param, row), from = shard::memory_of(source);
  if (!param.filled) {
    if (to.data != from.data || scale != 1) shard::scaled_copy(to, from, scale, n);
  } else if (stochastic_) {
    const uint64_t rank = static_cast<uint64_t>(unit.ranks.rank()) << kRankShift, number = param.additions++;
    shard::for_stretches(param.cut, {0, n}, [&](shard::Range r, int64_t first) {
      const at::Tensor sum = unit.contribution(param);
      shard::scaled_add(shard::memory_of(sum, r.begin), shard::memory_of(source, r.begin), scale, r.size(),
                        key_of(param, rank + static_cast<uint64_t>(first), number));
    });
  } else {
    shard::scaled_add(to, from, scale, n);
  }
  param.filled = true;
  param.has_grad = true;
}

void Reducer::put(Unit& unit, Param& param, const at::Tensor& values) {
  unit.on_this_stream();
  begin(unit);
  if (unit.in_pieces()) unit.make_run(param);
  unit.contribution(param).copy_(values);
  param.filled = true;
}

// Random bits for addition `number` of this step to `param`, from element `first` of the whole on.
kernels::RandomKey Reducer::key_of(const Param& param, uint64_t first, uint64_t number) const {
  return {seed_, (static_cast<uint64_t>(param.step) << kStepShift) + number, param.first + first};
}

void Reducer::add_sum(Unit& unit, const at::Tensor& to, const at::Tensor& from) {
  if (!stochastic_) {
    shard::scaled_add(to, from);
    return;
  }
  const uint64_t number = kSums + unit.sums++;  // what ranks added before differs: it must not count
  for (const Param& p : unit.params) {
    const shard::Range r = unit.owned_slice(p);
    if (r.empty()) continue;
    const int64_t skipped = unit.owned.begin + r.begin - p.range.begin;
    shard::for_stretches(p.cut, {skipped, skipped + r.size()}, [&](shard::Range piece, int64_t first) {
      const int64_t at = r.begin + piece.begin - skipped;
      shard::scaled_add(shard::memory_of(to, at), shard::memory_of(from, at), 1.0, piece.size(),
                        key_of(p, static_cast<uint64_t>(first), number));
    });
  }
}

void Reducer::clear(Unit& unit, Param& param) {
  if (unit.has_sum() && !one_rank(unit)) {
    unit.on_this_stream();
    const shard::Range r = unit.owned_slice(param);
    unit.gradients().fill(r, 0);
  }
  if (unit.in_pieces() && unit.run_of(param).alone) unit.drop_run(unit.run_of(param));
  param.filled = false;
  param.has_grad = false;
}

void Reducer::begin_backward() {
  for (Unit* unit : units_) {
    unit->fired = unit->expected = 0;
    unit->move_to(Turn::Waiting);
    for (Param& p : unit->params) {
      p.fired = false;
      if (p.tensor.requires_grad()) ++unit->expected;
    }
  }
  next_ = 0;
}

void Reducer::fired(Unit& unit, Param& param, bool may_launch) {
  if (unit.turn() == Turn::Launched && unit.accumulates()) unit.move_to(GradState::Late);
  if (!param.fired) {
    param.fired = true;
    ++unit.fired;
  }
  if (may_launch && overlap_) launch_complete();
}

void Reducer::over(Unit& unit, bool may_launch) {
  if (unit.turn() == Turn::Waiting) unit.move_to(Turn::Over);
  if (may_launch && overlap_) launch_complete();
}

void Reducer::launch_complete() {
  while (next_ < units_.size()) {
    Unit& unit = *units_[next_];
    const bool ready = unit.launch_at() == LaunchAt::Complete
                           ? unit.complete()
                           : unit.launch_at() == LaunchAt::Over && unit.turn() == Turn::Over;
    if (!ready) return;
    launch(unit);
    ++next_;
  }
}

void Reducer::zero_unfilled(Unit& unit) {
  for (const Param& p : unit.params)
    if (!p.filled && !(unit.in_pieces() && !unit.run_of(p).grad.has_memory())) shard::fill_zero(unit.contribution(p));
}

void Reducer::finish_oldest_replica() {
  InFlight work = std::move(replicas_in_flight_.front());
  const PhaseScope scope(phases_, Phase::Reduce, work.unit->name);
  replicas_in_flight_.pop_front();
  work.unit->on_this_stream();
  work.pending.wait();
  if (work.sent.defined()) {
    shard::scaled_copy(work.sum, work.sent);
    travel_pool_.release(work.sent);
  }
  if (work.unit->host_grads) leave(*work.unit, work.sum, sums_, work.sum);
}

void Reducer::launch_replicas() {
  if (replicas_agree()) return;
  for (Unit* unit : units_) {
    if (!unit->has_sum() || unit->ranks.replicate->size() == 1) continue;
    if (replicas_in_flight_.size() >= kReplicasInFlight && comes_soon(replicas_in_flight_.front()))
      finish_oldest_replica();
    const PhaseScope scope(phases_, Phase::Reduce, unit->name);
    const std::string label = "gradients of unit '" + unit->name + "' over replicas";
    InFlight work;
    work.unit = unit;
    unit->on_this_stream();
    if (unit->host_grads) bring_back(work);
    work.sum = unit->host_grads ? work.before : unit->owned_grads();
    if (work.came) shard::come_after(*work.came, work.sum.device());
    work.sent = cast_to_travel(*unit, work.sum);
    const at::Tensor& travels = work.sent.defined() ? work.sent : work.sum;
    work.pending = unit->ranks.replicate->all_reduce(travels, mean_of(*unit).op, label);
    replicas_in_flight_.push_back(std::move(work));
  }
  replicas_agree_ = true;
}

void Reducer::reduce_replicas_of(const Unit& unit, const at::Tensor& grad, comm::Label label) const {
  if (!replicas_agree()) unit.ranks.replicate->all_reduce(grad, mean_of(unit).op, label).wait();
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
  for (Unit* unit : units_) {
    if (mean_of(*unit).op == comm::ReduceOp::Avg || unit->ranks.replicate->rank() == 0) continue;
    if (!unit->has_sum()) continue;
    unit->on_this_stream();
    unit->gradients().fill({0, unit->owned.size()}, 0);
  }
}

// Undefined where the unit travels as it is.
at::Tensor Reducer::cast_to_travel(const Unit& unit, const at::Tensor& values) {
  if (unit.travel == values.scalar_type()) return {};
  at::Tensor sent =
      memory_for([&] { return travel_pool_.acquire(values.numel(), values.options().dtype(unit.travel)); },
                 "what travels of unit '", unit.name, "'");
  shard::scaled_copy(sent, values);
  return sent;
}

// Where the first sum of a step goes: what outlives its reduction. None where it lies elsewhere.
shard::Buffer Reducer::memory_of_sum(const Unit& unit) const {
  if (sink_ != nullptr || unit.host_grads || unit.grads_are_visible() || unit.has_sum() || unit.in_flight > 0)
    return {};
  shard::Buffer own = shard::Buffer::without_memory(unit.owned.size(), unit.grad_options());
  memory_for([&] { own.make(); }, "the gradients of unit '", unit.name, "'");
  return own;
}

void Reducer::launch_alone(Unit& unit) {
  unit.move_to(Turn::Launched);
  unit.move_to(GradState::Reduced);
  unit.sum_arrived();
  const at::Tensor bucket = std::exchange(unit.partial, at::Tensor());
  unit.partial_pooled = false;
  if (sink_ != nullptr) {
    return hand_over(unit, bucket, filled(unit), [this, &unit, bucket](const auto& used) {
      if (bucket.defined()) pool_.release(bucket, used);
      unit.drop_grads();
    });
  }
  if (unit.host_grads) leave(unit, bucket, pool_, bucket);
}

void Reducer::launch(Unit& unit) {
  reopen_replicas();
  unit.on_this_stream();
  begin(unit);
  zero_unfilled(unit);
  if (one_rank(unit)) return launch_alone(unit);
  const PhaseScope scope(phases_, Phase::Reduce, unit.name);
  make_room();
  // Memory first: where there is none, nothing has changed.
  at::Tensor present;
  if (sink_ != nullptr)
    present = memory_for([&] { return shard::sent_to(unit.partial.device(), filled(unit)); }, "flags of unit '",
                         unit.name, "'");
  const shard::Buffer own = memory_of_sum(unit);
  const at::Tensor sent = cast_to_travel(unit, unit.partial);
  unit.move_to(Turn::Launched);
  unit.move_to(GradState::Reducing);
  const std::string label = "gradients of unit '" + unit.name + "'";
  const at::Tensor& source = sent.defined() ? sent : unit.partial;
  at::Tensor sum = source.narrow(0, unit.owned.begin, unit.owned.size());
  if (own.defined()) unit.grads = own;  // contributions that lay there live on in `partial`
  comm::Pending pending;
  const comm::ReduceOp op = mean_of(unit).op;
  comm::Pending presence;
  if (sink_ != nullptr) {
    presence = unit.ranks.shard->all_reduce(present, comm::ReduceOp::Max, label + ", which have one");
  }
  if (unit.grads_are_visible()) {
    pending = unit.ranks.shard->all_reduce(source, op, label);
  } else {
    if (own.defined() && !sent.defined()) sum = own.tensor();
    pending = unit.ranks.shard->reduce_scatter(sum, source, op, label);
  }
  in_flight_.push_back({&unit, std::move(pending), sent, std::move(sum), std::exchange(unit.partial, at::Tensor()),
                        std::exchange(unit.partial_pooled, false), present, std::move(presence),
                        std::ranges::all_of(unit.params, &Param::filled)});
  ++unit.in_flight;
  if (unit.host_grads && unit.has_sum() && unit.in_flight == 1) bring_back(in_flight_.back());
}

void Reducer::finish_oldest() {
  InFlight work = std::move(in_flight_.front());
  in_flight_.pop_front();
  Unit& unit = *work.unit;
  const PhaseScope scope(phases_, Phase::Reduce, unit.name);
  unit.on_this_stream();
  // Whatever happens, the unit leaves Reducing: after an error only zero_grad() and destroy() remain.
  --unit.in_flight;
  if (unit.grad_state() == GradState::Reducing && unit.in_flight == 0) unit.move_to(GradState::Reduced);
  try {
    work.pending.wait();
    work.presence.wait();
    if (!dropping_) use_up(work);
  } catch (...) {
    give_back(work);
    throw;
  }
  give_back(work);
}

// What becomes of a sum. Buckets that it keeps are no longer `work`'s.
void Reducer::use_up(InFlight& work) {
  Unit& unit = *work.unit;
  if (const double rest = mean_of(unit).rest; rest != 1.0) shard::scaled_copy(work.sum, work.sum, rest);
  if (sink_ != nullptr) {
    const at::Tensor values = work.bucket.narrow(0, unit.owned.begin, unit.owned.size());
    const at::Tensor present = work.has_all ? at::ones({work.present.numel()}, at::kInt) : work.present.cpu();
    if (work.sent.defined()) shard::scaled_copy(values, work.sum);
    unit.sum_arrived();
    work.pooled = false;
    return hand_over(unit, values, present,
                     [this, bucket = work.bucket](const auto& used) { pool_.release(bucket, used); });
  }
  if (unit.host_grads) return leave(work);
  if (unit.has_sum() && work.pooled) {
    add_sum(unit, unit.owned_grads(), work.sum);
  } else if (work.sum.data_ptr() != unit.owned_grads().data_ptr()) {
    shard::scaled_copy(unit.owned_grads(), work.sum);
  }
  unit.sum_arrived();
}

// To their pools.
void Reducer::give_back(InFlight& work) {
  if (work.sent.defined()) travel_pool_.release(work.sent);
  work.unit->order.keep(work.present);
  if (work.before.defined()) sums_.release(work.before, work.came);
  if (work.pooled) {
    pool_.release(work.bucket);
  } else if (!work.unit->grads_are_visible()) {
    work.unit->order.keep(work.bucket);
  }
}

// See Note [Gradients leave]; sums_ gets the bucket back in leave().
void Reducer::bring_back(InFlight& work) {
  work.before = memory_for([&] { return sums_.acquire(work.unit->owned.size(), work.unit->grad_options()); },
                           "the sums of unit '", work.unit->name, "'");
  work.came = copies_.come_back(*work.unit->host_grads, work.before);
}

void Reducer::leave(Unit& unit, const at::Tensor& sum, BucketPool& pool, const at::Tensor& bucket) {
  copies_.leave(sum, *unit.host_grads,
                [&pool, bucket](std::shared_ptr<c10::Event> copied) { pool.release(bucket, std::move(copied)); });
}

void Reducer::leave(InFlight& work) {
  Unit& unit = *work.unit;
  const at::Tensor values = work.bucket.narrow(0, unit.owned.begin, unit.owned.size());
  if (unit.has_sum()) {
    if (!work.came) bring_back(work);
    shard::come_after(*work.came, values.device());
    add_sum(unit, work.before, work.sum);
    const at::Tensor sum = std::exchange(work.before, at::Tensor());
    leave(unit, sum, sums_, sum);
  } else {
    if (work.sent.defined()) shard::scaled_copy(values, work.sum);
    work.pooled = false;
    leave(unit, values, pool_, work.bucket);
  }
  unit.sum_arrived();
}

// 1 for each parameter to which this rank contributed, else 0.
at::Tensor Reducer::filled(const Unit& unit) const {
  at::Tensor flags = at::empty({static_cast<int64_t>(unit.params.size())}, at::kInt);
  for (size_t i = 0; i < unit.params.size(); ++i)
    flags.mutable_data_ptr<int>()[i] = unit.params[i].filled ? 1 : 0;
  return flags;
}

void Reducer::hand_over(Unit& unit, const at::Tensor& sum, const at::Tensor& present, Release release) {
  std::vector<bool> flags(unit.params.size());
  for (size_t i = 0; i < flags.size(); ++i)
    flags[i] = present.const_data_ptr<int>()[i] != 0;
  unit.move_to(GradState::Empty);
  unit.partial_pooled = false;
  for (Param& p : unit.params)
    p.filled = p.has_grad = false;
  sink_->take({&unit, sum, std::move(flags), std::move(release)});
}

// Which units got gradients after their launch, on any rank.
void Reducer::launch_agreement() {
  late_ = at::zeros({static_cast<int64_t>(units_.size())}, at::kInt);
  for (size_t i = 0; i < units_.size(); ++i)
    late_.data_ptr<int>()[i] = units_[i]->grad_state() == GradState::Late ? 1 : 0;
  late_ = shard::sent_to(ranks_.device, late_);
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

// On the stream of who called backward(), where the user goes on.
void Reducer::finish() {
  drain();
  for (Unit* unit : units_)
    unit->on_this_stream();
  if (std::ranges::none_of(units_, [](const Unit* unit) { return unit->host_grads != nullptr; })) free_buckets();
  begin_backward();
}

bool Reducer::has_late() const {
  return std::any_of(units_.begin(), units_.end(), [](const Unit* u) { return u->grad_state() == GradState::Late; });
}

void Reducer::reduce_late() {
  if (ranks_.shard->size() > 1) launch_agreement();
  launch_late();
  finish();
}

void Reducer::join(std::vector<Unit*> units, const std::vector<Unit*>& joined, bool with_others) {
  units_ = std::move(units);
  begin_backward();
  if (with_others) return;
  for (Unit* unit : joined)
    launch(*unit);
  finish();
}

void Reducer::drain() {
  while (!in_flight_.empty())
    finish_oldest();
}

// Letting go of a collective has the current stream wait for it, and no host; memory goes back after that.
void Reducer::abandon() {
  shard::StreamOrder here;
  here.end(ranks_.device);
  agreement_.release();
  here.keep(late_);
  for (auto* works : {&replicas_in_flight_, &in_flight_}) {
    for (InFlight& work : *works) {
      work.unit->order.end(ranks_.device);
      work.pending.release();
      work.presence.release();
      for (const at::Tensor* memory : {&work.sent, &work.sum, &work.bucket, &work.present, &work.before})
        work.unit->order.keep(*memory, work.came.get());
    }
    works->clear();
  }
  copies_.abandon();
}

void Reducer::reset() {
  agreement_ = {};
  late_.reset();
  finish_replicas();
  dropping_ = true;
  drain();
  dropping_ = false;
  if (sink_ != nullptr) sink_->drop();
  for (Unit* unit : units_)
    forget(*unit);
  free_buckets();
  replicas_agree_ = false;
  begin_backward();
}

void Reducer::forget(Unit& unit) {
  if (unit.partial.defined()) release_partial(unit);
  unit.drop_grads();
  unit.move_to(GradState::Empty);
  for (Param& p : unit.params) {
    p.filled = p.has_grad = false;
    p.additions = 0;
  }
}

}  // namespace tessera::zero
