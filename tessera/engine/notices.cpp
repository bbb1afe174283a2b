#include "tessera/engine/notices.h"

#include <algorithm>
#include <set>
#include <sstream>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::engine {

namespace {

constexpr size_t kNamed = 8;

// The same for all members of a list: parts of the path that are numbers do not count.
std::string kind_of(const std::string& name) {
  std::string kind;
  std::istringstream parts(name);
  for (std::string part; std::getline(parts, part, '.');) {
    const bool number = !part.empty() && std::ranges::all_of(part, [](char c) { return c >= '0' && c <= '9'; });
    kind += (number ? "*" : part) + ".";
  }
  return kind;
}

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kNamed); ++i)
    text += (i == 0 ? "'" : ", '") + names[i] + "'";
  if (names.size() > kNamed) text += c10::str(" and ", names.size() - kNamed, " more");
  return text;
}

}  // namespace

std::vector<std::string> never_used(const std::vector<std::string>& names, const std::vector<bool>& used) {
  std::set<std::string> kinds;
  for (size_t i = 0; i < names.size(); ++i)
    if (used[i]) kinds.insert(kind_of(names[i]));
  std::vector<std::string> never;
  for (size_t i = 0; i < names.size(); ++i)
    if (!kinds.contains(kind_of(names[i]))) never.push_back(names[i]);
  return never;
}

void Notices::settle(bool mute, bool some_unused) {
  mute_ = mute;
  told_of_unused_ = some_unused;
}

void Notices::add(bool& told, const std::string& text) {
  if (!std::exchange(told, true) && !mute_) texts_.push_back(text);
}

void Notices::no_backward() {
  add(told_of_step_,
      "[engine.step] no backward has reached this engine since the last step(): this one trains nothing, and is "
      "counted "
      "as any other (accumulation, schedule); call step() once after each backward");
}

void Notices::updated(const zero::Units& units, const std::vector<bool>& present) {
  if (told_of_unused_) return;
  std::vector<std::string> names;
  std::vector<bool> used;
  for (const zero::ParamId id : units.trained_ids()) {
    const zero::ParamSpec& spec = units.params()[id];
    if (!spec.tensor.requires_grad()) continue;
    names.push_back(spec.name);
    used.push_back(present[id]);
  }
  if (std::ranges::find(used, true) == used.end()) return;
  const std::vector<std::string> never = never_used(names, used);
  if (never.empty()) {
    told_of_unused_ = true;
    return;
  }
  add(told_of_unused_,
      c10::str(
          "[engine.step] ", listed(never),
          ": trained, but with no part in the loss of the first step, and so without a gradient and never updated; "
          "freeze what is not used (requires_grad False), tie by one and the same parameter, or, where it is used in "
          "other steps, say so with zero_optimization.ignore_unused_parameters true"));
}

std::vector<std::string> Notices::take() {
  return std::exchange(texts_, {});
}

}  // namespace tessera::engine
