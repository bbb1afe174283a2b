#include "tessera/pipeline/ties.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::pipeline {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kFirstTag = 1 << 15;  // clear of those of activations and of links

// Describes a copy by what all copies must have alike.
std::string form_of(const Tied& tied) {
  std::string form;
  for (const auto& [name, param] : tied.params)
    form += c10::str(form.empty() ? "" : ", ", name.substr(tied_prefix(tied.key).size()), " ", param.sizes(), " ",
                     c10::toString(param.scalar_type()));
  return form.empty() ? "no parameters" : form;
}

// The range of a trained parameter's elements that a rank has.
using Ranges = std::map<std::string, std::vector<int64_t>>;

// Names a parameter that is in one of them only.
std::string other_of(const Ranges& a, const Ranges& b) {
  std::set<std::string> names;
  for (const auto& [from, without] : {std::pair(&a, &b), std::pair(&b, &a)})
    for (const auto& [name, range] : *from)
      if (!without->contains(name)) names.insert(name);
  return names.empty() ? "" : *names.begin();
}

Explain explain_by(const Stage& stage) {
  return [&stage](const std::exception_ptr& error) { return stage.explain(error); };
}

}  // namespace

std::string tied_prefix(const std::string& key) {
  return c10::str("tied_modules.", key, ".");
}

Ties::Ties(const Ranks& ranks, const std::vector<Tied>& tied, const Building& building) : ranks_(ranks) {
  building.agree();
  if (tied.empty()) return;
  check(tied);
  for (const Tied& each : tied) {
    const int tag = kFirstTag + static_cast<int>(keys_.size());
    keys_.push_back({each.key});
    const auto& stages = each.stages;
    if (std::ranges::find(stages, ranks.stage()) == stages.end()) continue;
    Tie tie{each.key, ranks.stage() == stages[0], {}};
    const Line ahead{ranks.forwards, tag, "tied weights"}, back{ranks.backwards, tag, "tied weights"};
    for (const int stage : tie.first ? std::vector<int>(stages.begin() + 1, stages.end()) : std::vector{stages[0]})
      tie.wires.push_back(
          std::make_unique<Wire>(Peer{ranks.peers[stage], ranks.name(stage * ranks.size + ranks.place())},
                                 tie.first ? ahead : back, tie.first ? back : ahead, at::kCPU));
    ties_.push_back(std::move(tie));
  }
  try {
    exchange_values(tied);
  } catch (...) {
    const Failure failure = failure_of(std::current_exception());
    for (Wire* wire : failure.announced ? std::vector<Wire*>() : outgoing())
      wire->try_to_send_failure(building.text_of(failure));
    if (failure.announced) building.agree();  // the rank that failed announces its error there
    throw;
  }
  building.agree();
}

void Ties::exchange_values(const std::vector<Tied>& tied) {
  for (Tie& tie : ties_) {
    const auto& params = std::ranges::find(tied, tie.key, &Tied::key)->params;
    Tensors own;
    for (const auto& [name, param] : params)
      own.push_back(param.detach());
    const Tensors values = exchange(tie, own, [&](const std::vector<Tensors>&) { return own; });
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < own.size() && !tie.first; ++i)
      own[i].copy_(values[i]);
  }
  if (!ties_.empty()) ranks_.flush();  // before an engine moves the parameters
}

void Ties::check(const std::vector<Tied>& tied) const {
  Json own = Json::object();
  for (const Tied& each : tied)
    if (std::ranges::find(each.stages, ranks_.stage()) != each.stages.end()) own[each.key] = form_of(each);
  const auto texts = ranks_.texts(own.dump(), "tied weights");
  std::vector<Json> forms;
  for (const std::string& text : texts)
    forms.push_back(Json::parse(text));
  for (const Tied& each : tied) {
    for (int rank = 0; rank < static_cast<int>(forms.size()); ++rank) {
      const int first = each.stages[0] * ranks_.size + rank % ranks_.size;
      if (!forms[rank].contains(each.key)) continue;
      TESSERA_CHECK_VALUE(forms[rank][each.key] == forms[first][each.key], "pipeline", "tied layers '", each.key,
                          "' must have the same parameters on all stages: ", ranks_.name(first), " has ",
                          forms[first][each.key].get<std::string>(), "; ", ranks_.name(rank), " has ",
                          forms[rank][each.key].get<std::string>());
    }
  }
}

template <class F>
Tensors Ties::exchange(Tie& tie, const Tensors& own, const F& join) {
  const int64_t number = tie.messages++;
  if (!tie.first) {
    tie.wires[0]->send({own}, number);
    return tie.wires[0]->receive(number).tensors;
  }
  std::vector<Tensors> others;
  for (const auto& wire : tie.wires)
    others.push_back(wire->receive(number).tensors);
  Tensors joined = join(others);
  for (const auto& wire : tie.wires)
    wire->send({joined}, number);
  return joined;
}

std::vector<int> Ties::copies(const Stage& stage) const {
  std::vector<int> numbers;
  for (const Tie& tie : ties_)
    for (size_t i = 0; i < stage.params().size() && !tie.first; ++i)
      if (stage.params()[i].name.starts_with(tied_prefix(tie.key))) numbers.push_back(static_cast<int>(i));
  return numbers;
}

std::vector<int> Ties::trained_of(const Stage& stage, const Tie& tie) {
  std::vector<int> numbers;
  for (size_t i = 0; i < stage.params().size(); ++i) {
    const zero::ParamSpec& param = stage.params()[i];
    if (param.name.starts_with(tied_prefix(tie.key)) && param.group >= 0 && param.tensor.requires_grad())
      numbers.push_back(static_cast<int>(i));
  }
  std::ranges::sort(numbers, {}, [&](int number) { return stage.params()[number].name; });  // alike on all stages
  return numbers;
}

Ties::Key& Ties::key_of(const Tie& tie) {
  return *std::ranges::find(keys_, tie.key, &Key::name);
}

void Ties::follow(Stage& stage) {
  if (empty()) return;
  const auto rows = agreed_rows(
      ranks_, "train what was thawed", explain_by(stage), 1,
      [&] {
        stage.join();
        const bool changed =
            std::ranges::any_of(ties_, [&](const Tie& tie) { return tie.trained != trained_of(stage, tie); });
        return std::vector<double>{changed ? 1.0 : 0.0};
      },
      "which tied weights are trained");
  if (std::ranges::any_of(rows, [](const auto& row) { return row[0] != 0; })) attach(stage);
}

void Ties::attach(Stage& stage) {
  if (keys_.empty()) return;
  std::vector<std::vector<int>> trained;
  Json own = Json::object();
  for (const Tie& tie : ties_) {
    trained.push_back(trained_of(stage, tie));
    Ranges ranges;
    for (const int number : trained.back()) {
      const auto [begin, end] = stage.states().local_range(number);
      ranges[stage.params()[number].name] = {begin, end};
    }
    own[tie.key] = ranges;
  }
  std::vector<Json> all;
  for (const std::string& text : ranks_.texts(own.dump(), "where tied weights lie"))
    all.push_back(Json::parse(text));
  for (Key& key : keys_) {
    std::optional<Ranges> first;
    std::map<int, Ranges> by_place;
    bool in_place = true;
    for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
      if (!all[rank].contains(key.name)) continue;
      const auto ranges = all[rank][key.name].get<Ranges>();
      if (!first) first = ranges;
      const std::string other = other_of(*first, ranges);
      TESSERA_CHECK(other.empty(), "pipeline", "tied layers '", key.name, "' have ", first->size(), " and ",
                    ranges.size(), " trained parameters on two stages: '", other,
                    "' is trained on one stage and frozen on another; freeze it on all or on none");
      in_place = in_place && by_place.emplace(rank % ranks_.size, ranges).first->second == ranges;
    }
    key.trained = first ? first->size() : 0;
    key.in_place = in_place;
  }
  for (size_t i = 0; i < ties_.size(); ++i)
    ties_[i].trained = std::move(trained[i]);
}

Ties::Used Ties::used(Stage& stage) {
  Used used;
  size_t count = 0;
  for (const Key& key : keys_) {
    used.emplace_back(key.trained, false);
    count += key.trained;
  }
  const auto has_gradients = [&] {
    std::vector<double> own;
    for (const Key& key : keys_) {
      const auto tie = std::ranges::find(ties_, key.name, &Tie::key);
      for (size_t i = 0; i < key.trained; ++i)
        own.push_back(tie != ties_.end() &&
                      stage.states().local_view(tie->trained[i], zero::Quantity::Gradient).defined());
    }
    return own;
  };
  if (count == 0) return used;
  for (const auto& row : agreed_rows(ranks_, "look at gradients of tied weights", explain_by(stage), count,
                                     has_gradients, "which tied weights have gradients")) {
    auto value = row.begin();
    for (auto& of_key : used)
      for (auto&& each : of_key)
        each = each || *value++ != 0;
  }
  return used;
}

void Ties::sum_gradients(Stage& stage, const Used& used) {
  const at::NoGradGuard no_grad;
  for (Tie& tie : ties_) {
    Key& key = key_of(tie);
    std::vector<int> numbers;  // of parameters that any place used; the others have no gradient, as in the whole model
    for (size_t i = 0; i < tie.trained.size(); ++i)
      if (used[&key - keys_.data()][i]) numbers.push_back(tie.trained[i]);
    Tensors views, own;
    for (const int number : numbers) {
      stage.states().complete_gradient(number);
      views.push_back(key.in_place ? stage.states().local_view(number, zero::Quantity::Gradient)
                                   : stage.states().get_full(number, zero::Quantity::Gradient));
      own.push_back(views.back().detach().to(at::kFloat));
    }
    const Tensors total = exchange(tie, own, [&](const std::vector<Tensors>& others) {
      Tensors sum;
      for (size_t i = 0; i < own.size(); ++i) {
        sum.push_back(own[i].cpu());
        for (const Tensors& other : others)
          sum[i] = sum[i] + other[i];
      }
      return sum;
    });
    for (size_t i = 0; i < total.size(); ++i) {
      if (key.in_place) {
        views[i].detach().copy_(total[i]);
      } else {
        stage.states().set_full(numbers[i], zero::Quantity::Gradient, total[i]);
      }
    }
  }
  if (!ties_.empty()) ranks_.flush();
}

std::vector<Wire*> Ties::outgoing() const {
  std::vector<Wire*> wires;
  for (const Tie& tie : ties_)
    for (const auto& wire : tie.wires)
      wires.push_back(wire.get());
  return wires;
}

}  // namespace tessera::pipeline
