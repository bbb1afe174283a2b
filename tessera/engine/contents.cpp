#include "tessera/engine/contents.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <unordered_map>

namespace tessera::engine {

namespace {

std::string listed(const std::vector<std::string>& names) {
  constexpr size_t kShown = 8;
  std::string text;
  for (size_t i = 0; i < std::min(kShown, names.size()); ++i)
    text += (i > 0 ? ", " : "") + names[i];
  return names.size() > kShown ? c10::str(text, " and ", names.size() - kShown, " more") : text;
}

}  // namespace

ContentsReport compare_contents(const std::vector<NamedParam>& built, const std::vector<NamedParam>& now,
                                const std::unordered_set<int64_t>& known) {
  std::unordered_map<std::string, const NamedParam*> before;
  for (const NamedParam& param : built)
    before[param.name] = &param;
  std::vector<std::string> replaced, untrained, added, frozen;
  for (const NamedParam& param : now) {
    const auto there = before.find(param.name);
    if (there != before.end()) {
      const NamedParam& was = *there->second;
      if (was.id != param.id) (was.trained ? replaced : untrained).push_back(param.name);
    } else if (!known.contains(param.id)) {
      (param.trained ? added : frozen).push_back(param.name);
    }
  }
  ContentsReport report;
  if (!frozen.empty())
    report.warning = "[engine] " + listed(frozen) +
                     ": frozen, and added after the engine was built; they are used as they are, and no checkpoint has "
                     "them";
  const auto say = [&](const std::vector<std::string>& names, const char* what) {
    if (!names.empty()) report.fault += (report.fault.empty() ? "" : "; ") + listed(names) + what;
  };
  say(replaced, ": replaced after the engine was built, which trains and saves what was there");
  say(untrained,
      ": replaced after the engine was built, which saves what was there (frozen, so a checkpoint would have "
      "other values than the forward)");
  say(added, ": added after the engine was built, which neither trains nor saves them");
  if (!replaced.empty() || !untrained.empty())
    report.fault +=
        ". Copy values into the parameters that were there (load_module_state_dict() of the engine does; in stage 3 "
        "inside "
        "GatheredParameters with modifier_rank 0)";
  if (!added.empty()) report.fault += ". The engine trains what its optimizer gets by add_param_group()";
  if (!report.fault.empty()) report.fault += "; for other parameters destroy() the engine and build a new one";
  return report;
}

}  // namespace tessera::engine
