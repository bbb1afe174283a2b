#include "tessera/zero/grad_progress.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <utility>

namespace tessera::zero {

namespace {

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

GradAt place_of(bool has, bool filled) {
  if (filled) return has ? GradAt::Slot : GradAt::Unseen;
  return has ? GradAt::Elsewhere : GradAt::Nowhere;
}

}  // namespace

const char* grad_state_name(GradState state) {
  constexpr std::array names{"Empty", "Accumulating", "Late", "Reducing", "Reduced"};
  return names[static_cast<size_t>(state)];
}

void GradProgress::move_to(GradState next) {
  TORCH_INTERNAL_ASSERT(may_move(state_, next), "gradients of a unit cannot go from ", grad_state_name(state_), " to ",
                        grad_state_name(next));
  state_ = next;
}

void GradProgress::move_to(Turn next) {
  using enum Turn;
  TORCH_INTERNAL_ASSERT(next == Waiting || next == Launched || (next == Over && turn_ != Launched),
                        "the calls of a unit are over after its launch");
  turn_ = next;
}

// Asserts what holds between any two changes.
void GradProgress::check() const {
  using enum GradState;
  const bool travels = state_ == Reducing || accumulates();
  TORCH_INTERNAL_ASSERT(!pooled_ || accumulates(), "contributions in a bucket, of a unit that has none");
  TORCH_INTERNAL_ASSERT(in_flight_ >= 0 && (in_flight_ == 0 || travels), in_flight_,
                        " reductions on their way, in state ", grad_state_name(state_));
  TORCH_INTERNAL_ASSERT(state_ != Reducing || in_flight_ > 0, "a reduction that is over is said to be on its way");
  TORCH_INTERNAL_ASSERT(state_ != Empty || (!has_sum_ && sums_ == 0), "a sum of gradients that are gone");
  TORCH_INTERNAL_ASSERT(fired_ >= 0 && expected_ >= 0);
}

void GradProgress::begin_backward(int expected) {
  move_to(Turn::Waiting);
  fired_ = 0;
  expected_ = expected;
  ++backward_;
  check();
}

void GradProgress::fire(ParamGrad& param) {
  if (turn_ == Turn::Launched && accumulates()) move_to(GradState::Late);
  if (std::exchange(param.fired_in_, backward_) != backward_) ++fired_;
  check();
}

void GradProgress::end_calls() {
  if (turn_ == Turn::Waiting) move_to(Turn::Over);
}

void GradProgress::come(ParamGrad& param) const {
  TORCH_INTERNAL_ASSERT(state_ != GradState::Empty, "a gradient of a unit that has none");
  param.at_ = GradAt::Slot;
}

void GradProgress::fill(ParamGrad& param) const {
  TORCH_INTERNAL_ASSERT(accumulates(), "contributions without memory");
  param.at_ = place_of(param.has(), /*filled=*/true);
}

void GradProgress::empty(ParamGrad& param) const {
  TORCH_INTERNAL_ASSERT(accumulates(), "contributions without memory");
  param.at_ = place_of(param.has(), /*filled=*/false);
}

void GradProgress::show(ParamGrad& param, bool has) const {
  TORCH_INTERNAL_ASSERT(!has || state_ != GradState::Empty, "a gradient of a unit that has none");
  param.at_ = place_of(has, param.filled());
}

uint64_t GradProgress::count_addition(ParamGrad& param) const {
  TORCH_INTERNAL_ASSERT(param.filled() && accumulates(), "an addition to contributions that are not there");
  return param.additions_++;
}

void GradProgress::restore(ParamGrad& param, bool has, bool filled, uint64_t additions) const {
  TORCH_INTERNAL_ASSERT(!(has || filled) || state_ != GradState::Empty, "a gradient of a unit that has none");
  param.at_ = place_of(has, filled);
  param.additions_ = additions;
}

void GradProgress::accumulate(bool pooled) {
  move_to(GradState::Accumulating);
  pooled_ = pooled;
  check();
}

void GradProgress::launch() {
  move_to(Turn::Launched);
  move_to(GradState::Reducing);
  pooled_ = false;
  ++in_flight_;
  check();
}

void GradProgress::launch_alone() {
  TORCH_INTERNAL_ASSERT(accumulates(), "there are no contributions that would be the sum");
  move_to(Turn::Launched);
  move_to(GradState::Reduced);
  pooled_ = false;
  has_sum_ = true;
  check();
}

void GradProgress::arrive() {
  --in_flight_;
  if (state_ == GradState::Reducing && in_flight_ == 0) move_to(GradState::Reduced);
  check();
}

void GradProgress::sum_arrived() {
  has_sum_ = true;
  check();
}

void GradProgress::restore_sums(uint64_t sums) {
  if (state_ != GradState::Empty) sums_ = std::max(sums_, sums);
  check();
}

void GradProgress::put_sums() {
  TORCH_INTERNAL_ASSERT(state_ == GradState::Empty, "sums are put where there are gradients");
  move_to(GradState::Reduced);
  has_sum_ = true;
  check();
}

void GradProgress::end(ParamGrad& param) const {
  TORCH_INTERNAL_ASSERT(state_ == GradState::Empty, "a gradient is forgotten alone");
  drop(param);
  param.additions_ = 0;
}

void GradProgress::end() {
  move_to(GradState::Empty);
  has_sum_ = pooled_ = false;
  sums_ = 0;
  check();
}

}  // namespace tessera::zero
