#include "tessera/engine/notices.h"

#include <algorithm>
#include <set>
#include <sstream>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::engine {

namespace {

constexpr size_t kNamed = 8;

// The same text for all members of a list: parts of the path that are numbers, or end in one (expert_3), do not count.
std::string kind_of(const std::string& name) {
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  std::string kind;
  std::istringstream parts(name);
  for (std::string part; std::getline(parts, part, '.');) {
    size_t end = part.size();
    while (end > 0 && is_digit(part[end - 1]))
      --end;
    const bool numbered = end < part.size() && (end == 0 || part[end - 1] == '_');
    kind += (numbered ? part.substr(0, end) + "*" : part) + ".";
  }
  return kind;
}

std::string quoted(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kNamed); ++i)
    text += (i == 0 ? "'" : ", '") + names[i] + "'";
  if (names.size() > kNamed) text += c10::str(" and ", names.size() - kNamed, " more");
  return text;
}

}  // namespace

std::string nothing_trained(const std::vector<zero::ParamSpec>& params) {
  if (std::ranges::any_of(params, [](const zero::ParamSpec& spec) { return spec.group >= 0; })) return "";
  const bool frozen =
      std::ranges::none_of(params, [](const zero::ParamSpec& spec) { return spec.tensor.requires_grad(); });
  return c10::str("[initialize] nothing is trained: ",
                  params.empty() ? "the model has no parameters"
                  : frozen       ? "all parameters of the model are frozen"
                                 : "none of the parameters that the optimizer is to have requires a gradient",
                  ": until something is, this engine only evaluates");
}

std::string sequence_fault(const comm::Mesh& mesh) {
  const comm::GroupPtr sequence = mesh.group(comm::Axis::Sp);
  if (sequence == nullptr || sequence->size() == 1 || sequence->stats().all_to_all.calls > 0) return "";
  return c10::str("the mesh has ", sequence->size(),
                  " ranks along 'sp' (sequence_parallel_size), and no attention of the model has exchanged parts of a "
                  "sequence over its group of that axis: an attention needs SequenceAttention; where each part is "
                  "treated alone, parts_alone of a Recipe says so in C++; without a cut sequence the ranks train the "
                  "same twice");
}

std::vector<std::string> never_used(const std::vector<std::string>& names, const std::vector<int>& used, int steps) {
  std::set<std::string> may_be;
  for (size_t i = 0; i < names.size(); ++i)
    if (used[i] > 0 && (used[i] < steps || steps == 1)) may_be.insert(kind_of(names[i]));
  std::vector<std::string> never;
  for (size_t i = 0; i < names.size(); ++i)
    if (used[i] == 0 && !may_be.contains(kind_of(names[i]))) never.push_back(names[i]);
  return never;
}

void Notices::settle(bool mute, bool some_unused) {
  mute_ = mute;
  watches_ = !some_unused;
}

void Notices::add(const std::string& text) {
  if (!mute_) texts_.push_back(text);
}

void Notices::no_backward() {
  if (std::exchange(warned_of_step_, true)) return;
  add("[engine.step] no backward has reached this engine since the last step(): this one adds nothing to an update, "
      "and "
      "is counted as any other (accumulation, schedule); call step() once after each backward");
}

void Notices::updated(const zero::Units& units, const std::vector<bool>& present) {
  const auto came = [&](zero::ParamId id) { return present[id]; };
  if (!watches_ || std::ranges::none_of(units.trained_ids(), came)) return;
  ++updates_;
  uses_.resize(present.size());
  std::vector<std::string> names;
  std::vector<int> used;
  bool any = false;
  for (const zero::ParamId id : units.trained_ids()) {
    const zero::ParamSpec& spec = units.params()[id];
    if (!spec.tensor.requires_grad()) continue;
    Use& use = uses_[id];
    ++use.trained;
    use.used += present[id] ? 1 : 0;
    if (use.trained < updates_) continue;  // the parameter came later
    names.push_back(spec.name);
    used.push_back(use.used);
    any = any || use.used == 0;
  }
  watches_ = any && updates_ < kWatched;
  if (updates_ == 1) warn_of_unused(never_used(names, used, 1), "the first step, which has");
  if (updates_ == kWatched)
    warn_of_unused(never_used(names, used, kWatched), c10::str("all of the first ", kWatched, " steps, which have"));
}

void Notices::thawed(const zero::Units& units) {
  std::vector<std::string> names;
  for (const zero::ParamId id : units.left_out())
    if (units.params()[id].tensor.requires_grad() && thawed_.insert(id).second)
      names.push_back(units.params()[id].name);
  if (names.empty()) return;
  add(c10::str("[engine] ", quoted(names),
               ": requires gradients now, and is in no param group of the optimizer, which ",
               "does not train it; add it with add_param_group(), or build the optimizer over what is frozen, too"));
}

void Notices::warn_of_unused(const std::vector<std::string>& names, const std::string& when) {
  if (names.empty()) return;
  add(c10::str("[engine.step] ", quoted(names), ": trained, and without a gradient in ", when,
               " left what is so as it was; freeze what is not used (requires_grad false), tie by one and the same "
               "parameter, or, where other steps use it, write zero_optimization.ignore_unused_parameters true, the "
               "default, into the configuration"));
}

std::vector<std::string> Notices::take() {
  return std::exchange(texts_, {});
}

}  // namespace tessera::engine
