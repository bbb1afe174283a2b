#include "tessera/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "tessera/base/error.h"

namespace tessera::optim {
namespace {

// Collects problems, so that one error names all of them.
class Problems {
 public:
  void require(bool ok, const std::string& text) {
    if (!ok) {
      text_ += "\n  " + text;
    }
  }
  void positive(const char* key, int64_t value) {
    require(value > 0 && value <= 1'000'000'000'000,
            std::string(key) + " must be a positive integer (at most 1e12), got " + std::to_string(value));
  }
  void stairs(const char* key, int64_t value) {
    require(value >= 0 && value <= 1'000'000,
            std::string(key) + " must be from 0 to 1000000, got " + std::to_string(value));
  }
  void finite(const char* key, double value) {
    require(std::isfinite(value), std::string(key) + " must be a finite number");
  }
  void per_group(const char* key, const std::vector<double>& values, size_t groups, bool required) {
    require(!required || !values.empty(), std::string(key) + " must not be empty");
    require(groups == 0 || values.size() <= 1 || values.size() == groups,
            std::string(key) + " must be one number or one for each of the " + std::to_string(groups) +
                " param groups, got " + std::to_string(values.size()));
    for (double value : values) {
      finite(key, value);
    }
  }
  void raise() const { TESSERA_CHECK_VALUE(text_.empty(), "optim.schedule", "wrong schedule options:", text_); }

 private:
  std::string text_;
};

void find(const WarmupLR& o, size_t groups, Problems& problems) {
  problems.positive("warmup_num_steps", o.warmup_num_steps);
  problems.per_group("warmup_min_lr", o.warmup_min_lr, groups, true);
  problems.per_group("warmup_max_lr", o.warmup_max_lr, groups, false);
}

void find(const WarmupDecayLR& o, size_t groups, Problems& problems) {
  problems.positive("total_num_steps", o.total_num_steps);
  problems.positive("warmup_num_steps", o.warmup_num_steps);
  problems.per_group("warmup_min_lr", o.warmup_min_lr, groups, true);
  problems.per_group("warmup_max_lr", o.warmup_max_lr, groups, true);
}

void find(const WarmupCosineLR& o, size_t groups, Problems& problems) {
  problems.positive("total_num_steps", o.total_num_steps);
  problems.positive("warmup_num_steps", o.warmup_num_steps);
  problems.finite("warmup_min_ratio", o.warmup_min_ratio);
  problems.finite("cos_min_ratio", o.cos_min_ratio);
}

void find(const OneCycle& o, size_t groups, Problems& problems) {
  problems.per_group("cycle_min_lr", o.cycle_min_lr, groups, true);
  problems.per_group("cycle_max_lr", o.cycle_max_lr, groups, true);
  problems.positive("cycle_first_step_size", o.cycle_first_step_size);
  problems.require(o.cycle_second_step_size.value_or(0) >= 0, "cycle_second_step_size must be >= 0");
  problems.stairs("cycle_first_stair_count", o.cycle_first_stair_count);
  problems.stairs("cycle_second_stair_count", o.cycle_second_stair_count.value_or(0));
  problems.require(o.decay_step_size >= 0, "decay_step_size must be >= 0");
  problems.finite("decay_lr_rate", o.decay_lr_rate);
  problems.finite("decay_mom_rate", o.decay_mom_rate);
  problems.per_group("cycle_min_mom", o.cycle_min_mom, groups, true);
  problems.per_group("cycle_max_mom", o.cycle_max_mom, groups, true);
}

void find(const LRRangeTest& o, size_t groups, Problems& problems) {
  problems.per_group("lr_range_test_min_lr", o.lr_range_test_min_lr, groups, true);
  problems.positive("lr_range_test_step_size", o.lr_range_test_step_size);
  problems.finite("lr_range_test_step_rate", o.lr_range_test_step_rate);
}

void find(const StepLR& o, size_t, Problems& problems) {
  problems.positive("step_size", o.step_size);
  problems.finite("gamma", o.gamma);
}

void find(const MultiStepLR& o, size_t, Problems& problems) {
  problems.finite("gamma", o.gamma);
}

void find(const ConstantLR& o, size_t, Problems& problems) {
  problems.require(o.factor > 0 && o.factor <= 1, "factor must be above 0 and at most 1");
  problems.require(o.total_iters >= 0, "total_iters must be >= 0");
}

void find(const LinearLR& o, size_t, Problems& problems) {
  problems.require(o.start_factor > 0 && o.start_factor <= 1, "start_factor must be above 0 and at most 1");
  problems.require(o.end_factor >= 0 && o.end_factor <= 1, "end_factor must be from 0 to 1");
  problems.require(o.total_iters >= 0, "total_iters must be >= 0");
}

void find(const ExponentialLR& o, size_t, Problems& problems) {
  problems.finite("gamma", o.gamma);
}

void find(const CosineAnnealingLR& o, size_t, Problems& problems) {
  problems.positive("T_max", o.T_max);
  problems.finite("eta_min", o.eta_min);
}

void find(const PolynomialLR& o, size_t, Problems& problems) {
  problems.require(o.total_iters >= 0, "total_iters must be >= 0");
  problems.finite("power", o.power);
}

double of_group(const std::vector<double>& values, size_t group) {
  return values.size() == 1 ? values[0] : values[group];
}

// The warm-up needs two steps: with one, the logarithm would divide by ln(1).
int64_t warmup_steps(int64_t configured) {
  return std::max<int64_t>(2, configured);
}

// Share of the warm-up that is done at `last`, the number of the last finished batch; last < steps.
double warmup_share(WarmupType type, int64_t last, int64_t steps) {
  if (type == WarmupType::Linear) {
    return double(last) / double(steps);
  }
  return (1.0 / std::log(double(steps))) * std::log(double(last + 1));
}

ScheduleValues values_of(const WarmupLR& o, int64_t iteration, const std::vector<double>& base) {
  const int64_t steps = warmup_steps(o.warmup_num_steps);
  const int64_t last = iteration - 1;
  ScheduleValues out;
  for (size_t g = 0; g < base.size(); ++g) {
    const double low = of_group(o.warmup_min_lr, g);
    const double high = o.warmup_max_lr.empty() ? base[g] : of_group(o.warmup_max_lr, g);
    const double share = last < 0 ? 0 : last < steps ? warmup_share(o.warmup_type, last, steps) : 1.0;
    out.lr.push_back(low + (high - low) * share);
  }
  return out;
}

ScheduleValues values_of(const WarmupDecayLR& o, int64_t iteration, const std::vector<double>& base) {
  const int64_t steps = warmup_steps(o.warmup_num_steps);
  const int64_t last = iteration - 1;
  double share = 0;
  if (last >= steps) {
    const double length = std::max(1.0, double(o.total_num_steps - steps));
    share = std::max(0.0, double(o.total_num_steps - last) / length);
  } else if (last >= 0) {
    share = warmup_share(o.warmup_type, last, steps);
  }
  ScheduleValues out;
  for (size_t g = 0; g < base.size(); ++g) {
    const double low = of_group(o.warmup_min_lr, g);
    out.lr.push_back(low + (of_group(o.warmup_max_lr, g) - low) * share);
  }
  return out;
}

ScheduleValues values_of(const WarmupCosineLR& o, int64_t iteration, const std::vector<double>& base) {
  const int64_t steps = warmup_steps(o.warmup_num_steps);
  const int64_t last = iteration - 1;
  double ratio = 0;
  if (last >= steps) {
    const double done = double(last - steps + 1);
    const double length = double(o.total_num_steps - steps);
    const double cosine = done < length ? (1 + std::cos(std::numbers::pi * done / length)) / 2 : 0;
    ratio = std::max(0.0, o.cos_min_ratio + (1.0 - o.cos_min_ratio) * cosine);
  } else if (last >= 0) {
    ratio = o.warmup_min_ratio + (1.0 - o.warmup_min_ratio) * warmup_share(o.warmup_type, last, steps);
  }
  ScheduleValues out;
  for (double lr : base) {
    out.lr.push_back(lr * ratio);
  }
  return out;
}

// Height of the triangle at `iteration` in (0, first + second]: 0 at both ends, 1 after the first
// half.
double triangle(const OneCycle& o, int64_t iteration, int64_t first, int64_t second) {
  const int64_t total = first + second;
  const bool rising = iteration <= first;
  const int64_t stairs =
      rising ? o.cycle_first_stair_count : o.cycle_second_stair_count.value_or(o.cycle_first_stair_count);
  const int64_t done = rising ? iteration : total - iteration;
  const int64_t length = rising ? first : second;
  if (stairs > 0) {  // whole numbers: rounding must not move an iteration to the stair below
    const int64_t stair = done * stairs / length;
    return double(stair) / double(stairs);
  }
  return double(done) / double(length);
}

ScheduleValues values_of(const OneCycle& o, int64_t iteration, const std::vector<double>& base) {
  const int64_t first = o.cycle_first_step_size;
  const int64_t second = o.cycle_second_step_size.value_or(first);
  ScheduleValues out;
  for (size_t g = 0; g < base.size(); ++g) {
    const double low = of_group(o.cycle_min_lr, g), high = of_group(o.cycle_max_lr, g);
    const double low_mom = of_group(o.cycle_min_mom, g), high_mom = of_group(o.cycle_max_mom, g);
    double lr = low;
    double momentum = low_mom;  // what construction sets; the first step goes to the upper end
    if (iteration > first + second) {
      const double past = double(iteration - first - second);
      const double periods = o.decay_step_size > 0 ? past / double(o.decay_step_size) : 0;
      lr = low / (1 + o.decay_lr_rate * periods);
      momentum = high_mom * (1 + o.decay_mom_rate * periods);
    } else if (iteration > 0) {
      const double height = triangle(o, iteration, first, second);
      lr = low + (high - low) * height;
      momentum = high_mom - (high_mom - low_mom) * height;
    }
    out.lr.push_back(lr);
    if (o.cycle_momentum) {
      out.momentum.push_back(momentum);
    }
  }
  return out;
}

ScheduleValues values_of(const LRRangeTest& o, int64_t iteration, const std::vector<double>& base) {
  double periods = double(iteration) / double(o.lr_range_test_step_size);
  if (o.lr_range_test_staircase) {
    periods = std::floor(periods);
  }
  ScheduleValues out;
  for (size_t g = 0; g < base.size(); ++g) {
    out.lr.push_back(of_group(o.lr_range_test_min_lr, g) * (1 + o.lr_range_test_step_rate * periods));
  }
  return out;
}

// The schedules of torch: the rate after iteration k, of the rate before it. torch computes each of the last one, in these
// operations; a closed formula has other last bits.
struct Rate {
  double base, lr;
};

// Rounded on every processor: not one operation with a sum.
[[gnu::noinline]] double product(double a, double b) {
  return a * b;
}

double next(const StepLR& o, int64_t k, Rate r) {
  return k == 0 || k % o.step_size != 0 ? r.lr : r.lr * o.gamma;
}

double next(const MultiStepLR& o, int64_t k, Rate r) {
  const auto times = std::ranges::count(o.milestones, k);
  return times == 0 ? r.lr : r.lr * std::pow(o.gamma, static_cast<double>(times));
}

double next(const ConstantLR& o, int64_t k, Rate r) {
  if (k == 0) return r.lr * o.factor;
  return k == o.total_iters ? r.lr * (1.0 / o.factor) : r.lr;
}

double next(const LinearLR& o, int64_t k, Rate r) {
  if (k == 0) return r.lr * o.start_factor;
  if (k > o.total_iters) return r.lr;
  const double length = o.end_factor - o.start_factor;
  return r.lr * (1.0 + length / (product(double(o.total_iters), o.start_factor) + product(double(k - 1), length)));
}

double next(const ExponentialLR& o, int64_t k, Rate r) {
  return k == 0 ? r.lr : r.lr * o.gamma;
}

double next(const CosineAnnealingLR& o, int64_t k, Rate r) {
  if (k == 0) return r.lr;
  const double pi = std::numbers::pi, length = double(o.T_max);
  if ((k - 1 - o.T_max) % (2 * o.T_max) == 0) return r.lr + (r.base - o.eta_min) * (1 - std::cos(pi / length)) / 2;
  const double ratio = (1 + std::cos(pi * double(k) / length)) / (1 + std::cos(pi * double(k - 1) / length));
  return product(ratio, r.lr - o.eta_min) + o.eta_min;
}

double next(const PolynomialLR& o, int64_t k, Rate r) {
  if (k == 0 || k > o.total_iters) return r.lr;
  const double length = double(o.total_iters);
  return r.lr * std::pow((1.0 - double(k) / length) / (1.0 - double(k - 1) / length), o.power);
}

template <class Options>
concept Recursive = requires(const Options& options) { next(options, int64_t{}, Rate{}); };

template <Recursive Options>
ScheduleValues values_from(const Options& o, int64_t iteration, const std::vector<double>& base, ScheduleCursor at) {
  if (at.iteration < 0 || at.iteration > iteration || at.lr.size() != base.size()) at = {-1, base};
  for (size_t g = 0; g < base.size(); ++g)
    for (int64_t k = at.iteration + 1; k <= iteration; ++k)
      at.lr[g] = next(o, k, {base[g], at.lr[g]});
  return {.lr = at.lr, .momentum = {}};
}

}  // namespace

void check(const ScheduleOptions& options, size_t groups) {
  Problems problems;
  std::visit([&](const auto& o) { find(o, groups, problems); }, options);
  problems.raise();
}

ScheduleValues evaluate(const ScheduleOptions& options, int64_t iteration, const std::vector<double>& base_lrs,
                        ScheduleCursor* cursor) {
  check(options, base_lrs.size());
  TESSERA_CHECK_VALUE(iteration >= 0, "optim.schedule", "iteration must be >= 0, got ", iteration);
  return std::visit(
      [&]<class Options>(const Options& o) {
        if constexpr (Recursive<Options>) {
          ScheduleValues values = values_from(o, iteration, base_lrs, cursor != nullptr ? *cursor : ScheduleCursor());
          if (cursor != nullptr) *cursor = {iteration, values.lr};
          return values;
        } else {
          return values_of(o, iteration, base_lrs);
        }
      },
      options);
}

}  // namespace tessera::optim
