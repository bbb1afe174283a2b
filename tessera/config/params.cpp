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
      report_.error(path_of(name), "must not be null; leave it out for the default", Problem::Kind::Value);
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

  void integers(const std::string& name, std::vector<int64_t>& out) {
    std::vector<double> got;
    numbers(name, got);
    for (const double one : got) {
      if (one != std::floor(one) || std::abs(one) > 1e12) refuse(name, "must be integers, got " + number_text(one));
      out.push_back(static_cast<int64_t>(one));
    }
  }

  // A number of a schedule, inside its bounds.
  template <class Option>
  void number_of(const Option& option, double& out) {
    number(option.name, out);
    const std::string wrong = optim::wrong_number(out, option.from, option.above, option.to);
    if (!wrong.empty()) refuse(option.name, wrong);
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

  template <class Choice>
  void one_of(const std::string& name, Choice& out) {
    const std::vector<std::string>& names = optim::names_of(out);
    choice(name, names);
    const auto found = params_.find(name);
    const auto* text = found == params_.end() ? nullptr : std::get_if<std::string>(&found->second.data);
    const auto at = text == nullptr ? names.end() : std::ranges::find(names, *text);
    if (at != names.end()) out = static_cast<Choice>(at - names.begin());
  }

  void required(const std::string& name) {
    const auto found = params_.find(name);
    if (found == params_.end() || found->second.is_unset()) {
      report_.error(path_of(name), "is required");
    }
  }

  // Notes arguments of torch and of the reference that choose an implementation, not a result.
  void ignored(const std::vector<std::string>& names) { known_.insert(known_.end(), names.begin(), names.end()); }

  void refuse(const std::string& name, const std::string& text) { report_.error(path_of(name), text); }

  void finish() {
    for (const auto& [name, value] : params_) {
      if (std::find(known_.begin(), known_.end(), name) == known_.end()) {
        const std::vector<std::string> near = all_nearest(name, known_);
        const std::string hint =
            near.empty() ? "allowed are " + join(known_, ", ") : "did you mean \"" + join(near, "\" or \"") + "\"?";
        report_.error(path_of(name), "unknown parameter; " + hint, Problem::Kind::Unknown);
      }
    }
  }

 private:
  std::string path_of(const std::string& name) const { return path_.empty() ? name : path_ + "." + name; }

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
    report_.error(path_of(name), "must be " + wanted + ", got " + value.text(), Problem::Kind::Value);
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

void check_lamb(Reader& in) {
  bool amsgrad = false;
  in.flag("amsgrad", amsgrad);
  if (amsgrad) in.refuse("amsgrad", "is not served; leave it out");
}

// What no single number says.
void check_together(Reader& in, const optim::Type& type, const optim::GroupOptions& group) {
  if (const auto wrong = optim::wrong_together(type, group)) in.refuse(wrong->field, wrong->text);
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

bool has_maximize(const optim::Type& type) {
  return std::ranges::any_of(type.fields, [](const auto& field) { return field.name == std::string_view("maximize"); });
}

// Reads the options that the table has for a schedule.
template <class Schedule>
void read_options(Reader& in, Schedule& schedule) {
  for (const optim::ScheduleOption<Schedule>& option : optim::options_of<Schedule>()) {
    if (option.required) in.required(option.name);
    if (!option.may_be_null) in.not_null(option.name);
    std::visit(
        [&]<class T>(T Schedule::* const& at) {
          if constexpr (std::is_same_v<T, bool>)
            in.flag(option.name, schedule.*at);
          else if constexpr (std::is_same_v<T, double>)
            in.number_of(option, schedule.*at);
          else if constexpr (std::is_same_v<T, std::vector<double>>)
            in.numbers(option.name, schedule.*at);
          else if constexpr (std::is_same_v<T, std::vector<int64_t>>)
            in.integers(option.name, schedule.*at);
          else if constexpr (std::is_enum_v<T>)
            in.one_of(option.name, schedule.*at);
          else
            in.integer(option.name, schedule.*at, option.least);
        },
        option.where);
  }
}

// torch's argument for a schedule that goes on, which a checkpoint does here.
void check_begins(Reader& in) {
  int64_t last_epoch = -1;
  in.integer("last_epoch", last_epoch, -1);
  if (last_epoch != -1) in.refuse("last_epoch", "must be -1; a checkpoint says where a schedule goes on");
  in.ignored({"verbose"});
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
    group.weight_decay = optim::find_torch_type("AdamW")->defaults.weight_decay;
  }
  options->rule == optim::Rule::Muon ? read_muon(in, type, *options) : read_fields(in, type, group);
  if (is_adam) check_adam(in);
  if (options->rule == optim::Rule::Lamb) check_lamb(in);
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
  if (!has_maximize(*type)) in.flag("maximize", maximize);
  if (kind) in.ignored({"adam_w_mode", "torch_adam"});
  in.ignored({"foreach", "fused", "capturable", "differentiable", "max_grad_norm", "fp32_optimizer_states"});
  in.finish();
  return options;
}

void refuse_outside_python(const Optimizer& optimizer, const optim::Type& type, Report& report) {
  if (!has_maximize(type) && flag_of(optimizer.params, "maximize", false))
    report.error("optimizer.params.maximize",
                 c10::str("torch::optim::", type.name, " of C++ has it not; leave it out"));
}

std::optional<optim::ScheduleOptions> read_schedule(const Scheduler& scheduler, Report& report,
                                                    const std::string& path) {
  auto options = optim::find_schedule(scheduler.type);
  if (!options) return options;
  Reader in(path, scheduler.params, report);
  std::visit([&](auto& schedule) { read_options(in, schedule); }, *options);
  if (std::holds_alternative<optim::CyclicLR>(*options)) {
    if (in.has("scale_fn")) in.refuse("scale_fn", "is a function, which a program alone can give a schedule");
    in.choice("scale_mode", {"cycle", "iterations"});  // of scale_fn
    in.ignored({"scale_fn"});
  }
  if (const auto [name, wrong] = optim::wrong_together(*options); !wrong.empty()) in.refuse(name, wrong);
  if (optim::is_torchs(*options))
    check_begins(in);
  else
    in.ignored({"last_batch_iteration"});
  in.finish();
  return options;
}

optim::ScheduleOptions schedule_of(const std::string& type, const Params& arguments) {
  Report report;
  auto options = read_schedule({type, arguments}, report, "");
  TESSERA_CHECK_VALUE(options, "lr_schedules", "there is no schedule ", type);
  std::string wrong;
  for (const Problem& problem : report.errors())
    wrong += (wrong.empty() ? "" : "; ") + problem.path + " " + problem.text;
  TESSERA_CHECK_VALUE(wrong.empty(), "lr_schedules", wrong);
  return *options;
}

}  // namespace tessera::config
