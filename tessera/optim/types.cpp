#include "tessera/optim/types.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <map>
#include <sstream>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/optim/advice.h"

namespace tessera::optim {
namespace {

using G = GroupOptions;

constexpr double kNoBound = std::numeric_limits<double>::infinity();
constexpr Field kRate{"lr", &G::lr, 0};
constexpr Field kBetas{"betas", Field::Pair{&G::beta1, &G::beta2}, 0, 1};
constexpr Field kEps{"eps", &G::eps, 0};
constexpr Field kDecay{"weight_decay", &G::weight_decay, 0};
constexpr Field kMaximize{"maximize", &G::maximize};
constexpr Field kBias{"bias_correction", &G::bias_correction};

bool alike(const std::string& a, const std::string& b) {
  const auto low = [](char c) { return std::tolower(static_cast<unsigned char>(c)); };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](char x, char y) { return low(x) == low(y); });
}

std::string names_of(bool with_kernels_only) {
  std::string names;
  for (const Type& type : types())
    if (!with_kernels_only || has_kernel(type.rule)) names += (names.empty() ? "" : ", ") + std::string(type.name);
  return names;
}

// "beta 0" of betas.
std::string numbered(const Field& field, int which) {
  std::string name = field.name;
  if (name.size() > 3 && name.back() == 's') name.pop_back();
  return name + " " + std::to_string(which);
}

// Calls f(name, value) for every number of a field; the name of one of a pair says which.
template <class F>
void each_number(const Field& field, const GroupOptions& group, const F& f) {
  std::visit(
      [&]<class T>(const T& at) {
        if constexpr (std::is_same_v<T, Field::Pair>) {
          const bool is_none = at.first_may_be_none && group.*at.first == kOfDtype;
          if (!is_none) f(numbered(field, 0), group.*at.first);
          f(numbered(field, 1), group.*at.second);
        } else {
          f(std::string(field.name), static_cast<double>(group.*at));
        }
      },
      field.where);
}

}  // namespace

const std::vector<Type>& types() {
  static const std::vector<Type> all{{"Adam", Rule::Adam, {}, {kRate, kBetas, kEps, kBias, kDecay, kMaximize}},
                                     {"AdamW", Rule::Adam, {}, {kRate, kBetas, kEps, kBias, kDecay, kMaximize}},
                                     {"SGD",
                                      Rule::Sgd,
                                      {},
                                      {kRate,
                                       {"momentum", &G::momentum, 0},
                                       {"dampening", &G::dampening},
                                       {"nesterov", &G::nesterov},
                                       kDecay,
                                       kMaximize}},
                                     {"Lion", Rule::Lion, {.beta2 = 0.99}, {kRate, kBetas, kDecay, kMaximize}},
                                     {"Adagrad",
                                      Rule::Adagrad,
                                      {.lr = 1e-2, .eps = 1e-10},
                                      {kRate,
                                       {"lr_decay", &G::lr_decay, 0},
                                       {"initial_accumulator_value", &G::initial_accumulator_value, 0},
                                       kEps,
                                       kDecay,
                                       kMaximize}},
                                     {"Lamb",
                                      Rule::Lamb,
                                      {},
                                      {kRate,
                                       kBias,
                                       kBetas,
                                       kEps,
                                       kDecay,
                                       {"max_coeff", &G::max_coeff, 0, kNoBound, /*may_be_infinite=*/true},
                                       {"min_coeff", &G::min_coeff, 0},
                                       {"eps_inside_sqrt", &G::eps_inside_sqrt}}},
                                     {"Muon",
                                      Rule::Muon,
                                      {.lr = 0.02, .momentum = 0.95, .nesterov = true},
                                      {kRate,
                                       {"momentum", &G::momentum, 0, 1},
                                       kDecay,
                                       {"nesterov", &G::nesterov},
                                       {"ns_steps", &G::ns_steps, 1},
                                       kBetas,
                                       kEps,
                                       {"use_muon", &G::use_muon},
                                       {"adam_w_mode", &G::decoupled}}},
                                     {"Adafactor",
                                      Rule::Adafactor,
                                      {.lr = 1e-2, .eps = 1e-3},
                                      {kRate,
                                       {"beta2_decay", &G::beta2_decay},
                                       {"eps", Field::Pair{&G::eps1, &G::eps, /*first_may_be_none=*/true}, 0},
                                       {"d", &G::d, 1},
                                       kDecay,
                                       kMaximize}}};
  return all;
}

const Type* find_torch_type(const std::string& name) {
  static const Field amsgrad{"amsgrad", &G::amsgrad}, decoupled{"decoupled_weight_decay", &G::decoupled};
  static const std::vector<Type> all{
      {"Adam", Rule::External, {.decoupled = false}, {kRate, kBetas, kEps, kDecay, amsgrad}},
      {"AdamW", Rule::External, {.weight_decay = 0.01}, {kRate, kBetas, kEps, kDecay, amsgrad}},
      {"RMSprop",
       Rule::External,
       {.lr = 1e-2},
       {kRate, {"alpha", &G::alpha, 0}, kEps, kDecay, {"momentum", &G::momentum, 0}, {"centered", &G::centered}}},
      {"NAdam",
       Rule::External,
       {.lr = 2e-3, .decoupled = false, .lr_decay = 4e-3},
       {kRate, kBetas, kEps, kDecay, {"momentum_decay", &G::lr_decay, 0}, decoupled, kMaximize}},
      {"RAdam", Rule::External, {.decoupled = false}, {kRate, kBetas, kEps, kDecay, decoupled, kMaximize}},
      {"Adamax", Rule::External, {.lr = 2e-3, .decoupled = false}, {kRate, kBetas, kEps, kDecay, kMaximize}},
      {"Adadelta",
       Rule::External,
       {.lr = 1, .eps = 1e-6, .decoupled = false, .alpha = 0.9},
       {kRate, {"rho", &G::alpha, 0, 1}, kEps, kDecay, kMaximize}},
      {"ASGD",
       Rule::External,
       {.lr = 1e-2, .decoupled = false, .alpha = 0.75},
       {kRate, {"lambd", &G::lambd}, {"alpha", &G::alpha}, {"t0", &G::t0}, kDecay, kMaximize}},
      {"Rprop",
       Rule::External,
       {.lr = 1e-2},
       {kRate,
        {"etas", Field::Pair{&G::eta_minus, &G::eta_plus}, 0},
        {"step_sizes", Field::Pair{&G::step_size_min, &G::step_size_max}},
        kMaximize}}};
  const auto found = std::ranges::find_if(all, [&](const Type& one) { return one.name == name; });
  return found == all.end() ? nullptr : &*found;
}

std::string family_of(const std::string& type) {
  const std::string name = type.substr(type.find_last_of(".:") + 1);
  const bool of_torch = type.starts_with("torch.optim.") || type.starts_with("torch::optim::");
  if (find_torch_type(name) == nullptr && find_type(name) == nullptr && !of_torch) return "";
  if (name != type && !of_torch && !type.starts_with("tessera.") && !type.starts_with("tessera::")) return "";
  return name == "AdamW" ? "Adam" : name;
}

bool may_have_state(const std::string& family, const std::string& state) {
  static const std::map<std::string, std::vector<std::string>> known{
      {"Adam", {"exp_avg", "exp_avg_sq"}},
      {"SGD", {"momentum_buffer"}},
      {"Lion", {"exp_avg"}},
      {"Adagrad", {"sum"}},
      {"Lamb", {"exp_avg", "exp_avg_sq"}},
      {"Muon", {"momentum_buffer", "exp_avg", "exp_avg_sq"}}};
  const auto own = known.find(family);
  const bool is_known = std::ranges::any_of(
      known, [&](const auto& each) { return std::ranges::find(each.second, state) != each.second.end(); });
  return !is_known || own == known.end() || std::ranges::find(own->second, state) != own->second.end();
}

std::string cpp_types() {
  return names_of(/*with_kernels_only=*/false) +
         ", NAdam, RAdam, Adamax, Adadelta, ASGD, Rprop, and of torch::optim RMSprop, and Adam and AdamW with amsgrad";
}

int state_count(const OptimizerOptions& options) {
  const GroupOptions& group = options.others ? *options.others : options.defaults;
  if (options.rule != Rule::External) return state_names(options.rule, {group}).count;
  const std::string_view name = options.type == nullptr ? "Adam" : options.type->name;
  if (name == "ASGD") return 1;
  const bool has_moments = name != "RMSprop";  // or two of another kind
  if (has_moments) return 2 + (group.amsgrad ? 1 : 0);
  return 1 + (group.momentum > 0 ? 1 : 0) + (group.centered ? 1 : 0);
}

const Type* find_type(const std::string& name) {
  const auto found = std::ranges::find_if(types(), [&](const Type& one) { return alike(one.name, name); });
  return found == types().end() ? nullptr : &*found;
}

const Type& type_of(Rule rule) {
  const auto found = std::ranges::find(types(), rule, &Type::rule);
  TESSERA_ASSERT(found != types().end(), "[optim] no type has this rule");
  return *found;
}

bool has_kernel(Rule rule) {
  return rule != Rule::External && !needs_whole(rule);
}

bool needs_whole(Rule rule) {
  return rule == Rule::Lamb || rule == Rule::Muon || rule == Rule::Adafactor;
}

std::string native_types() {
  return names_of(/*with_kernels_only=*/true);
}

bool is_native_type(const std::string& type) {
  const Type* const found = find_type(type);
  return found != nullptr && has_kernel(found->rule);
}

OptimizerOptions options_of_type(const std::string& type, bool adam_w_mode) {
  const Type* const found = find_type(type);
  TESSERA_CHECK_VALUE(found != nullptr, "optim", "unknown optimizer type '", type, "'; known are ", names_of(false));
  OptimizerOptions options{.rule = found->rule, .defaults = found->defaults, .type = found};
  options.defaults.decoupled = adam_w_mode || !(alike(type, "adam") || alike(type, "muon"));
  if (found->rule == Rule::Muon) {
    options.others = options.defaults;
    options.others->use_muon = false;
    options.others->lr = 3e-4;
    options.others->beta2 = 0.95;
    options.others->eps = 1e-10;
  }
  return options;
}

std::optional<Together> wrong_together(const Type& type, const GroupOptions& group) {
  if (type.rule == Rule::Sgd && group.nesterov && (group.momentum <= 0 || group.dampening != 0))
    return Together{"nesterov",
                    c10::str("needs momentum > 0 and dampening 0, got ", group.momentum, " and ", group.dampening)};
  if (type.rule == Rule::Lamb && !(0 < group.min_coeff && group.min_coeff <= group.max_coeff))
    return Together{"min_coeff", c10::str("must be above 0 and no more than max_coeff, got ", group.min_coeff, " and ",
                                          group.max_coeff)};
  if (type.rule == Rule::Adafactor && group.beta2_decay > 0)
    return Together{"beta2_decay", c10::str("must be <= 0, got ", group.beta2_decay)};
  if (type.name == std::string_view("Rprop") && !(0 < group.eta_minus && group.eta_minus < 1 && 1 < group.eta_plus))
    return Together{"etas",
                    c10::str("must have 0 < etas[0] < 1 < etas[1], got ", group.eta_minus, " and ", group.eta_plus)};
  return {};
}

std::string wrong_in(const Type& type, const GroupOptions& group) {
  std::ostringstream wrong;
  const auto add = [&]() -> std::ostream& { return wrong << (wrong.tellp() > 0 ? "; " : ""); };
  for (const Field& field : type.fields) {
    each_number(field, group, [&](const std::string& name, double value) {
      const bool bounded = field.below < std::numeric_limits<double>::infinity();
      const bool above_all = std::isinf(value) && !field.may_be_infinite;
      if (value >= field.least && (bounded ? value < field.below : !above_all)) return;
      add() << name << " must be ";
      if (bounded)
        wrong << "in [" << field.least << ", " << field.below << ")";
      else if (std::isinf(field.least) || above_all)
        wrong << "a finite number";
      else
        wrong << ">= " << field.least;
      wrong << ", got " << value;
    });
  }
  if (const auto together = wrong_together(type, group)) add() << together->field << " " << together->text;
  return wrong.str();
}

void check(const Type& type, const GroupOptions& group, const std::string& origin, std::optional<size_t> number) {
  const std::string wrong = wrong_in(type, group);
  if (wrong.empty()) return;
  TESSERA_FAIL(c10::ValueError, "[", origin.empty() ? type.name : origin, "] ",
               number ? c10::str("param group ", *number, ": ") : "", wrong);
}

void check_has_momentum(const ScheduleOptions& schedule, bool has) {
  TESSERA_CHECK_VALUE(has || !is_torchs(schedule), "optim.schedule", name_of(schedule),
                      " cycles momentum, and the optimizer has neither betas nor momentum: set cycle_momentum to false "
                      "in scheduler.params");
}

std::string use_native() {
  return "name one of " + native_types() +
         " in the configuration, or pass one of these that Tessera runs itself: an object of torch's class in Python, "
         "of "
         "tessera::nn::make_optimizer() in C++";
}

std::string warn_of_betas(const ScheduleOptions& schedule, bool has_betas, const std::string& optimizer) {
  const auto* const cycle = std::get_if<OneCycle>(&schedule);
  if (cycle == nullptr || !cycle->cycle_momentum || has_betas) return "";
  return "[optim.schedule] OneCycle cycles betas; " + optimizer +
         " has none and keeps its momentum: set cycle_momentum to false, or take an optimizer that has betas";
}

void put_momenta(const Type& type, const ScheduleOptions& schedule, const std::vector<double>& momenta,
                 std::vector<GroupOptions>& groups) {
  if (momenta.empty()) return;
  const auto has = [&](std::string_view name) {
    return std::ranges::any_of(type.fields, [&](const Field& field) { return field.name == name; });
  };
  const bool has_betas = has("betas"), has_momentum = is_torchs(schedule) && has("momentum");
  check_has_momentum(schedule, has_betas || has_momentum);
  for (size_t i = 0; i < std::min(momenta.size(), groups.size()); ++i) {
    if (has_betas)
      groups[i].beta1 = momenta[i];
    else if (has_momentum)
      groups[i].momentum = momenta[i];
  }
}

std::string text_of(const Type& type, const GroupOptions& group) {
  std::string text;
  for (const Field& field : type.fields)
    each_number(field, group, [&](const std::string& name, double value) {
      std::array<char, 32> digits{};
      const auto [end, error] =
          std::to_chars(digits.data(), digits.data() + digits.size(), value);  // no more than it takes
      text += (text.empty() ? "" : ", ") + name + " " + std::string(digits.data(), end);
    });
  return text;
}

}  // namespace tessera::optim
