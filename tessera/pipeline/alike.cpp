#include "tessera/pipeline/alike.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "tessera/base/error.h"
#include "tessera/config/resolve.h"

namespace tessera::pipeline {
namespace {

using Json = nlohmann::json;

// Numbers may be equal that are written otherwise; what no JSON can say, as NaN, is its text.
bool same(const std::string& a, const std::string& b) {
  return a == b || (Json::accept(a) && Json::accept(b) && Json::parse(a) == Json::parse(b));
}

std::string value_in(const std::vector<Named>& values, const std::string& name) {
  const auto found = std::ranges::find(values, name, &Named::first);
  return found == values.end() ? "not there" : found->second;
}

// The first thing that they have differently; empty: none.
std::string other_in(const std::vector<Named>& a, const std::vector<Named>& b) {
  std::set<std::string> names;
  for (const auto* values : {&a, &b})
    for (const auto& [name, value] : *values)
      names.insert(name);
  const auto differs =
      std::ranges::find_if(names, [&](const std::string& name) { return !same(value_in(a, name), value_in(b, name)); });
  return differs == names.end() ? "" : *differs;
}

void check_optimizer(const Ranks& ranks, const OptimizerForm& first, int rank, const OptimizerForm& other) {
  const std::string here = ranks.name(0), there = ranks.name(rank);
  TESSERA_CHECK_VALUE(first.kind == other.kind, "pipeline", "the optimizer is a ", first.kind, " on ", here, " and a ",
                      other.kind, " on ", there);
  TESSERA_CHECK_VALUE(first.groups.size() == other.groups.size(), "pipeline", "the optimizer has ", first.groups.size(),
                      " param groups on ", here, " and ", other.groups.size(), " on ", there,
                      "; give all stages the same groups, without parameters where a stage has none of one");
  for (size_t i = 0; i < first.groups.size(); ++i) {
    const std::string name = other_in(first.groups[i], other.groups[i]);
    TESSERA_CHECK_VALUE(
        name.empty(), "pipeline", "param group ", i, " has ", name, " ", value_in(first.groups[i], name), " on ", here,
        " and ", value_in(other.groups[i], name), " on ", there,
        "; a group is of all stages: make another one, without parameters where a stage has none of it");
  }
}

template <class T>
std::string json_of(const T& value) {
  return Json(value).dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

void check_served(const Config& config, int stages) {
  TESSERA_CHECK_BUILT(stages == 1 || !config::placements(config).shards_params(), "pipeline",
                      "zero_optimization.stage 3 is not served inside pipeline stages: every micro-batch would gather "
                      "the stage's parameters again; use stage 1 or 2, and more pipeline stages");
  TESSERA_CHECK_VALUE(config.managed_gradient_accumulation, "pipeline",
                      "managed_gradient_accumulation must be true: train_batch() counts its micro-batches");
}

void check_chunks(int chunks, int stages) {
  TESSERA_CHECK_VALUE(chunks >= 1 && (chunks == 1 || stages > 1), "pipeline",
                      "a stage has 1 chunk or more, and several only beside another stage; got ", chunks,
                      " chunks with ", stages, " stages");
}

void check_ties(const Config& config, bool tied) {
  const bool low = config.bf16.bf16_master_weights_and_grads || config.bf16.bf16_optimizer_states;
  TESSERA_CHECK_BUILT(
      !tied || !low || config.tessera.rounding == "nearest", "pipeline",
      "tied weights on several stages do not stay equal where updates round at random: set \"tessera\": "
      "{\"rounding\": \"nearest\"}, or leave bf16_master_weights_and_grads and bf16_optimizer_states");
}

void check_one_stage(const char* call, int stages) {
  if (stages > 1)
    TESSERA_FAIL(c10::NotImplementedError, "[engine.", call,
                 "] is not served over several stages, each of which has the weights of its own layers alone; "
                 "save_checkpoint() in the format \"tessera\" has all, for `tessera export` and `tessera deepspeed`");
}

std::vector<Named> alike_of(const Config& config) {
  const auto number = [](const std::optional<int64_t>& value) { return value ? std::to_string(*value) : "none"; };
  return {{"gradient_accumulation_steps", number(config.gradient_accumulation_steps)},
          {"train_batch_size", number(config.train_batch_size)},
          {"train_micro_batch_size_per_gpu", number(config.train_micro_batch_size_per_gpu)},
          {"pipeline.schedule", json_of(config.pipeline.schedule)},
          {"gradient_clipping", json_of(config.gradient_clipping)}};
}

void check_alike(comm::Group& everyone, const std::vector<Named>& own, at::Device device) {
  const auto texts = texts_of(everyone, json_of(own), "what stages must have alike", device);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const auto other = Json::parse(texts[rank]).get<std::vector<Named>>();
    for (const auto& [name, value] : own) {
      const std::string there = value_in(other, name);
      TESSERA_CHECK_VALUE(same(there, value), "pipeline", name, " is ", value, " on rank ", everyone.rank(), " and ",
                          there, " on rank ", rank);
    }
  }
}

void check_optimizers(const Ranks& ranks, const std::optional<OptimizerForm>& own) {
  const std::string text = own ? json_of(std::pair(own->kind, own->groups)) : "null";
  std::vector<std::optional<OptimizerForm>> forms;
  for (const std::string& each : ranks.texts(text, "the optimizers of stages")) {
    const Json form = Json::parse(each);
    forms.emplace_back();
    if (form.is_null()) continue;
    forms.back() = OptimizerForm{form[0].get<std::string>(), form[1].get<std::vector<std::vector<Named>>>()};
  }
  for (int rank = 1; rank < static_cast<int>(forms.size()); ++rank) {
    const bool has = forms[rank].has_value();
    TESSERA_CHECK_VALUE(
        has == forms[0].has_value(), "pipeline", ranks.name(has ? 0 : rank), " has no optimizer, ",
        ranks.name(has ? rank : 0),
        " has one; configure it, or give a function that makes one of a stage's parameters, which serves a "
        "stage with nothing to train, too");
    if (has) check_optimizer(ranks, *forms[0], rank, *forms[rank]);
  }
}

void check_groups_take(const Ranks& ranks, const std::vector<int64_t>& taken) {
  const auto rows = ranks.rows({taken.begin(), taken.end()}, "what param groups take");
  for (size_t i = 0; i < taken.size(); ++i)
    TESSERA_CHECK_VALUE(std::ranges::any_of(rows, [&](const auto& row) { return row[i] != 0; }), "pipeline",
                        "param group ", i,
                        " takes no parameter of any stage; leave it out, or give it what a group before it has taken");
}

}  // namespace tessera::pipeline
