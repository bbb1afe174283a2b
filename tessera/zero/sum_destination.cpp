#include "tessera/zero/sum_destination.h"

#include <ATen/ops/ones.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/shard/dtype.h"
#include "tessera/zero/memory_for.h"

namespace tessera::zero {

at::Tensor GradBuckets::cast_to_travel(const Unit& unit, const at::Tensor& values) {
  if (unit.travel() == values.scalar_type()) return {};
  at::Tensor sent = memory_for([&] { return travel.acquire(values.numel(), values.options().dtype(unit.travel())); },
                               "what travels of unit '", unit.name(), "'");
  shard::scaled_copy(sent, values);
  return sent;
}

void GradBuckets::free() {
  copies.finish();
  for (BucketPool* pool : {&contributions, &travel, &returned})
    pool->free_kept();
}

void SumDestination::launch(Reduction& work, const at::Tensor& source, comm::ReduceOp op, const std::string& label) {
  comm::Group& group = *work.unit->ranks().shard;
  work.pending = work.unit->grads_are_visible() ? group.all_reduce(source, op, label)
                                                : group.reduce_scatter(work.sum, source, op, label);
}

void SumDestination::lend(Reduction& work) {
  work.sum = work.unit->owned_grads();
}

// ---------------------------------------------------------------- kept

void KeptSum::prepare(Reduction& work) {
  const Unit& unit = *work.unit;
  if (unit.grads_are_visible() || unit.has_sum() || unit.progress().in_flight() > 0) return;
  shard::Buffer own = shard::Buffer::without_memory(unit.owned().size(), unit.grad_options());
  memory_for([&] { own.make(); }, "the gradients of unit '", unit.name(), "'");
  work.own = own;
}

void KeptSum::launch(Reduction& work, const at::Tensor& source, comm::ReduceOp op, const std::string& label) {
  if (work.own.defined()) {
    if (!work.sent.defined()) work.sum = work.own.tensor();
    work.unit->take_grads(std::exchange(work.own, {}));  // contributions that lay there live on in work.bucket
  }
  SumDestination::launch(work, source, op, label);
}

void KeptSum::take(Reduction& work) {
  Unit& unit = *work.unit;
  if (unit.has_sum() && work.pooled) {
    contributions_.add_sum(unit, unit.owned_grads(), work.sum);
  } else if (work.sum.data_ptr() != unit.owned_grads().data_ptr()) {
    shard::scaled_copy(unit.owned_grads(), work.sum);
  }
  unit.sum_arrived();
}

// ---------------------------------------------------------------- on the host

void HostSum::launched(Reduction& work) {
  if (work.unit->has_sum() && work.unit->progress().in_flight() == 1) bring_back(work);
}

void HostSum::bring_to(Unit& unit, const at::Tensor& memory) {
  shard::come_after(*buckets_.copies.come_back(*unit.host_grads(), memory), memory.device());
}

// buckets_.returned gets the bucket back in leave().
void HostSum::bring_back(Reduction& work) {
  work.before =
      memory_for([&] { return buckets_.returned.acquire(work.unit->owned().size(), work.unit->grad_options()); },
                 "the sums of unit '", work.unit->name(), "'");
  work.came = buckets_.copies.come_back(*work.unit->host_grads(), work.before);
}

void HostSum::lend(Reduction& work) {
  bring_back(work);
  work.sum = work.before;
}

void HostSum::leave(Unit& unit, const at::Tensor& sum, BucketPool& pool, const at::Tensor& bucket) {
  buckets_.copies.leave(sum, *unit.host_grads(), [&pool, bucket](std::shared_ptr<c10::Event> copied) {
    pool.release(bucket, std::move(copied));
  });
}

void HostSum::take(Reduction& work) {
  Unit& unit = *work.unit;
  const at::Tensor values = work.bucket.narrow(0, unit.owned().begin, unit.owned().size());
  if (unit.has_sum()) {
    if (!work.came) bring_back(work);
    shard::come_after(*work.came, values.device());
    contributions_.add_sum(unit, work.before, work.sum);
    leave(unit, std::exchange(work.before, at::Tensor()));
  } else {
    if (work.sent.defined()) shard::scaled_copy(values, work.sum);
    work.pooled = false;
    leave(unit, values, buckets_.contributions, work.bucket);
  }
  unit.sum_arrived();
}

void HostSum::take_alone(Unit& unit, const at::Tensor& bucket) {
  leave(unit, bucket, buckets_.contributions, bucket);
}

// ---------------------------------------------------------------- to a sink

void SunkSum::prepare(Reduction& work) {
  Unit& unit = *work.unit;
  work.present = memory_for([&] { return shard::sent_to(unit.partial().device(), Contributions::filled(unit)); },
                            "flags of unit '", unit.name(), "'");
  work.has_all = std::ranges::all_of(unit.params(), [](const Param& p) { return p.grad.filled(); });
}

void SunkSum::launch(Reduction& work, const at::Tensor& source, comm::ReduceOp op, const std::string& label) {
  work.presence = work.unit->ranks().shard->all_reduce(work.present, comm::ReduceOp::Max, label + ", which have one");
  SumDestination::launch(work, source, op, label);
}

void SunkSum::take(Reduction& work) {
  Unit& unit = *work.unit;
  const at::Tensor values = work.bucket.narrow(0, unit.owned().begin, unit.owned().size());
  const at::Tensor present = work.has_all ? at::ones({work.present.numel()}, at::kInt) : work.present.cpu();
  if (work.sent.defined()) shard::scaled_copy(values, work.sum);
  unit.sum_arrived();
  work.pooled = false;
  hand_over(unit, values, present,
            [this, bucket = work.bucket](const auto& used) { buckets_.contributions.release(bucket, used); });
}

void SunkSum::take_alone(Unit& unit, const at::Tensor& bucket) {
  hand_over(unit, bucket, Contributions::filled(unit), [this, &unit, bucket](const auto& used) {
    if (bucket.defined()) buckets_.contributions.release(bucket, used);
    unit.drop_grads();
  });
}

void SunkSum::check_open(const Unit& unit, const Param& param) const {
  TESSERA_CHECK(unit.progress().turn() != Turn::Launched, "zero", "parameter '", param.name,
                "' got a gradient after its unit was updated in this backward (tessera.update_in_backward): it is used "
                "in several nested backwards, as with reentrant checkpointing of shared layers; "
                "checkpoint without reentry, or switch update_in_backward off");
}

void SunkSum::hand_over(Unit& unit, const at::Tensor& sum, const at::Tensor& present, Release release) {
  std::vector<bool> flags(unit.params().size());
  for (size_t i = 0; i < flags.size(); ++i)
    flags[i] = present.const_data_ptr<int>()[i] != 0;
  unit.end_grads();
  sink_.take({&unit, sum, std::move(flags), std::move(release)});
}

}  // namespace tessera::zero
