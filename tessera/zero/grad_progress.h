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

// The gradient of one parameter, on this rank.
class ParamGrad {
 public:
  bool has() const { return has_; }                  // the parameter saw a gradient since the last step
  bool filled() const { return filled_; }            // while its unit accumulates: the contributions hold a gradient
  uint64_t additions() const { return additions_; }  // stochastically rounded additions to it since the last step

  void come() { has_ = filled_ = true; }
  void fill() { filled_ = true; }
  void empty_slot() { filled_ = false; }
  void show(bool has) { has_ = has; }  // some rank has a gradient, or the user says so
  void drop() { has_ = filled_ = false; }
  void end() { drop(), additions_ = 0; }
  uint64_t count_addition() { return additions_++; }
  void restore(bool has, bool filled, uint64_t additions) { has_ = has, filled_ = filled, additions_ = additions; }

 private:
  friend class GradProgress;
  bool has_ = false, filled_ = false;
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
  // Forgets all gradients.
  void end();

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
