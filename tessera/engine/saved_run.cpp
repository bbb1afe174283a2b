#include "tessera/engine/saved_run.h"

#include <limits>
#include <type_traits>

#include "tessera/checkpoint/node.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/group_fields.h"
#include "tessera/optim/types.h"

namespace tessera::engine {

namespace {

using checkpoint::Node;
using Json = Node::Json;

// A saved run without scaling: older files have a record of its scale too.
bool scales(const amp::GradScaler::State& s) {
  return s.overridden || s.scale != 1 || s.good_steps != 0 || s.budget != 1;
}

double read_scale(const Node& node) {
  node.check(node.real() > 0, "is no number > 0");
  return node.real();
}

amp::GradScaler::State read_scaler(const Node& node) {
  return {read_scale(node.at("scale")), node.at("steps").counter(), node.at("good_steps").counter(),
          node.at("budget").number(Node::kLargest, 1), node.at("overridden").flag()};
}

// The saved norm; null stands for one that was not finite.
double read_norm(const Node& node) {
  if (node.json.is_null()) return std::numeric_limits<double>::quiet_NaN();
  node.check(node.json.is_number() && node.json.get<double>() >= 0, "is no number >= 0");
  return node.json.get<double>();
}

Json read_group(const Node& node) {
  optim::GroupOptions options;
  node.object();
  each_field(options, [&]<class T>(const char* name, T&) {
    if (!node.has(name)) return;
    const Node value = node.at(name);
    if constexpr (std::is_same_v<T, bool>)
      value.flag();
    else if (const std::string wrong = wrong_field(name, value.real()); !wrong.empty())
      value.fail(wrong);
  });
  return node.json;
}

SavedRunAccumulation read_accumulation(const Node& node) {
  SavedRunAccumulation saved;
  saved.spread = node.at("spread").text();
  saved.contributions = read_scale(node.at("contributions"));
  saved.ranks = node.at("ranks").number<int>(Node::kLargest, 1);
  saved.replicas = node.at("replicas").number<int>(saved.ranks, 1);
  saved.unreduced = node.at("unreduced").flag();
  saved.flushed = node.at("flushed").flag();
  saved.scaled = node.at("scaled").flag();
  saved.replicas_agree = node.at("replicas_agree").flag();
  if (node.has("uncounted")) saved.uncounted = node.at("uncounted").flag();
  saved.gradient_scale = read_scale(node.at("gradient_scale"));
  return saved;
}

}  // namespace

std::string wrong_field(const std::string& name, double value) {
  if (name == "betas" || name == "beta1" || name == "beta2")
    return value >= 0 && value < 1 ? "" : "is not from 0 to below 1";
  const bool bounded = name == "eps" || name == "momentum" || name == "weight_decay";
  return bounded && value < 0 ? "is below 0" : "";
}

std::string optimizer_of(Engine& engine) {
  const Options& options = engine.options();
  if (options.rule == optim::Rule::External)
    return options.client_optimizer.substr(0, options.client_optimizer.find(' '));
  const bool decoupled = !engine.groups().empty() && engine.groups()[0].decoupled;
  return options.rule == optim::Rule::Adam && decoupled ? "AdamW" : optim::type_of(options.rule).name;
}

SavedRun::SavedRun(const std::string& text, const std::string& path) {
  const Json json = checkpoint::parsed(text);
  const Node run{json, path, "run"};
  const Node counters = run.at("counters");
  micro_steps = counters.at("micro_steps").counter();
  global_steps = counters.at("global_steps").counter();
  skipped_steps = counters.at("skipped_steps").counter();
  global_samples = counters.at("global_samples").counter();
  if (counters.has("begun")) begun = counters.at("begun").number();
  if (counters.has("accumulation_steps"))
    accumulation_steps = counters.at("accumulation_steps").number(Node::kLargest, 1);
  if (counters.has("norm")) norm = read_norm(counters.at("norm"));
  // Some foreign checkpoints have no scaler.
  if (run.has("scaler")) scaler = read_scaler(run.at("scaler"));
  if (scaler && !scales(*scaler)) scaler.reset();
  run.at("groups").each([&](const Node& group) { groups.push_back(read_group(group)); });
  if (run.has("accumulation")) accumulation = read_accumulation(run.at("accumulation"));
  if (run.has("unwritten")) {
    const Node written = run.at("unwritten").object();
    for (const auto& item : written.json.items())
      unwritten[item.key()] = written.at(item.key().c_str()).counter();
  }
  if (run.has("optimizer")) optimizer = run.at("optimizer").text();
  if (run.has("ranks")) ranks = run.at("ranks").text();
  if (run.has("source")) run.at("source").object();
  client = "{}";
  if (!run.has("client")) return;
  const Node of_client = run.at("client").object();
  if (of_client.has("schedule_steps")) of_client.at("schedule_steps").counter();
  if (of_client.has("own_schedule")) of_client.at("own_schedule").text();
  client = of_client.json.dump();
}

void SavedRun::apply(Engine& engine, int64_t micro_steps_here, int64_t begun_here) const {
  engine.set_counters(micro_steps_here, global_steps, skipped_steps, global_samples);
  engine.set_begun_micro_steps(begun_here);
  if (engine.scaling().scaler().needed() && scaler) engine.scaling().restore(*scaler);
  for (size_t i = 0; i < engine.groups().size() && i < groups.size(); ++i)
    each_field(engine.groups()[i], [&](const char* name, auto& value) {
      if (groups[i].contains(name)) groups[i].at(name).get_to(value);
    });
}

}  // namespace tessera::engine
