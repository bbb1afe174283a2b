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
  std::unordered_map<std::string, int64_t> before;
  for (const NamedParam& param : built)
    before[param.name] = param.id;
  std::vector<std::string> replaced, added, frozen;
  for (const NamedParam& param : now) {
    const auto there = before.find(param.name);
    if (there != before.end()) {
      if (there->second != param.id) replaced.push_back(param.name);
    } else if (!known.contains(param.id)) {
      (param.trained ? added : frozen).push_back(param.name);
    }
  }
  ContentsReport report;
  if (!frozen.empty())
    report.warning = "[engine] " + listed(frozen) +
                     ": frozen, and added after the engine was built; they are used as they are, and no checkpoint has "
                     "them";
  if (!replaced.empty())
    report.fault = listed(replaced) + ": replaced after the engine was built, which trains and saves what was there";
  if (!added.empty())
    report.fault += (replaced.empty() ? "" : "; ") + listed(added) +
                    ": added after the engine was built, which neither trains nor saves them";
  if (!report.fault.empty())
    report.fault +=
        ". Copy values into the parameters that were there (load_state_dict without assign=True; in stage 3 inside "
        "GatheredParameters(..., modifier_rank=0)); for other parameters destroy() the engine and build a new one";
  return report;
}

}  // namespace tessera::engine
