#include "tessera/zero/update_in_backward.h"

#include <ATen/ops/clone.h>

#include <cmath>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/optim/norm.h"

namespace tessera::zero {

namespace {
constexpr size_t kNormsInFlight = 1;

template <class F>
void releasing_if_it_throws(const ArrivedSum& sum, const F& f) {
  try {
    f();
  } catch (...) {
    sum.release();
    throw;
  }
}
}  // namespace

UpdateInBackward::UpdateInBackward(Units& units, BackwardDriver& driver, Updater& updater)
    : units_(units), updater_(updater), present_(units.count()) {
  if (!on()) return;
  if (units.options().unit_clipping > 0) norms_ = units.ranks().shard->sibling(units.ranks().device);
  driver.send_sums_to(this);
}

std::vector<std::string> UpdateInBackward::excluded(const Options& options, optim::Rule rule, const comm::Mesh& mesh) {
  std::vector<std::string> all;
  const auto add = [&](bool excludes, const char* what) {
    if (excludes) all.emplace_back(what);
  };
  add(!shard::placements_of_stage(options.stage).shards_grads(),
      "stage 0, where p.grad shows the gradients (use stage 1, 2 or 3)");
  add(rule == optim::Rule::External, "an optimizer that Tessera does not run itself");
  add(options.precision.skip_nonfinite,
      "steps that are skipped when gradients are not finite (fp16; bf16 unless bf16.check_grad_overflow is false)");
  add(options.reduce_at_step, "unmanaged accumulation");
  add(options.share_params, "tessera.shared_parameters");
  add(mesh.size(comm::Axis::DpReplicate) > 1, "hybrid sharding, which reduces over replicas after the backward");
  add(options.unit_clipping > 0 && mesh.size(comm::Axis::Tp) > 1, "clipping by unit with tensor parallelism");
  return all;
}

void UpdateInBackward::reset() {
  for (const auto& unit : units_.all()) {
    unit->order.keep(unit->squares);
    unit->squares.reset();
  }
  std::fill(present_.begin(), present_.end(), false);
}

void UpdateInBackward::backward_begun() {
  units_.check_whole();
  forget_waiting();
  updater_.prepare_update();
  disks_ = updater_.guard();
}

void UpdateInBackward::drop() {
  forget_waiting();
  reset();
}

// Of a backward that threw.
void UpdateInBackward::forget_waiting() {
  for (Waiting& left : std::exchange(waiting_, {})) {
    try {
      left.pending.wait();
    } catch (const std::exception&) {  // nobody needs it any more
    }
    left.sum.unit->on_this_stream();
    left.sum.release();
  }
}

void UpdateInBackward::take(ArrivedSum sum) {
  at::Tensor total;
  comm::Pending pending;
  releasing_if_it_throws(sum, [&] {
    const Unit& unit = *sum.unit;
    const at::Tensor squares =
        sum.values.defined()
            ? optim::squares_there(sum.values)
            : optim::squares_there(unit.owned.size(), unit.pieces({0, unit.owned.size()}), unit.grad_options());
    sum.unit->squares = squares;
    if (!norms_) return;
    total = squares.reshape({1}).clone();
    pending = norms_->all_reduce(total, comm::ReduceOp::Sum, "norm of unit '" + sum.unit->name + "'");
  });
  if (!norms_) return update(sum, 1);
  waiting_.push_back({std::move(sum), total, std::move(pending)});
  if (waiting_.size() > kNormsInFlight) update_oldest();
}

void UpdateInBackward::update_oldest() {
  Waiting oldest = std::move(waiting_.front());
  waiting_.pop_front();
  double scale = 1;
  releasing_if_it_throws(oldest.sum, [&] {
    oldest.pending.wait();
    scale = optim::clip_coefficient(std::sqrt(oldest.squares.item<double>()), units_.options().unit_clipping);
  });
  update(oldest.sum, scale);
}

void UpdateInBackward::update(const ArrivedSum& sum, double scale) {
  releasing_if_it_throws(sum, [&] { update_from(sum, scale); });
  sum.release();
}

void UpdateInBackward::update_from(const ArrivedSum& sum, double scale) {
  Unit& unit = *sum.unit;
  unit.on_this_stream();
  units_.set_broken("a backward ended with an error after it had updated a part of the model");  // until it is over
  units_.unsharder().settle_before_update(units_[unit.params.front().id].number);
  for (size_t i = 0; i < unit.params.size(); ++i)
    present_[unit.params[i].id] = sum.present[i];
  updater_.update_unit(unit, sum.values, present_, scale, disks_);
}

void UpdateInBackward::launch_end() {
  while (!waiting_.empty())
    update_oldest();
  updater_.launch_gathers();
}

void UpdateInBackward::finish_end() {
  RankGuard disks = std::exchange(disks_, RankGuard(false));
  updater_.finish_gathers(disks);
  units_.set_broken("");
}

}  // namespace tessera::zero
