#include "tessera/zero/reducer.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/shard/dtype.h"

namespace tessera::zero {

namespace {
// While backward fills the bucket of one unit, the bucket of the unit before travels: more would be memory without gain. But
// how long the other ranks take to come is not known: Note [Waits].
constexpr size_t kUnitsInFlight = 1;
}  // namespace

Reducer::Reducer(const Ranks& ranks, std::vector<Unit*> units, const Options& options, Phases& phases)
    : ranks_(ranks),
      phases_(phases),
      units_(std::move(units)),
      averaging_(options.gradient_factor.value_or(1.0 / ranks.size())),
      overlap_(options.overlap),
      contributions_(options, averaging_, buckets_,
                     [this](const Unit& unit) -> SumDestination& { return destination_of(unit); }),
      kept_(contributions_),
      host_(contributions_, buckets_),
      replicas_(
          ranks, averaging_, patience_, buckets_,
          [this](const Unit& unit) -> SumDestination& { return destination_of(unit); }, phases) {
  see_what_goes_on();
  begin_backward();
}

void Reducer::see_what_goes_on() {
  any_goes_on_ = std::ranges::any_of(units_, [this](const Unit* unit) { return destination_of(*unit).goes_on(*unit); });
}

void Reducer::send_sums_to(SumSink& sink) {
  sunk_ = std::make_unique<SunkSum>(sink, buckets_);
  see_what_goes_on();
}

// Makes room for one more unit: waits for the oldest one, but not long.
void Reducer::make_room() {
  while (in_flight_.size() >= kUnitsInFlight && patience_.comes_soon(in_flight_.front().pending))
    finish_oldest();
}

void Reducer::accumulate(Unit& unit, const Param& param, const at::Tensor& grad, double scale, bool ours) {
  destination_of(unit).check_open(unit, param);
  contributions_.add(unit, param, grad, scale, ours);
}

void Reducer::begin_backward() {
  for (Unit* unit : units_)
    unit->begin_backward();
  next_ = 0;
}

void Reducer::fired(Unit& unit, const Param& param, bool may_launch) {
  unit.fire(param);
  if (may_launch && overlap_ && any_goes_on_) launch_complete();
}

void Reducer::over(Unit& unit, bool may_launch) {
  unit.end_calls();
  if (may_launch && overlap_ && any_goes_on_) launch_complete();
}

void Reducer::launch_complete() {
  while (next_ < units_.size()) {
    Unit& unit = *units_[next_];
    const bool ready = unit.launch_at() == LaunchAt::Complete
                           ? unit.progress().complete()
                           : unit.launch_at() == LaunchAt::Over && unit.progress().turn() == Turn::Over;
    if (!ready) return;
    launch(unit);
    ++next_;
  }
}

SumDestination& Reducer::destination_of(const Unit& unit) {
  if (sunk_ != nullptr) return *sunk_;
  if (unit.host_grads()) return host_;
  return kept_;
}

void Reducer::launch_alone(Unit& unit) {
  const at::Tensor bucket = unit.launch_alone();
  destination_of(unit).take_alone(unit, bucket);
}

void Reducer::launch(Unit& unit) {
  replicas_.reopen(units_);
  unit.on_this_stream();
  contributions_.begin(unit);
  Contributions::zero_unfilled(unit);
  if (one_rank(unit)) return launch_alone(unit);
  const PhaseScope scope(phases_, Phase::Reduce, unit.name());
  make_room();
  SumDestination& destination = destination_of(unit);
  Reduction work{.unit = &unit, .bucket = unit.partial(), .pooled = unit.progress().pooled()};
  // Memory comes first: where there is none, nothing has changed.
  destination.prepare(work);
  work.sent = buckets_.cast_to_travel(unit, unit.partial());
  const at::Tensor& source = work.sent.defined() ? work.sent : work.bucket;
  work.sum = source.narrow(0, unit.owned().begin, unit.owned().size());
  destination.launch(work, source, averaging_.mean_of(unit).op, "gradients of unit '" + unit.name() + "'");
  in_flight_.push_back(std::move(work));
  unit.launch();
  destination.launched(in_flight_.back());
}

void Reducer::finish_oldest() {
  Reduction work = std::move(in_flight_.front());
  in_flight_.pop_front();
  Unit& unit = *work.unit;
  const PhaseScope scope(phases_, Phase::Reduce, unit.name());
  unit.on_this_stream();
  // Whatever comes of it, the reduction is over: after an error only zero_grad() and destroy() remain.
  unit.arrive();
  try {
    work.pending.wait();
    work.presence.wait();
    if (!dropping_) {
      if (const double rest = averaging_.mean_of(unit).rest; rest != 1.0) shard::scaled_copy(work.sum, work.sum, rest);
      destination_of(unit).take(work);
    }
  } catch (...) {
    give_back(work);
    throw;
  }
  give_back(work);
}

// Gives buckets back to their pools.
void Reducer::give_back(Reduction& work) {
  if (work.sent.defined()) buckets_.travel.release(work.sent);
  work.unit->order().keep(work.present);
  if (work.before.defined()) buckets_.returned.release(work.before, work.came);
  if (work.pooled) {
    buckets_.contributions.release(work.bucket);
  } else if (!work.unit->grads_are_visible()) {
    work.unit->order().keep(work.bucket);
  }
}

// Agrees which units got gradients after their launch, on any rank.
void Reducer::launch_agreement() {
  late_ = at::zeros({static_cast<int64_t>(units_.size())}, at::kInt);
  for (size_t i = 0; i < units_.size(); ++i)
    late_.data_ptr<int>()[i] = units_[i]->progress().state() == GradState::Late ? 1 : 0;
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

// Runs on the stream of who called backward(), where the user goes on.
void Reducer::finish() {
  drain();
  for (Unit* unit : units_)
    unit->on_this_stream();
  if (std::ranges::none_of(units_, [this](const Unit* unit) { return destination_of(*unit).keeps_buckets(*unit); }))
    free_buckets();
  begin_backward();
}

bool Reducer::has_late() const {
  return std::any_of(units_.begin(), units_.end(),
                     [](const Unit* u) { return u->progress().state() == GradState::Late; });
}

void Reducer::reduce_late() {
  if (ranks_.shard->size() > 1) launch_agreement();
  launch_late();
  finish();
}

void Reducer::join(std::vector<Unit*> units, const std::vector<Unit*>& joined, bool with_others) {
  units_ = std::move(units);
  see_what_goes_on();
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

// Letting go of a collective waits for nobody and keeps the memory; other work on the memory comes first in its order.
void Reducer::abandon() {
  shard::StreamOrder here;
  here.end(ranks_.device);
  agreement_.release();
  here.keep(late_);
  for (auto* works : {&replicas_.in_flight(), &in_flight_}) {
    for (Reduction& work : *works) {
      work.unit->order().end(ranks_.device);
      work.pending.release();
      work.presence.release();
      for (const at::Tensor* memory : {&work.sent, &work.sum, &work.bucket, &work.present, &work.before})
        work.unit->order().keep(*memory, work.came.get());
    }
    works->clear();
  }
  buckets_.copies.abandon();
}

void Reducer::reset() {
  agreement_ = {};
  late_.reset();
  finish_replicas();
  dropping_ = true;
  drain();
  dropping_ = false;
  if (sunk_ != nullptr) sunk_->drop();
  for (Unit* unit : units_)
    forget(*unit);
  free_buckets();
  replicas_.set_agree(false);
  begin_backward();
}

void Reducer::forget(Unit& unit) {
  if (unit.partial().defined()) contributions_.release(unit);
  unit.drop_grads();
  unit.end_grads();
}

}  // namespace tessera::zero
