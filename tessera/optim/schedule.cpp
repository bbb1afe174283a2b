#include "tessera/optim/schedule.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <numbers>
#include <type_traits>

#include "tessera/base/error.h"

namespace tessera::optim {
namespace {

// Collects problems, so that one error names all of them.
class Problems {
 public:
  explicit Problems(size_t groups) : groups_(groups) {}

  template <class Schedule>
  void find(const Schedule& options) {
    for (const ScheduleOption<Schedule>& option : options_of<Schedule>())
      std::visit([&](const auto& at) { look(option, options.*at); }, option.where);
  }
  void find_together(const ScheduleOptions& options) {
    const auto [name, wrong] = wrong_together(options);
    require(wrong.empty(), name + " " + wrong);
  }
  void raise() const { TESSERA_CHECK_VALUE(text_.empty(), "optim.schedule", "wrong schedule options:", text_); }

 private:
  void require(bool ok, const std::string& text) {
    if (!ok) {
      text_ += "\n  " + text;
    }
  }
  void look(const auto&, bool) {}
  template <class Choice>
    requires std::is_enum_v<Choice>
  void look(const auto&, Choice) {}
  void look(const auto&, const std::vector<int64_t>&) {}
  void look(const auto& option, double value) {
    const std::string wrong = wrong_number(value, option.from, option.above, option.to);
    require(wrong.empty(), std::string(option.name) + " " + wrong);
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

// Those of torch that compute a rate of the number of steps alone, in torch's operations.
ScheduleValues values_of(const CosineAnnealingWarmRestarts& o, int64_t iteration, const std::vector<double>& base) {
  double done = double(iteration), length = double(o.T_0);
  if (o.T_mult == 1) done = double(iteration % o.T_0);
  for (; done >= length; length *= double(o.T_mult))
    done -= length;
  ScheduleValues out;
  for (const double lr : base)
    out.lr.push_back(o.eta_min + product(lr - o.eta_min, 1 + std::cos(std::numbers::pi * done / length)) / 2);
  return out;
}

ScheduleValues values_of(const CyclicLR& o, int64_t iteration, const std::vector<double>& base) {
  const double up = double(o.step_size_up), total = up + double(o.step_size_down.value_or(o.step_size_up));
  const double ratio = up / total;
  const double cycle = std::floor(1 + double(iteration) / total);
  const double x = 1.0 + double(iteration) / total - cycle;
  const double height = x <= ratio ? x / ratio : (x - 1) / (ratio - 1);
  double scale = 1;
  if (o.mode == CycleMode::Triangular2) scale = 1 / std::pow(2.0, cycle - 1);
  if (o.mode == CycleMode::ExpRange) scale = std::pow(o.gamma, double(iteration));
  ScheduleValues out;
  for (size_t g = 0; g < base.size(); ++g) {
    const double low = of_group(o.base_lr, g), low_mom = of_group(o.base_momentum, g);
    const double high_mom = of_group(o.max_momentum, g);
    out.lr.push_back(low + product((of_group(o.max_lr, g) - low) * height, scale));
    if (o.cycle_momentum) out.momentum.push_back(high_mom - product((high_mom - low_mom) * height, scale));
  }
  return out;
}

// A phase of OneCycleLR: from which values to which, of four by name, and where it ends.
struct Phase {
  double end;
  double from_lr, to_lr, from_momentum, to_momentum;
};

std::vector<Phase> phases_of(const OneCycleLR& o, size_t group) {
  const double high = of_group(o.max_lr, group), first = high / o.div_factor, last = first / o.final_div_factor;
  const double low_mom = of_group(o.base_momentum, group), high_mom = of_group(o.max_momentum, group);
  const double steps = double(o.steps()), end = double(o.steps() - 1);
  const double rise = product(o.pct_start, steps) - 1;
  if (!o.three_phase) return {{rise, first, high, high_mom, low_mom}, {end, high, last, low_mom, high_mom}};
  return {{rise, first, high, high_mom, low_mom},
          {product(2 * o.pct_start, steps) - 2, high, first, low_mom, high_mom},
          {end, first, last, high_mom, high_mom}};
}

double annealed(AnnealStrategy how, double from, double to, double share) {
  if (how == AnnealStrategy::Linear) return product(to - from, share) + from;
  return to + product((from - to) / 2.0, std::cos(product(std::numbers::pi, share)) + 1);
}

ScheduleValues values_of(const OneCycleLR& o, int64_t iteration, const std::vector<double>& base) {
  TESSERA_CHECK_VALUE(iteration <= o.steps(), "optim.schedule", "OneCycleLR is of ", o.steps(),
                      " steps, and this is step ", iteration, ": make its total_steps as many as the run has");
  ScheduleValues out;
  for (size_t g = 0; g < base.size(); ++g) {
    const std::vector<Phase> phases = phases_of(o, g);
    double begin = 0;
    size_t i = 0;
    for (; i + 1 < phases.size() && double(iteration) > phases[i].end; ++i)
      begin = phases[i].end;
    const Phase& phase = phases[i];
    TESSERA_CHECK_VALUE(phase.end != begin, "optim.schedule", "OneCycleLR of ", o.steps(), " steps and pct_start ",
                        o.pct_start, " has a phase of no step, which it would divide by: choose another pct_start");
    const double share = (double(iteration) - begin) / (phase.end - begin);
    out.lr.push_back(annealed(o.anneal_strategy, phase.from_lr, phase.to_lr, share));
    if (o.cycle_momentum)
      out.momentum.push_back(annealed(o.anneal_strategy, phase.from_momentum, phase.to_momentum, share));
  }
  return out;
}

template <class Options>
inline constexpr bool kOfSteps = std::is_same_v<Options, CosineAnnealingWarmRestarts> ||
                                 std::is_same_v<Options, CyclicLR> || std::is_same_v<Options, OneCycleLR>;

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

std::pair<std::string, std::string> wrong_together(const ScheduleOptions& options) {
  const auto* one = std::get_if<OneCycleLR>(&options);
  if (one == nullptr) return {};
  if (!one->total_steps && (!one->epochs || !one->steps_per_epoch))
    return {"total_steps", "is required, or epochs and steps_per_epoch are"};
  if (one->div_factor == 0) return {"div_factor", "must not be 0"};
  if (one->final_div_factor == 0) return {"final_div_factor", "must not be 0"};
  return {};
}

namespace {

struct Named {
  const char* name;
  ScheduleOptions options;
};
const std::vector<Named>& named() {
  static const std::vector<Named> all{{"WarmupLR", WarmupLR()},
                                      {"WarmupDecayLR", WarmupDecayLR()},
                                      {"WarmupCosineLR", WarmupCosineLR()},
                                      {"OneCycle", OneCycle()},
                                      {"LRRangeTest", LRRangeTest()},
                                      {"StepLR", StepLR()},
                                      {"MultiStepLR", MultiStepLR()},
                                      {"ConstantLR", ConstantLR()},
                                      {"LinearLR", LinearLR()},
                                      {"ExponentialLR", ExponentialLR()},
                                      {"CosineAnnealingLR", CosineAnnealingLR()},
                                      {"PolynomialLR", PolynomialLR()},
                                      {"CosineAnnealingWarmRestarts", CosineAnnealingWarmRestarts()},
                                      {"CyclicLR", CyclicLR()},
                                      {"OneCycleLR", OneCycleLR()}};
  return all;
}

std::string lower(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

}  // namespace

bool is_torchs(const ScheduleOptions& options) {
  return std::visit([]<class Options>(const Options&) { return Recursive<Options> || kOfSteps<Options>; }, options);
}

const char* name_of(const ScheduleOptions& options) {
  return named()[options.index()].name;  // in the order of the variant
}

std::optional<ScheduleOptions> find_schedule(const std::string& name) {
  for (const Named& one : named())
    if (name == one.name || (!is_torchs(one.options) && lower(name) == lower(one.name))) return one.options;
  return std::nullopt;
}

std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  for (const Named& one : named())
    names.emplace_back(one.name);
  return names;
}

std::string wrong_number(double value, double from, bool above, double to) {
  if (!std::isfinite(value)) return "must be a finite number";
  if ((above ? value > from : value >= from) && value <= to) return "";
  return c10::str("must be ", above ? "above " : "from ", from, above ? " and at most " : " to ", to);
}

const char* warmup_name(WarmupType type) {
  return names_of(type)[static_cast<size_t>(type)].c_str();
}

void check(const ScheduleOptions& options, size_t groups) {
  Problems problems(groups);
  std::visit([&](const auto& schedule) { problems.find(schedule); }, options);
  problems.find_together(options);
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
