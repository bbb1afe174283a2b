#include "tessera/nn/own_groups.h"

#include <algorithm>
#include <iterator>
#include <unordered_set>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::nn {

OwnGroups::OwnGroups(std::shared_ptr<torch::optim::Optimizer> optimizer) : optimizer_(std::move(optimizer)) {
  note();
}

void OwnGroups::note() {
  known_ = present();
}

std::vector<std::vector<const void*>> OwnGroups::present() const {
  std::vector<std::vector<const void*>> groups;
  for (const auto& group : optimizer_->param_groups())
    std::ranges::transform(group.params(), std::back_inserter(groups.emplace_back()),
                           [](const at::Tensor& param) { return param.unsafeGetTensorImpl(); });
  return groups;
}

std::vector<OwnGroups::Added> OwnGroups::added() const {
  const auto now = present();
  if (now == known_) return {};
  std::vector<Added> added;
  bool kept = now.size() >= known_.size();
  for (size_t number = 0; kept && number < now.size(); ++number) {
    const std::unordered_set<const void*> there(now[number].begin(), now[number].end());
    std::unordered_set<const void*> known;
    if (number < known_.size()) known.insert(known_[number].begin(), known_[number].end());
    kept = std::ranges::all_of(known, [&](const void* param) { return there.contains(param); });
    Added one{static_cast<int>(number), {}};
    for (const at::Tensor& param : optimizer_->param_groups()[number].params())
      if (!known.contains(param.unsafeGetTensorImpl())) one.params.push_back(param);
    if (number >= known_.size() || !one.params.empty()) added.push_back(std::move(one));
  }
  TESSERA_CHECK(kept, "engine",
                "param groups of the optimizer, or parameters in them, were removed, exchanged or put in another order "
                "after the engine was built; put them back and freeze what is not to be trained (requires_grad false), "
                "or destroy() the engine and build a new one with the others");
  return added;
}

void OwnGroups::take_back() {
  auto& groups = optimizer_->param_groups();
  groups.erase(groups.begin() + static_cast<std::ptrdiff_t>(std::min(known_.size(), groups.size())), groups.end());
  for (size_t number = 0; number < groups.size(); ++number)
    std::erase_if(groups[number].params(), [&](const at::Tensor& param) {
      const void* const id = param.unsafeGetTensorImpl();
      return std::ranges::find(known_[number], id) == known_[number].end();
    });
}

}  // namespace tessera::nn
