#include "tessera/zero/replica_sums.h"

#include "tessera/shard/dtype.h"

namespace tessera::zero {

namespace {
constexpr size_t kInFlight = 2;
}  // namespace

void ReplicaSums::launch(const std::vector<Unit*>& units) {
  if (agree()) return;
  for (Unit* unit : units) {
    if (!unit->has_sum() || unit->ranks().replicate->size() == 1) continue;
    if (in_flight_.size() >= kInFlight && patience_.comes_soon(in_flight_.front().pending)) finish_oldest();
    const PhaseScope scope(phases_, Phase::Reduce, unit->name());
    Reduction work{.unit = unit};
    unit->on_this_stream();
    destination_of_(*unit).lend(work);
    if (work.came) shard::come_after(*work.came, work.sum.device());
    work.sent = buckets_.cast_to_travel(*unit, work.sum);
    const at::Tensor& travels = work.sent.defined() ? work.sent : work.sum;
    work.pending = unit->ranks().replicate->all_reduce(travels, averaging_.mean_of(*unit).op,
                                                       "gradients of unit '" + unit->name() + "' over replicas");
    in_flight_.push_back(std::move(work));
  }
  agree_ = true;
}

void ReplicaSums::finish() {
  while (!in_flight_.empty())
    finish_oldest();
}

void ReplicaSums::finish_oldest() {
  Reduction work = std::move(in_flight_.front());
  const PhaseScope scope(phases_, Phase::Reduce, work.unit->name());
  in_flight_.pop_front();
  work.unit->on_this_stream();
  work.pending.wait();
  if (work.sent.defined()) {
    shard::scaled_copy(work.sum, work.sent);
    buckets_.travel.release(work.sent);
  }
  destination_of_(*work.unit).put_back(work);
}

// The mean of equal values is that value; a sum stays with one replica.
void ReplicaSums::reopen(const std::vector<Unit*>& units) {
  if (!agree_) return;
  agree_ = false;
  for (Unit* unit : units) {
    if (averaging_.mean_of(*unit).op == comm::ReduceOp::Avg || unit->ranks().replicate->rank() == 0) continue;
    if (!unit->has_sum()) continue;
    unit->on_this_stream();
    unit->gradients().fill({0, unit->owned().size()}, 0);
  }
}

void ReplicaSums::reduce_one(const Unit& unit, const at::Tensor& grad, comm::Label label) const {
  if (!agree()) unit.ranks().replicate->all_reduce(grad, averaging_.mean_of(unit).op, label).wait();
}

}  // namespace tessera::zero
