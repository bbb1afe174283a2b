#include "tessera/config/params.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>
#include <variant>

#include "tessera/base/error.h"

namespace tessera::config {
namespace {

std::optional<double> as_number(const Value& value) {
  if (const auto* v = std::get_if<int64_t>(&value.data)) {
    return double(*v);
  }
  const auto* v = std::get_if<double>(&value.data);
  return v && std::isfinite(*v) ? std::optional(*v) : std::nullopt;
}

std::optional<bool> as_flag(const Value& value) {
  if (const auto* v = std::get_if<bool>(&value.data)) return *v;
  const auto number = as_number(value);
  return number && (*number == 0 || *number == 1) ? std::optional(*number == 1) : std::nullopt;
}

// Hands out the parameters one by one and reports what is left over.
class Reader {
 public:
  Reader(std::string path, const Params& params, Report& report)
      : path_(std::move(path)), params_(params), report_(report) {}

  const Value* find(const std::string& name) {
    known_.push_back(name);
    const auto found = params_.find(name);
    return found == params_.end() || found->second.is_unset() ? nullptr : &found->second;
  }

  bool has(const std::string& name) const {
    const auto found = params_.find(name);
    return found != params_.end() && !found->second.is_unset();
  }

  void number(const std::string& name, double& out, double min = -INFINITY, double below = INFINITY) {
    if (const Value* value = find(name)) {
      const auto got = as_number(*value);
      if (got && *got >= min && *got < below) {
        out = *got;
      } else {
        const std::string least = std::isfinite(min) ? " >= " + number_text(min) : "";
        bad(name, *value, "a number" + least + (std::isfinite(below) ? " and < " + number_text(below) : ""));
      }
    }
  }

  void integer(const std::string& name, int64_t& out, int64_t min) {
    if (const Value* value = find(name)) {
      const auto got = as_number(*value);
      const bool fits = got && *got == std::floor(*got) && *got >= double(min) && *got <= 1e12;
      if (fits) {
        out = int64_t(*got);
      } else {
        bad(name, *value, min == 1 ? "a positive integer" : "an integer >= " + std::to_string(min));
      }
    }
  }

  void integer(const std::string& name, std::optional<int64_t>& out, int64_t min) {
    const auto found = params_.find(name);
    if (found != params_.end() && !found->second.is_unset()) {
      out = min;
    }
    int64_t value = min;
    integer(name, value, min);
    if (out) {
      out = value;
    }
  }

  // Reports a key whose null is a mistake, not a default.
  void not_null(const std::string& name) {
    const auto found = params_.find(name);
    if (found != params_.end() && std::holds_alternative<std::monostate>(found->second.data))
      report_.error(path_ + "." + name, "must not be null; leave it out for the default", Problem::Kind::Value);
  }

  void flag(const std::string& name, bool& out) {
    if (const Value* value = find(name)) {
      const auto got = as_flag(*value);
      if (got) {
        out = *got;
      } else {
        bad(name, *value, "true or false");
      }
    }
  }

  // One number, or a list of numbers.
  void numbers(const std::string& name, std::vector<double>& out) {
    if (const Value* value = find(name)) {
      const auto got = as_numbers(*value);
      if (got.empty()) {
        bad(name, *value, "a number or a list of numbers");
      } else {
        out = got;
      }
    }
  }

  void pair(const optim::Field& field, const optim::Field::Pair& where, optim::GroupOptions& group) {
    const Value* const value = find(field.name);
    if (value == nullptr) return;
    List parts;
    if (const auto* list = std::get_if<List>(&value->data)) parts = *list;
    const bool none = where.first_may_be_none && parts.size() == 2 && parts[0].is_unset();
    if (none) parts[0] = parts[1];
    std::vector<double> got = as_numbers(Value(parts));
    const auto fits = [&](double number) { return number >= field.least && number < field.below; };
    if (got.size() == 2 && std::ranges::all_of(got, fits)) {
      group.*where.first = none ? optim::kOfDtype : got[0];
      group.*where.second = got[1];
      return;
    }
    std::string wanted = where.first_may_be_none ? "null or a number, and a number" : "two numbers";
    if (std::isfinite(field.least)) wanted += " from " + number_text(field.least);
    if (std::isfinite(field.below)) wanted += " to below " + number_text(field.below);
    bad(field.name, *value, wanted);
  }

  // Reads a choice between ways to one result.
  void choice(const std::string& name, const std::vector<std::string>& names) {
    const Value* const value = find(name);
    if (value == nullptr) return;
    const auto* text = std::get_if<std::string>(&value->data);
    if (text == nullptr || std::ranges::find(names, *text) == names.end()) bad(name, *value, join(names, " or "));
  }

  void warmup_type(optim::WarmupType& out) {
    if (const Value* value = find("warmup_type")) {
      const auto* text = std::get_if<std::string>(&value->data);
      if (text && (*text == "log" || *text == "linear")) {
        out = *text == "log" ? optim::WarmupType::Log : optim::WarmupType::Linear;
      } else {
        bad("warmup_type", *value, "log or linear");
      }
    }
  }

  void required(const std::string& name) {
    const auto found = params_.find(name);
    if (found == params_.end() || found->second.is_unset()) {
      report_.error(path_ + "." + name, "is required");
    }
  }

  // Notes arguments of torch and of the reference that choose an implementation, not a result.
  void ignored(const std::vector<std::string>& names) { known_.insert(known_.end(), names.begin(), names.end()); }

  void refuse(const std::string& name, const std::string& text) { report_.error(path_ + "." + name, text); }

  void finish() {
    for (const auto& [name, value] : params_) {
      if (std::find(known_.begin(), known_.end(), name) == known_.end()) {
        const std::vector<std::string> near = all_nearest(name, known_);
        const std::string hint =
            near.empty() ? "allowed are " + join(known_, ", ") : "did you mean \"" + join(near, "\" or \"") + "\"?";
        report_.error(path_ + "." + name, "unknown parameter; " + hint, Problem::Kind::Unknown);
      }
    }
  }

 private:
  static std::vector<double> as_numbers(const Value& value) {
    const auto* list = std::get_if<List>(&value.data);
    std::vector<double> out;
    for (const Value& one : list ? *list : List{value}) {
      const auto number = as_number(one);
      if (!number) {
        return {};
      }
      out.push_back(*number);
    }
    return out;
  }

  void bad(const std::string& name, const Value& value, const std::string& wanted) {
    report_.error(path_ + "." + name, "must be " + wanted + ", got " + value.text(), Problem::Kind::Value);
  }

  std::string path_;
  const Params& params_;
  Report& report_;
  std::vector<std::string> known_;
};

// Reads the fields that the table has for the type.
void read_fields(Reader& in, const optim::Type& type, optim::GroupOptions& group) {
  for (const optim::Field& field : type.fields) {
    std::visit(
        [&]<class T>(const T& at) {
          if constexpr (std::is_same_v<T, optim::Field::Pair>)
            in.pair(field, at, group);
          else if constexpr (std::is_same_v<T, double optim::GroupOptions::*>)
            in.number(field.name, group.*at, field.least, field.below);
          else if constexpr (std::is_same_v<T, int64_t optim::GroupOptions::*>)
            in.integer(field.name, group.*at, static_cast<int64_t>(field.least));
          else
            in.flag(field.name, group.*at);
        },
        field.where);
  }
}

// Checks what the table does not say.
void check_adam(Reader& in) {
  bool amsgrad = false;
  in.flag("amsgrad", amsgrad);
  if (amsgrad) {
    in.refuse("amsgrad", "the native Adam has no amsgrad; set torch_adam to true");
  }
  in.ignored({"adam_w_mode", "torch_adam"});
}

void check_sgd(Reader& in, const optim::GroupOptions& group) {
  if (group.nesterov && (group.momentum <= 0 || group.dampening != 0)) {
    in.refuse("nesterov", "needs momentum > 0 and dampening 0");
  }
}

void check_lamb(Reader& in, const optim::GroupOptions& group) {
  bool amsgrad = false;
  in.flag("amsgrad", amsgrad);
  if (amsgrad) in.refuse("amsgrad", "is not served; leave it out");
  if (!(0 < group.min_coeff && group.min_coeff <= group.max_coeff)) {
    in.refuse("min_coeff", "0 < min_coeff <= max_coeff must hold");
  }
}

// What no single number says.
void check_together(Reader& in, const optim::Type& type, const optim::GroupOptions& group) {
  if (type.rule == optim::Rule::Adafactor && group.beta2_decay > 0) in.refuse("beta2_decay", "must be <= 0");
  const bool turns = 0 < group.eta_minus && group.eta_minus < 1 && 1 < group.eta_plus;
  if (type.name == std::string_view("Rprop") && !turns) in.refuse("etas", "0 < etas[0] < 1 < etas[1] must hold");
}

// Muon's `lr`, betas and eps are for both kinds of parameters; muon_lr and adam_lr go before `lr`.
void read_muon(Reader& in, const optim::Type& type, optim::OptimizerOptions& options) {
  read_fields(in, type, options.defaults);
  options.defaults.use_muon = true;
  const optim::GroupOptions usual = std::exchange(*options.others, options.defaults);
  optim::GroupOptions& others = *options.others;
  others.use_muon = false;
  if (!in.has("lr")) others.lr = usual.lr;
  if (!in.has("eps")) others.eps = usual.eps;
  if (!in.has("betas")) others.beta1 = usual.beta1, others.beta2 = usual.beta2;
  in.number("muon_lr", options.defaults.lr, 0);
  in.number("adam_lr", others.lr, 0);
  in.choice("ns_method", {"standard", "gram"});
  in.ignored({"torch_adam", "per_head_muon"});  // true of the last is refused elsewhere
}

bool flag_of(const Params& params, const std::string& name, bool fallback) {
  const auto found = params.find(name);
  return found == params.end() ? fallback : as_flag(found->second).value_or(fallback);
}

optim::ScheduleOptions read_warmup(Reader& in) {
  optim::WarmupLR o;
  in.numbers("warmup_min_lr", o.warmup_min_lr);
  in.numbers("warmup_max_lr", o.warmup_max_lr);
  in.not_null("warmup_num_steps");
  in.integer("warmup_num_steps", o.warmup_num_steps, 1);
  in.warmup_type(o.warmup_type);
  return o;
}

optim::ScheduleOptions read_warmup_decay(Reader& in) {
  optim::WarmupDecayLR o;
  in.required("total_num_steps");
  in.integer("total_num_steps", o.total_num_steps, 1);
  in.numbers("warmup_min_lr", o.warmup_min_lr);
  in.numbers("warmup_max_lr", o.warmup_max_lr);
  in.not_null("warmup_num_steps");
  in.integer("warmup_num_steps", o.warmup_num_steps, 1);
  in.warmup_type(o.warmup_type);
  return o;
}

optim::ScheduleOptions read_warmup_cosine(Reader& in) {
  optim::WarmupCosineLR o;
  in.required("total_num_steps");
  in.integer("total_num_steps", o.total_num_steps, 1);
  in.number("warmup_min_ratio", o.warmup_min_ratio);
  in.not_null("warmup_num_steps");
  in.integer("warmup_num_steps", o.warmup_num_steps, 1);
  in.number("cos_min_ratio", o.cos_min_ratio);
  in.warmup_type(o.warmup_type);
  return o;
}

optim::ScheduleOptions read_one_cycle(Reader& in) {
  optim::OneCycle o;
  in.required("cycle_min_lr");
  in.required("cycle_max_lr");
  in.numbers("cycle_min_lr", o.cycle_min_lr);
  in.numbers("cycle_max_lr", o.cycle_max_lr);
  in.number("decay_lr_rate", o.decay_lr_rate);
  in.integer("cycle_first_step_size", o.cycle_first_step_size, 1);
  in.integer("cycle_second_step_size", o.cycle_second_step_size, 0);
  in.integer("cycle_first_stair_count", o.cycle_first_stair_count, 0);
  in.integer("cycle_second_stair_count", o.cycle_second_stair_count, 0);
  in.integer("decay_step_size", o.decay_step_size, 0);
  in.flag("cycle_momentum", o.cycle_momentum);
  in.numbers("cycle_min_mom", o.cycle_min_mom);
  in.numbers("cycle_max_mom", o.cycle_max_mom);
  in.number("decay_mom_rate", o.decay_mom_rate);
  return o;
}

optim::ScheduleOptions read_range_test(Reader& in) {
  optim::LRRangeTest o;
  in.numbers("lr_range_test_min_lr", o.lr_range_test_min_lr);
  in.integer("lr_range_test_step_size", o.lr_range_test_step_size, 1);
  in.number("lr_range_test_step_rate", o.lr_range_test_step_rate);
  in.flag("lr_range_test_staircase", o.lr_range_test_staircase);
  return o;
}

// torch's argument for a schedule that goes on, which a checkpoint does here.
void check_begins(Reader& in) {
  int64_t last_epoch = -1;
  in.integer("last_epoch", last_epoch, -1);
  if (last_epoch != -1) in.refuse("last_epoch", "must be -1; a checkpoint says where a schedule goes on");
  in.ignored({"verbose"});
}

optim::ScheduleOptions read_step(Reader& in) {
  optim::StepLR o;
  in.required("step_size");
  in.integer("step_size", o.step_size, 1);
  in.number("gamma", o.gamma);
  check_begins(in);
  return o;
}

optim::ScheduleOptions read_multi_step(Reader& in) {
  optim::MultiStepLR o;
  std::vector<double> milestones;
  in.required("milestones");
  in.numbers("milestones", milestones);
  for (const double one : milestones) {
    if (one != std::floor(one)) in.refuse("milestones", "must be integers, got " + number_text(one));
    o.milestones.push_back(static_cast<int64_t>(one));
  }
  in.number("gamma", o.gamma);
  check_begins(in);
  return o;
}

optim::ScheduleOptions read_constant(Reader& in) {
  optim::ConstantLR o;
  in.number("factor", o.factor, 0);
  in.integer("total_iters", o.total_iters, 0);
  check_begins(in);
  return o;
}

optim::ScheduleOptions read_linear(Reader& in) {
  optim::LinearLR o;
  in.number("start_factor", o.start_factor, 0);
  in.number("end_factor", o.end_factor, 0);
  in.integer("total_iters", o.total_iters, 0);
  check_begins(in);
  return o;
}

optim::ScheduleOptions read_exponential(Reader& in) {
  optim::ExponentialLR o;
  in.required("gamma");
  in.number("gamma", o.gamma);
  check_begins(in);
  return o;
}

optim::ScheduleOptions read_cosine(Reader& in) {
  optim::CosineAnnealingLR o;
  in.required("T_max");
  in.integer("T_max", o.T_max, 1);
  in.number("eta_min", o.eta_min);
  check_begins(in);
  return o;
}

optim::ScheduleOptions read_polynomial(Reader& in) {
  optim::PolynomialLR o;
  in.integer("total_iters", o.total_iters, 0);
  in.number("power", o.power);
  check_begins(in);
  return o;
}

struct ScheduleType {
  const char* name;
  optim::ScheduleOptions (*read)(Reader& in);
  bool is_torchs = false;
};
const std::vector<ScheduleType>& all_schedules() {
  static const std::vector<ScheduleType> all{{"WarmupLR", read_warmup},
                                             {"WarmupDecayLR", read_warmup_decay},
                                             {"WarmupCosineLR", read_warmup_cosine},
                                             {"OneCycle", read_one_cycle},
                                             {"LRRangeTest", read_range_test},
                                             {"StepLR", read_step, true},
                                             {"MultiStepLR", read_multi_step, true},
                                             {"ConstantLR", read_constant, true},
                                             {"LinearLR", read_linear, true},
                                             {"ExponentialLR", read_exponential, true},
                                             {"CosineAnnealingLR", read_cosine, true},
                                             {"PolynomialLR", read_polynomial, true}};
  return all;
}

}  // namespace

std::vector<std::string> optimizer_types() {
  std::vector<std::string> names;
  for (const optim::Type& type : optim::types())
    names.emplace_back(type.name);
  return names;
}

std::optional<optim::OptimizerOptions> kind_of(const Optimizer& optimizer) {
  if (optim::find_type(optimizer.type) == nullptr) return std::nullopt;
  return optim::options_of_type(optimizer.type, flag_of(optimizer.params, "adam_w_mode", true));
}

std::optional<optim::OptimizerOptions> read_optimizer(const Optimizer& optimizer, Report& report) {
  if (optimizer.params.contains("max_grad_norm")) {
    report.error("optimizer.params.max_grad_norm", "is not a parameter here; use gradient_clipping");
  }
  const Params& params = optimizer.params;
  const bool torch_adam = flag_of(params, "torch_adam", false);
  auto options = kind_of(optimizer);
  if (!options) return std::nullopt;
  const bool is_adam = options->rule == optim::Rule::Adam;
  if (is_adam && torch_adam && flag_of(params, "amsgrad", false)) return std::nullopt;
  Reader in("optimizer.params", params, report);
  const optim::Type& type = *optim::find_type(optimizer.type);
  auto& group = options->defaults;
  if (is_adam && torch_adam && group.decoupled) {
    group.weight_decay = 0.01;  // the default of torch.optim.AdamW
  }
  options->rule == optim::Rule::Muon ? read_muon(in, type, *options) : read_fields(in, type, group);
  if (is_adam) check_adam(in);
  if (options->rule == optim::Rule::Sgd) check_sgd(in, group);
  if (options->rule == optim::Rule::Lamb) check_lamb(in, group);
  check_together(in, type, group);
  in.ignored({"foreach", "fused", "capturable", "set_grad_none", "max_grad_norm", "fp32_optimizer_states"});
  in.finish();
  return options;
}

std::optional<optim::OptimizerOptions> read_torch_optimizer(const Optimizer& optimizer, Report& report) {
  const auto kind = kind_of(optimizer);
  const optim::Type* const type = optim::find_torch_type(!kind                      ? optimizer.type
                                                         : kind->defaults.decoupled ? "AdamW"
                                                                                    : "Adam");
  if (type == nullptr) return std::nullopt;
  optim::OptimizerOptions options{.rule = type->rule, .defaults = type->defaults, .type = type};
  Reader in("optimizer.params", optimizer.params, report);
  read_fields(in, *type, options.defaults);
  check_together(in, *type, options.defaults);
  bool maximize = false;
  const bool has_it =
      std::ranges::any_of(type->fields, [](const auto& field) { return field.name == std::string_view("maximize"); });
  if (!has_it) in.flag("maximize", maximize);
  if (maximize) in.refuse("maximize", c10::str("torch::optim::", type->name, " of C++ has it not; leave it out"));
  if (kind) in.ignored({"adam_w_mode", "torch_adam"});
  in.ignored({"foreach", "fused", "capturable", "differentiable", "max_grad_norm", "fp32_optimizer_states"});
  in.finish();
  return options;
}

std::vector<std::string> schedule_types() {
  std::vector<std::string> names;
  for (const ScheduleType& type : all_schedules())
    names.emplace_back(type.name);
  return names;
}

std::optional<optim::ScheduleOptions> read_schedule(const Scheduler& scheduler, Report& report) {
  const auto found = std::ranges::find_if(all_schedules(), [&](const ScheduleType& type) {
    return type.is_torchs ? scheduler.type == type.name : lower(scheduler.type) == lower(type.name);
  });
  if (found == all_schedules().end()) return std::nullopt;
  Reader in("scheduler.params", scheduler.params, report);
  auto options = found->read(in);
  if (!found->is_torchs) in.ignored({"last_batch_iteration"});
  in.finish();
  return options;
}

}  // namespace tessera::config
