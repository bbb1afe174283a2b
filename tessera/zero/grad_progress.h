// GradProgress: how far the gradients of a unit are, within one optimizer step and within one backward, as one state. Every change
// has a name, and is checked: what cannot be is an internal error where it begins, not where it shows.
#pragma once

#include <cstdint>

namespace tessera::zero {

// Gradients of a unit within one optimizer step.
enum class GradState : uint8_t {
  Empty,         // nothing; persistent buffers hold old values that will be overwritten
  Accumulating,  // local contributions of this rank
  // Accumulating, but contributions came after the unit's launch in their backward (from a nested one, or a use outside of the
  // modules that own the parameter): the next reduction takes them in.
  Late,
  Reducing,  // a collective is on its way; contributions that come meanwhile lead to Accumulating
  Reduced,   // the owned range holds the sum over ranks; more may be added (Accumulating again)
};
const char* grad_state_name(GradState state);

// A unit's reduction within one backward.
enum class Turn : uint8_t {
  Waiting,   // not yet
  Over,      // all module calls that used the unit are through the backward
  Launched,  // on its way, or done
};

// Where the gradient of one parameter is since the last step, on this rank. Its slot is its memory among its unit's contributions.
enum class GradAt : uint8_t {
  Nowhere,    // there is none
  Slot,       // in the slot
  Elsewhere,  // in the sum over ranks, from an earlier backward, another rank or the user; the slot holds nothing
  Unseen,     // in the slot, but the parameter counts as one without: zeros, or what a checkpoint is about to complete
};

// The gradient of one parameter, on this rank. Its unit's GradProgress changes it.
class ParamGrad {
 public:
  GradAt at() const { return at_; }
  // Whether a gradient came since the last step; whether, while its unit accumulates, the slot's values are valid.
  bool has() const { return at_ == GradAt::Slot || at_ == GradAt::Elsewhere; }
  bool filled() const { return at_ == GradAt::Slot || at_ == GradAt::Unseen; }
  uint64_t additions() const { return additions_; }  // stochastically rounded additions to it since the last step

 private:
  friend class GradProgress;
  GradAt at_ = GradAt::Nowhere;
  uint64_t additions_ = 0, fired_in_ = 0;  // fired_in_: number of the last backward in which its hook ran
};

class GradProgress {
 public:
  GradState state() const { return state_; }
  Turn turn() const { return turn_; }
  bool accumulates() const { return state_ == GradState::Accumulating || state_ == GradState::Late; }
  // The owned range holds a sum over ranks, until Empty.
  bool has_sum() const { return has_sum_; }
  int in_flight() const { return in_flight_; }  // reductions on their way; the unit may accumulate meanwhile
  bool pooled() const { return pooled_; }       // contributions lie in a bucket of a pool
  uint64_t sums() const { return sums_; }  // additions to the sum since the last step that are rounded stochastically
  // The hooks of all parameters that require gradients ran in the running backward.
  bool complete() const { return fired_ >= expected_; }

  // Begins a new outermost backward, in which the hooks of `expected` parameters are to run.
  void begin_backward(int expected);
  // The hook of `param` ran; contributions that came past the unit's launch are late.
  void fire(ParamGrad& param);
  // All module calls that used the unit are through.
  void end_calls();

  // The gradient of one of the unit's parameters. come(): it is in the slot; fill(): so are values that a checkpoint has, which
  // restore() makes a gradient; empty(): the slot's values are no longer valid; show(): the parameter counts as one with a
  // gradient, or without; drop(): there is none. Internal error where the unit has no gradients that this could be one of.
  void come(ParamGrad& param) const;
  void fill(ParamGrad& param) const;
  void empty(ParamGrad& param) const;
  void show(ParamGrad& param, bool has) const;
  void restore(ParamGrad& param, bool has, bool filled, uint64_t additions) const;
  uint64_t count_addition(ParamGrad& param) const;
  static void drop(ParamGrad& param) { param.at_ = GradAt::Nowhere; }

  // Contributions have memory from here on.
  void accumulate(bool pooled);
  // The contributions are given away: launch() to a reduction on its way; launch_alone(), on one rank, makes them the sum.
  void launch();
  void launch_alone();
  // A reduction of this unit is over, whatever has become of it.
  void arrive();
  void sum_arrived();
  uint64_t count_sum() { return sums_++; }
  void restore_sums(uint64_t sums);  // nothing where there are no gradients
  // Sums are there without contributions: zeros, or what the user or a checkpoint has.
  void put_sums();
  // Forgets all gradients; of a parameter, once the unit has.
  void end();
  void end(ParamGrad& param) const;

 private:
  void move_to(GradState next);
  void move_to(Turn next);
  void check() const;

  GradState state_ = GradState::Empty;
  Turn turn_ = Turn::Waiting;
  bool has_sum_ = false, pooled_ = false;
  int in_flight_ = 0;
  int fired_ = 0, expected_ = 0;
  uint64_t backward_ = 0;  // the backward's number
  uint64_t sums_ = 0;
};

}  // namespace tessera::zero
