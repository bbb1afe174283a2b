#include "tessera/nn/ties.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/engine/agreement.h"
#include "tessera/nn/together.h"

namespace tessera::nn {
namespace {

constexpr int kTiesTag = 1 << 15;  // clear of those of activations and of links

}  // namespace

Ties::Ties(const comm::Parts& parts, const StageLayers& module) : parts_(parts), in_place_(module.ties().size(), true) {
  for (const auto& [name, stages] : module.ties()) {
    const int number = static_cast<int>(keys_.size());
    keys_.push_back(name);
    if (std::find(stages.begin(), stages.end(), parts.part) == stages.end()) continue;
    Tie tie{c10::str("tied_modules.", name, "."), number, parts.part == stages[0], {}, {}};
    for (const int stage : tie.first ? std::vector<int>(stages.begin() + 1, stages.end()) : std::vector{stages[0]}) {
      const int rank = parts.rank_of(stage, parts.place());
      for (auto* wires : {&tie.there, &tie.back})
        wires->push_back(std::make_unique<pipeline::Wire>(parts.p2p, pipeline::Peer{rank, stage_name(parts, rank)},
                                                          kTiesTag + number, at::kCPU, "tied weights"));
    }
    for (const auto& param : module.named_parameters())
      if (param.key().starts_with(tie.name)) tie.params.emplace_back(param.key(), param.value());
    ties_.push_back(std::move(tie));
  }
  for (Tie& tie : ties_) {
    Tensors own;
    for (const auto& [name, param] : tie.params)
      own.push_back(param.detach());
    const Tensors values = meet(tie, own, [&](const std::vector<Tensors>&) { return own; });
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < own.size(); ++i)
      own[i].copy_(values[i]);
  }
  if (!ties_.empty()) parts_.p2p->flush();  // before an engine moves the parameters
}

template <class F>
Tensors Ties::meet(Tie& tie, const Tensors& own, const F& join) {
  const int64_t number = tie.messages++;
  if (!tie.first) {
    tie.there[0]->send(own, number);
    return tie.back[0]->receive(number);
  }
  std::vector<Tensors> others;
  for (const auto& wire : tie.back)
    others.push_back(wire->receive(number));
  Tensors joined = join(others);
  for (const auto& wire : tie.there)
    wire->send(joined, number);
  return joined;
}

void Ties::attach(engine::Engine& engine) {
  engine_ = &engine;
  for (const Tie& tie : ties_)
    for (size_t i = 0; i < engine.params().size() && !tie.first; ++i)
      if (engine.params()[i].name.starts_with(tie.name)) copies_.push_back(static_cast<int>(i));
  compare();
}

std::vector<int> Ties::trained(const Tie& tie) const {
  std::vector<int> numbers;
  for (size_t i = 0; i < engine_->params().size(); ++i) {
    const engine::ParamSpec& param = engine_->params()[i];
    if (param.name.starts_with(tie.name) && param.group >= 0 && param.tensor.requires_grad())
      numbers.push_back(static_cast<int>(i));
  }
  return numbers;
}

void Ties::follow() {
  if (keys_.empty()) return;
  std::exception_ptr problem;
  try {
    engine_->join();
  } catch (const c10::DistBackendError&) {
    throw;
  } catch (const std::exception&) {
    problem = std::current_exception();
  }
  const bool changed = std::ranges::any_of(ties_, [&](const Tie& tie) { return tie.numbers != trained(tie); });
  bool any = false;
  const auto rows = rows_of(parts_, {problem ? 1.0 : 0.0, changed ? 1.0 : 0.0}, "which tied weights are trained");
  if (problem) std::rethrow_exception(problem);
  for (int rank = 0; rank < static_cast<int>(rows.size()); ++rank) {
    TESSERA_CHECK(rows[rank][0] == 0, "pipeline", stage_name(parts_, rank),
                  " could not train what was thawed; see its error");
    any = any || rows[rank][1] != 0;
  }
  if (any) compare();
}

// Units may lie otherwise on another stage: then a place holds other elements of its copy.
void Ties::compare() {
  const size_t keys = keys_.size();
  if (keys == 0) return;
  // By key: whether places have the same elements, how many parameters are trained, and which ones.
  std::vector<double> own(keys, 1);
  own.resize(3 * keys, -1);
  std::vector<std::vector<int>> numbers;
  for (Tie& tie : ties_) {
    numbers.push_back(trained(tie));
    std::vector<int64_t> ranges;
    engine::Digest names;
    for (const int number : numbers.back()) {
      const auto [begin, end] = engine_->states().local_range(number);
      ranges.insert(ranges.end(), {begin, end});
      names.add(engine_->params()[number].name);
    }
    const at::Tensor mine = at::tensor(ranges, at::kLong);
    const Tensors first = meet(tie, {mine}, [&](const std::vector<Tensors>&) { return Tensors{mine}; });
    own[tie.key] = at::equal(first[0], mine) ? 1 : 0;
    own[keys + tie.key] = static_cast<double>(numbers.back().size());
    own[2 * keys + tie.key] = names.value();
  }
  std::vector<int> counts(keys, -1);
  std::vector<double> names(keys, -1);
  std::vector<bool> in_place(keys, true);
  for (const auto& row : rows_of(parts_, own, "where tied weights lie")) {
    for (size_t key = 0; key < keys; ++key) {
      in_place[key] = in_place[key] && row[key] != 0;
      const int count = static_cast<int>(row[keys + key]);
      if (count < 0) continue;
      TESSERA_CHECK_VALUE(counts[key] < 0 || count == counts[key], "pipeline", "tied layers '", keys_[key], "' have ",
                          counts[key], " and ", count,
                          " trained parameters on two stages; freeze and thaw the same ones on all");
      TESSERA_CHECK_VALUE(counts[key] < 0 || row[2 * keys + key] == names[key], "pipeline", "tied layers '", keys_[key],
                          "' have other trained parameters on one stage than on another; freeze and thaw the same ones "
                          "on all");
      counts[key] = count;
      names[key] = row[2 * keys + key];
    }
  }
  for (size_t i = 0; i < ties_.size(); ++i)
    ties_[i].numbers = std::move(numbers[i]);
  counts_ = std::move(counts);
  in_place_ = std::move(in_place);
}

std::vector<std::vector<bool>> Ties::used() const {
  std::vector<double> own;
  std::vector<std::vector<bool>> used;
  for (size_t key = 0; key < keys_.size(); ++key) {
    const auto tie =
        std::find_if(ties_.begin(), ties_.end(), [&](const Tie& each) { return static_cast<size_t>(each.key) == key; });
    for (int i = 0; i < counts_[key]; ++i)
      own.push_back(tie != ties_.end() &&
                    engine_->states().local_view(tie->numbers[i], engine::Quantity::Gradient).defined());
    used.emplace_back(counts_[key], false);
  }
  if (own.empty()) return used;
  for (const auto& row : rows_of(parts_, own, "which tied weights have gradients")) {
    auto value = row.begin();
    for (auto& of_key : used)
      for (auto&& each : of_key)
        each = each || *value++ != 0;
  }
  return used;
}

void Ties::sum_gradients() {
  const at::NoGradGuard no_grad;
  zero::StateAccess& states = engine_->states();
  const std::vector<std::vector<bool>> used = this->used();
  for (Tie& tie : ties_) {
    std::vector<int> numbers;  // of those that any place used; the others have no gradient, as in the whole model
    for (size_t i = 0; i < tie.numbers.size(); ++i)
      if (used[tie.key][i]) numbers.push_back(tie.numbers[i]);
    Tensors views, own;
    for (const int number : numbers) {
      states.complete_gradient(number);
      views.push_back(in_place_[tie.key] ? states.local_view(number, engine::Quantity::Gradient)
                                         : states.get_full(number, engine::Quantity::Gradient));
      own.push_back(views.back().detach().to(at::kFloat));
    }
    const Tensors total = meet(tie, own, [&](const std::vector<Tensors>& others) {
      Tensors sum;
      for (size_t i = 0; i < own.size(); ++i) {
        sum.push_back(own[i].cpu());
        for (const Tensors& other : others)
          sum[i] = sum[i] + other[i];
      }
      return sum;
    });
    for (size_t i = 0; i < total.size(); ++i) {
      if (in_place_[tie.key]) {
        views[i].detach().copy_(total[i]);
      } else {
        states.set_full(numbers[i], engine::Quantity::Gradient, total[i]);
      }
    }
  }
  if (!ties_.empty()) parts_.p2p->flush();
}

std::vector<pipeline::Wire*> Ties::outgoing() const {
  std::vector<pipeline::Wire*> wires;
  for (const Tie& tie : ties_)
    for (const auto& wire : tie.there)
      wires.push_back(wire.get());
  return wires;
}

}  // namespace tessera::nn
