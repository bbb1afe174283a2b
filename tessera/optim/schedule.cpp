#include "tessera/optim/schedule.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <numbers>

#include "tessera/base/error.h"

namespace tessera::optim {
namespace {

template <class Schedule>
using Table = std::vector<ScheduleOption<Schedule>>;

constexpr int64_t kMostStairs = 1'000'000;

// Collects problems, so that one error names all of them.
class Problems {
 public:
  explicit Problems(size_t groups) : groups_(groups) {}

  template <class Schedule>
  void find(const Schedule& options) {
    for (const ScheduleOption<Schedule>& option : options_of<Schedule>())
      std::visit([&](const auto& at) { look(option, options.*at); }, option.where);
  }
  void raise() const { TESSERA_CHECK_VALUE(text_.empty(), "optim.schedule", "wrong schedule options:", text_); }

 private:
  void require(bool ok, const std::string& text) {
    if (!ok) {
      text_ += "\n  " + text;
    }
  }
  void look(const auto&, bool) {}
  void look(const auto&, WarmupType) {}
  void look(const auto& option, double value) {
    require(std::isfinite(value), std::string(option.name) + " must be a finite number");
  }
  void look(const auto& option, int64_t value) {
    const std::string range =
        option.least == 1 ? "a positive integer (at most 1e12)" : c10::str("from ", option.least, " to ", option.most);
    require(value >= option.least && value <= option.most,
            std::string(option.name) + " must be " + range + ", got " + std::to_string(value));
  }
  void look(const auto& option, const std::optional<int64_t>& value) {
    if (value) look(option, *value);
  }
  void look(const auto& option, const std::vector<double>& values) {
    require(option.may_be_empty || !values.empty(), std::string(option.name) + " must not be empty");
    require(groups_ == 0 || values.size() <= 1 || values.size() == groups_,
            std::string(option.name) + " must be one number or one for each of the " + std::to_string(groups_) +
                " param groups, got " + std::to_string(values.size()));
    for (const double value : values)
      look(option, value);
  }

  size_t groups_;
  std::string text_;
};

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

template <>
const Table<WarmupLR>& options_of<WarmupLR>() {
  using S = WarmupLR;
  static const Table<S> all{{"warmup_min_lr", &S::warmup_min_lr},
                            {"warmup_max_lr", &S::warmup_max_lr, 0, 0, false, true, /*may_be_empty=*/true},
                            {"warmup_num_steps", &S::warmup_num_steps, 1, kMostSteps, false, /*may_be_null=*/false},
                            {"warmup_type", &S::warmup_type}};
  return all;
}

template <>
const Table<WarmupDecayLR>& options_of<WarmupDecayLR>() {
  using S = WarmupDecayLR;
  static const Table<S> all{{"total_num_steps", &S::total_num_steps, 1, kMostSteps, /*required=*/true},
                            {"warmup_min_lr", &S::warmup_min_lr},
                            {"warmup_max_lr", &S::warmup_max_lr},
                            {"warmup_num_steps", &S::warmup_num_steps, 1, kMostSteps, false, /*may_be_null=*/false},
                            {"warmup_type", &S::warmup_type}};
  return all;
}

template <>
const Table<WarmupCosineLR>& options_of<WarmupCosineLR>() {
  using S = WarmupCosineLR;
  static const Table<S> all{{"total_num_steps", &S::total_num_steps, 1, kMostSteps, /*required=*/true},
                            {"warmup_min_ratio", &S::warmup_min_ratio},
                            {"warmup_num_steps", &S::warmup_num_steps, 1, kMostSteps, false, /*may_be_null=*/false},
                            {"cos_min_ratio", &S::cos_min_ratio},
                            {"warmup_type", &S::warmup_type}};
  return all;
}

template <>
const Table<OneCycle>& options_of<OneCycle>() {
  using S = OneCycle;
  static const Table<S> all{{"cycle_min_lr", &S::cycle_min_lr, 0, 0, /*required=*/true},
                            {"cycle_max_lr", &S::cycle_max_lr, 0, 0, /*required=*/true},
                            {"decay_lr_rate", &S::decay_lr_rate},
                            {"cycle_first_step_size", &S::cycle_first_step_size, 1},
                            {"cycle_second_step_size", &S::cycle_second_step_size},
                            {"cycle_first_stair_count", &S::cycle_first_stair_count, 0, kMostStairs},
                            {"cycle_second_stair_count", &S::cycle_second_stair_count, 0, kMostStairs},
                            {"decay_step_size", &S::decay_step_size},
                            {"cycle_momentum", &S::cycle_momentum},
                            {"cycle_min_mom", &S::cycle_min_mom},
                            {"cycle_max_mom", &S::cycle_max_mom},
                            {"decay_mom_rate", &S::decay_mom_rate}};
  return all;
}

template <>
const Table<LRRangeTest>& options_of<LRRangeTest>() {
  using S = LRRangeTest;
  static const Table<S> all{{"lr_range_test_min_lr", &S::lr_range_test_min_lr},
                            {"lr_range_test_step_size", &S::lr_range_test_step_size, 1},
                            {"lr_range_test_step_rate", &S::lr_range_test_step_rate},
                            {"lr_range_test_staircase", &S::lr_range_test_staircase}};
  return all;
}

std::optional<ScheduleOptions> find_schedule(std::string name) {
  std::ranges::transform(name, name.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (name == "warmuplr") return WarmupLR();
  if (name == "warmupdecaylr") return WarmupDecayLR();
  if (name == "warmupcosinelr") return WarmupCosineLR();
  if (name == "onecycle") return OneCycle();
  if (name == "lrrangetest") return LRRangeTest();
  return std::nullopt;
}

const char* warmup_name(WarmupType type) {
  return type == WarmupType::Log ? "log" : "linear";
}

void check(const ScheduleOptions& options, size_t groups) {
  Problems problems(groups);
  std::visit([&](const auto& schedule) { problems.find(schedule); }, options);
  problems.raise();
}

ScheduleValues evaluate(const ScheduleOptions& options, int64_t iteration, const std::vector<double>& base_lrs) {
  check(options, base_lrs.size());
  TESSERA_CHECK_VALUE(iteration >= 0, "optim.schedule", "iteration must be >= 0, got ", iteration);
  return std::visit([&](const auto& o) { return values_of(o, iteration, base_lrs); }, options);
}

}  // namespace tessera::optim
