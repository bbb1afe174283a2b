#include "tessera/zero/update_in_backward.h"

#include <ATen/ops/clone.h>
#include <ATen/ops/tensor.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cmath>
#include <optional>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/optim/advice.h"
#include "tessera/optim/norm.h"
#include "tessera/shard/side_stream.h"
#include "tessera/zero/update_lane.h"

namespace tessera::zero {

namespace {
constexpr size_t kNormsInFlight = 1;

using Release = decltype(ArrivedSum::release);

// Takes the release out of a sum, which somebody else will call.
Release taken_from(ArrivedSum& sum) {
  return std::exchange(sum.release, [](const auto&) {});
}

template <class F>
void releasing_if_it_throws(const ArrivedSum& sum, const F& f) {
  try {
    f();
  } catch (...) {
    sum.release(nullptr);
    throw;
  }
}
}  // namespace

UpdateInBackward::UpdateInBackward(Units& units, BackwardDriver& driver, Updater& updater)
    : units_(units),
      driver_(driver),
      updater_(updater),
      ranks_(units.ranks()),
      present_(units.count()),
      disks_(updater.guard()) {
  if (!on()) return;
  ranks_ = ranks_.siblings();
  driver.send_sums_to(*this);
}

UpdateInBackward::~UpdateInBackward() {
  comparison_.release();
  forget(bounds_, comparison_);
  for (Waiting& left : waiting_) {
    left.pending.release();
    forget(left.squares, left.pending);
  }
}

void UpdateInBackward::compare_by(std::function<Terms()> terms, std::function<void(const Ranks&)> refuse) {
  terms_ = std::move(terms);
  refuse_ = std::move(refuse);
}

std::vector<std::string> UpdateInBackward::excluded(const Options& options, optim::Rule rule, const comm::Mesh& mesh) {
  std::vector<std::string> all;
  const auto add = [&](bool excludes, const std::string& what) {
    if (excludes) all.push_back(what);
  };
  add(!shard::placements_of_stage(options.stage).shards_grads(),
      "stage 0, where p.grad shows the gradients (use stage 1, 2 or 3)");
  add(rule == optim::Rule::External,
      c10::str("an optimizer that Tessera does not run itself (", optim::use_native(), ")"));
  add(options.precision.skip_nonfinite,
      "steps that are skipped when gradients are not finite (fp16; bf16 unless bf16.check_grad_overflow is false)");
  add(options.reduce_at_step, "unmanaged accumulation");
  add(options.share_params, "tessera.shared_parameters");
  add(mesh.size(comm::Axis::DpReplicate) > 1, "hybrid sharding, which reduces over replicas after the backward");
  add(options.unit_clipping > 0 && options.previous_clipping > 0, "clipping by unit beside that by the step before");
  add(options.unit_clipping > 0 && mesh.size(comm::Axis::Tp) > 1, "clipping by unit with tensor parallelism");
  return all;
}

void UpdateInBackward::reset() {
  for (const auto& unit : units_.all()) {
    unit->drop_squares();
  }
  std::fill(present_.begin(), present_.end(), false);
}

void UpdateInBackward::backward_begun() {
  units_.check_whole();
  forget_waiting();
  compared_ = refuses_ = false;
  prepare();
}

void UpdateInBackward::prepare() {
  updater_.prepare_update();
  disks_ = updater_.guard();
}

void UpdateInBackward::compare() {
  if (std::exchange(compared_, true) || !terms_) return;
  UpdateLane& lane = units_.lane();
  lane.settle();  // where no backward has begun
  lane.gather_rest();
  const Terms mine = terms_();
  refuses_ = mine.refuses;
  scale_ = mine.scale;
  if (ranks_.all() == 1) return;
  const comm::Label label = "what a backward updates by";
  const double failed = lane.has_failed() ? 1 : 0;
  bounds_ = shard::sent_to(ranks_.device, at::tensor({mine.announced, -mine.announced, failed}, at::kDouble));
  ranks_.model->all_reduce(bounds_, comm::ReduceOp::Max, label).wait();  // slices of a model run side by side
  comparison_ = ranks_.shard->all_reduce(bounds_, comm::ReduceOp::Max, label);
}

bool UpdateInBackward::refuses() {
  if (!bounds_.defined()) return refuses_;
  std::optional<c10::StreamGuard> aside;  // the answer does not wait for what the backward has queued
  if (!ranks_.device.is_cpu())
    aside.emplace(c10::impl::VirtualGuardImpl(ranks_.device.type()).getStreamFromGlobalPool(ranks_.device));
  comparison_.wait();
  const at::Tensor bounds = std::exchange(bounds_, at::Tensor()).cpu();
  const bool failed = bounds[2].item<double>() > 0;
  if (!failed) units_.lane().agreed();
  refuses_ = refuses_ || failed || bounds[0].item<double>() != -bounds[1].item<double>();
  return refuses_;
}

void UpdateInBackward::refuse() {
  units_.lane().finish();  // where the last update failed
  refuse_(ranks_);
}

void UpdateInBackward::drop() {
  compared_ = refuses_ = false;
  forget_waiting();
  reset();
}

// Lets go of `memory`, which `pending` writes to.
void UpdateInBackward::forget(at::Tensor& memory, comm::Pending& pending) const noexcept {
  shard::StreamOrder here;
  here.end(ranks_.device);
  pending = {};
  here.keep(memory);
  memory.reset();
}

// Forgets sums of a backward that threw.
void UpdateInBackward::forget_waiting() {
  updater_.drop_units();
  copies_.finish();
  units_.lane().abandon();
  forget(bounds_, comparison_);
  for (Waiting& left : std::exchange(waiting_, {})) {
    forget(left.squares, left.pending);
    left.sum.unit->on_this_stream();
    left.sum.release(nullptr);
  }
}

void UpdateInBackward::take(ArrivedSum sum) {
  bool unused = false;
  releasing_if_it_throws(sum, [&] { unused = refuses(); });
  if (unused) return sum.release(nullptr);
  const bool clips = units_.options().unit_clipping > 0;
  at::Tensor total;
  comm::Pending pending;
  releasing_if_it_throws(sum, [&] {
    sum.unit->note_squares(squares_of(sum));
    if (!clips) return;
    total = sum.unit->squares().reshape({1}).clone();
    pending = ranks_.shard->all_reduce(total, comm::ReduceOp::Sum, "norm of unit '" + sum.unit->name() + "'");
  });
  if (!clips) return update(std::move(sum), scale_);
  waiting_.push_back({std::move(sum), total, std::move(pending)});
  if (waiting_.size() > kNormsInFlight) update_oldest();
}

// Gradients that leave the device do so here.
at::Tensor UpdateInBackward::squares_of(ArrivedSum& sum) {
  const Unit& unit = *sum.unit;
  if (unit.host_grads()) {
    copies_.leave(sum.values, *unit.host_grads(), taken_from(sum));
    return unit.host_grads()->squares();
  }
  if (sum.values.defined()) return optim::squares_there(sum.values);
  return optim::squares_there(unit.owned().size(), unit.pieces({0, unit.owned().size()}), unit.grad_options());
}

void UpdateInBackward::update_oldest() {
  Waiting oldest = std::move(waiting_.front());
  waiting_.pop_front();
  double scale = 1;
  releasing_if_it_throws(oldest.sum, [&] {
    oldest.pending.wait();
    scale = optim::clip_coefficient(std::sqrt(oldest.squares.item<double>()), units_.options().unit_clipping);
  });
  update(std::move(oldest.sum), scale);
}

void UpdateInBackward::update(ArrivedSum sum, double scale) {
  std::shared_ptr<c10::Event> used;
  releasing_if_it_throws(sum, [&] {
    try {
      used = update_from(sum, scale);
    } catch (...) {
      updater_.drop_units();
      throw;
    }
  });
  sum.release(used);
}

std::shared_ptr<c10::Event> UpdateInBackward::update_from(ArrivedSum& sum, double scale) {
  Unit& unit = *sum.unit;
  unit.on_this_stream();
  units_.set_broken("a backward ended with an error after it had updated a part of the model");  // until it is over
  units_.unsharder().settle_before_update(units_[unit.params().front().id].number);
  for (size_t i = 0; i < unit.params().size(); ++i)
    present_[unit.params()[i].id] = sum.present[i];
  if (!units_.lane().takes(unit)) return updater_.update_unit(unit, sum.values, present_, scale, disks_);
  leave(sum, scale);
  return nullptr;
}

void UpdateInBackward::leave(ArrivedSum& sum, double scale) {
  Unit& unit = *sum.unit;
  if (!units_.lane().is_open()) updater_.open_lane(updater_.elsewhere(), disks_);
  if (unit.host_grads()) return updater_.leave_unit(unit, unit.gradients(), present_, scale);
  updater_.leave_unit(unit, shard::Buffer(sum.values), present_, scale,
                      [this, release = sum.release](const auto& used) {
                        release(used);
                        if (!units_.lane().is_open()) driver_.reducer().free_buckets();  // the backward is over
                      });
  taken_from(sum);
}

void UpdateInBackward::launch_end() {
  while (!waiting_.empty())
    update_oldest();
  copies_.finish();
  updater_.finish_units(present_);
  if (!refuses()) updater_.launch_gathers();
}

void UpdateInBackward::finish_end() {
  RankGuard disks = std::exchange(disks_, updater_.guard());
  updater_.finish_gathers(disks);
  driver_.reducer().free_buckets();
  units_.set_broken("");
}

}  // namespace tessera::zero
