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

}  // namespace

void check(const ScheduleOptions& options, size_t groups) {
  Problems problems;
  std::visit([&](const auto& o) { find(o, groups, problems); }, options);
  problems.raise();
}

ScheduleValues evaluate(const ScheduleOptions& options, int64_t iteration, const std::vector<double>& base_lrs) {
  check(options, base_lrs.size());
  TESSERA_CHECK_VALUE(iteration >= 0, "optim.schedule", "iteration must be >= 0, got ", iteration);
  return std::visit([&](const auto& o) { return values_of(o, iteration, base_lrs); }, options);
}

}  // namespace tessera::optim
