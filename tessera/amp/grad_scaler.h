// GradScaler: by how much a loss is multiplied so that 16-bit gradients do not vanish, and how that factor follows from
// the overflows seen. It has numbers only: the engine multiplies and divides.
#pragma once

#include <cstdint>
#include <limits>

namespace tessera::amp {

// Modes are values of this record. A static scale is `dynamic` false; no scaling at all is the static scale 1.
struct ScalerOptions {
  bool dynamic = false;
  double initial = 1;             // the static scale, or the first dynamic one
  double factor = 2;              // growth and backoff
  int64_t window = 1000;          // growth after every so many good steps in a row
  bool late_growth = false;       // the first growth after the start or an overflow comes one step later
  int64_t hysteresis = 1;         // overflow number `hysteresis` lowers the scale; those before use up the budget
  bool refill_on_good = false;    // the budget is whole again after a good step; otherwise after a growth
  double minimum = 1;             // the scale is never below
  bool error_at_minimum = false;  // an overflow with the scale at `minimum` is an error

  static ScalerOptions off() { return {}; }
  static ScalerOptions fixed(double scale) { return {.initial = scale}; }
  // torch.amp.GradScaler's defaults: no hysteresis, no minimum.
  static ScalerOptions autocast() { return {.dynamic = true, .initial = 65536, .window = 2000, .minimum = 0}; }
};

class GradScaler {
 public:
  // All that changes: enough to go on as if nothing had happened.
  struct State {
    double scale = 1;
    int64_t steps = 0;       // updates seen
    int64_t good_steps = 0;  // since the last overflow
    int64_t budget = 1;      // overflows, the next one included, until the scale is lowered
    bool overridden = false;
  };

  // Value error for scales that are not finite and positive, factor <= 1, window or hysteresis < 1.
  explicit GradScaler(const ScalerOptions& options = {});

  double scale() const { return state_.scale; }
  // Whether an unscaled backward would be a mistake.
  bool needed() const { return dynamic() || state_.overridden || state_.scale != 1; }
  bool dynamic() const { return options_.dynamic && !state_.overridden; }

  // A step ended, skipped for inf or NaN in its gradients (`overflow`) or not; the same on all ranks. State error for
  // an overflow at the minimum, where the options say so: nothing has changed then.
  void update(bool overflow);

  // Sets the present scale; counting goes on. Value error for a scale that is not finite and positive.
  void set_scale(double scale);
  // Sets a scale of the user's own, fixed from here on.
  void override_scale(double scale);

  const ScalerOptions& options() const { return options_; }
  const State& state() const { return state_; }
  void restore(const State& state);

 private:
  ScalerOptions options_;
  State state_;
};

}  // namespace tessera::amp
