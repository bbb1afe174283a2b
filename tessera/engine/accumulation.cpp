#include "tessera/engine/accumulation.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/checkpoint/node.h"
#include "tessera/checkpoint/numbering.h"
#include "tessera/engine/logical.h"
#include "tessera/engine/saved_run.h"

namespace tessera::engine {

namespace {

using checkpoint::Node;
using Json = Node::Json;
using checkpoint::Along;
using checkpoint::TensorRecord;

// What must be the same at save and load for each rank to take back what it had.
std::string spread_of(const Engine& engine) {
  std::string text = c10::str("stage ", engine.options().zero.stage, ", ", engine.options().zero.precision.grad);
  for (const comm::Axis axis : comm::kAxes)
    text += c10::str(", ", comm::axis_name(axis), " ", engine.mesh().size(axis));
  return text;
}

bool is_slice_or_expert(const Engine& engine, const ParamSpec& spec) {
  return spec.cut != nullptr || !place_of(engine, spec).empty();
}

// Who has the gradient of a tensor, and what its file's name says of that.
struct Holder {
  zero::Ranks ranks;
  bool cut;  // sums lie in slices over the shard group
  Holder(const Engine& engine, const ParamSpec& spec)
      : ranks(engine.mesh(), spec.varies),
        cut(shard::placements_of_stage(engine.options().zero.stage).shards_states() && ranks.shard->size() > 1) {}

  bool first_of_model() const { return ranks.varies_along_model || ranks.model->rank() == 0; }
  std::vector<Along> along_sum(bool replicas_agree) const {
    if (replicas_agree) return {};
    return {{"replica", ranks.replicate->rank(), ranks.replicate->size()}};
  }
  std::vector<Along> along_own() const {
    std::vector<Along> along{{"rank", ranks.rank(), ranks.size()}};
    if (ranks.varies_along_model) along.push_back({"slice", ranks.model->rank(), ranks.model->size()});
    return along;
  }
  bool writes_sum(bool replicas_agree) const {
    return first_of_model() && (cut || ranks.shard->rank() == 0) && (!replicas_agree || ranks.replicate->rank() == 0);
  }
};

}  // namespace

std::string blob_of_accumulation(int place) {
  return "accumulation-" + std::to_string(place);
}

SavedAccumulation save_accumulation(Engine& engine) {
  SavedAccumulation saved;
  zero::Accumulation& accumulation = engine.accumulation();
  if (!accumulation.begun()) return saved;
  TESSERA_CHECK(!engine.options().zero.update_in_backward, "engine.save_checkpoint",
                "between a backward, which has updated the model (tessera.update_in_backward), and its step(): call "
                "step() first");
  const zero::Accumulation::State state = accumulation.state();
  Json counts = Json::array();
  double contributions = 1;
  for (const zero::GradientCounts& c : state.counts) {
    const ParamSpec& spec = engine.params()[c.param];
    counts.push_back({{"name", file_name_of(engine, spec)},
                      {"has_grad", c.has_grad},
                      {"filled", c.filled},
                      {"has_sum", c.has_sum},
                      {"additions", c.additions},
                      {"sums", c.sums}});
    if (!is_slice_or_expert(engine, spec)) contributions = accumulation.contributions(c.param);
  }
  saved.blob = counts.dump();
  const zero::Ranks ranks(engine.mesh());
  saved.run = Json{{"spread", spread_of(engine)},
                   {"contributions", contributions},
                   {"ranks", ranks.size()},
                   {"replicas", ranks.replicate->size()},
                   {"unreduced", state.unreduced},
                   {"flushed", state.flushed},
                   {"scaled", state.scaled},
                   {"replicas_agree", state.replicas_agree},
                   {"uncounted", engine.has_uncounted_backward()},
                   {"gradient_scale", engine.scaling().gradient_scale()}}
                  .dump();
  for (const zero::HeldGradient& held : accumulation.held()) {
    const ParamSpec& spec = engine.params()[held.param];
    const Holder holder(engine, spec);
    if (held.reduced ? !holder.writes_sum(state.replicas_agree) : !holder.first_of_model()) continue;
    const shard::Form form = engine.states().form(held.param);
    const auto along = held.reduced ? holder.along_sum(state.replicas_agree) : holder.along_own();
    saved.items.push_back(
        {file_name_of(engine, spec) + checkpoint::suffix_of(along), held.reduced ? kGradient : kPartialGradient,
         held.reduced ? whole_shape(spec, form) : form.sizes, checkpoint::order_of(form), held.values.scalar_type(),
         held.reduced ? slice_of(spec.cut) : std::vector<checkpoint::Slice>{}, held.range,
         [values = held.values, begin = held.range.begin](shard::Range part) {
           return values.narrow(0, part.begin - begin, part.size());
         }});
  }
  return saved;
}

RestoredAccumulation::RestoredAccumulation(Engine& engine, const checkpoint::Reader& reader,
                                           const SavedRunAccumulation& saved, int place,
                                           const std::vector<const checkpoint::ParamRecord*>& records)
    : engine_(engine), reader_(reader) {
  TESSERA_CHECK_VALUE(!engine.options().zero.update_in_backward, "engine.load_checkpoint",
                      "this checkpoint was saved inside an accumulation, and tessera.update_in_backward accumulates "
                      "nothing: load it with update_in_backward off");
  scale_ = saved.gradient_scale;
  state_.scaled = saved.scaled;
  if (saved.spread == spread_of(engine)) {
    state_.unreduced = saved.unreduced;
    state_.flushed = saved.flushed;
    state_.replicas_agree = saved.replicas_agree;
    plan_same(records, blob_of_accumulation(place));
  } else {
    plan_other(records, saved);
  }
}

void RestoredAccumulation::add(int id, bool reduced, std::vector<Source> sources) {
  const shard::Range range = engine_.accumulation().range_of(id, reduced);
  if (sources.empty() || range.empty()) return;
  const ParamSpec& spec = engine_.params()[id];
  checkpoint::Want want{reduced ? slice_of(spec.cut) : std::vector<checkpoint::Slice>{},
                        checkpoint::order_of(engine_.states().form(id)), range};
  parts_.push_back({{id, reduced, range, {}}, std::move(want), std::move(sources)});
}

void RestoredAccumulation::plan_same(const std::vector<const checkpoint::ParamRecord*>& records,
                                     const std::string& blob) {
  std::map<std::string, zero::GradientCounts> by_name;
  const Json counts = checkpoint::parsed(reader_.blob(blob));
  Node{counts, reader_.folder(), blob}.each([&](const Node& c) {
    by_name[c.at("name").text()] = {-1,
                                    c.at("has_grad").flag(),
                                    c.at("filled").flag(),
                                    c.at("has_sum").flag(),
                                    c.at("additions").number<uint64_t>(),
                                    c.at("sums").number<uint64_t>()};
  });
  for (const bool reduced : {true, false}) {
    for (int id = 0; id < static_cast<int>(records.size()); ++id) {
      const ParamSpec& spec = engine_.params()[id];
      if (records[id] == nullptr || spec.group < 0) continue;
      const Holder holder(engine_, spec);
      const auto along = reduced ? holder.along_sum(state_.replicas_agree) : holder.along_own();
      const std::string name = records[id]->name + checkpoint::suffix_of(along);
      if (const TensorRecord* record = reader_.find(name, reduced ? kGradient : kPartialGradient))
        add(id, reduced, {{record, 1.0}});
      if (!reduced) continue;
      zero::GradientCounts mine = by_name[records[id]->name];
      mine.param = id;
      state_.counts.push_back(mine);
    }
  }
}

void RestoredAccumulation::plan_other(const std::vector<const checkpoint::ParamRecord*>& records,
                                      const SavedRunAccumulation& saved) {
  const int ranks = saved.ranks, replicas = saved.replicas;
  const double contributions = saved.contributions;
  TESSERA_CHECK_IO(std::cmp_less_equal(ranks, reader_.manifest().blobs.size()), "checkpoint", "'", reader_.folder(),
                   "': 'run.accumulation.ranks' is ", ranks, ", and fewer have said what they added");
  const bool replicas_add = contributions == ranks && ranks > 1;  // Note [Averaging] in zero/reducer.h
  zero::Accumulation& accumulation = engine_.accumulation();
  const bool reduced = accumulation.reduces();
  state_.unreduced = !reduced;
  state_.flushed = state_.replicas_agree = reduced;
  for (int id = 0; id < static_cast<int>(records.size()); ++id) {
    const ParamSpec& spec = engine_.params()[id];
    if (records[id] == nullptr || spec.group < 0) continue;
    fits_ = fits_ && !is_slice_or_expert(engine_, spec) && records[id]->along.empty();
    std::vector<Source> sources;
    const double own = reduced ? 1.0 : 1.0 / accumulation.contributions(id);
    const auto look = [&](const std::string& suffix, const char* kind, double factor) {
      const TensorRecord* record = reader_.find(records[id]->name + suffix, kind);
      if (record == nullptr) return;
      fits_ = fits_ && record->slices.empty();
      sources.push_back({record, factor * own});
    };
    look("", kGradient, 1.0);
    for (int i = 0; i < replicas; ++i)
      look(c10::str("@replica=", i), kGradient, replicas_add ? 1.0 : 1.0 / replicas);
    for (int i = 0; i < ranks; ++i)
      look(c10::str("@rank=", i), kPartialGradient, contributions / ranks);
    const bool any = !sources.empty();
    state_.counts.push_back({id, any, any, reduced, 0, 0});
    add(id, reduced, std::move(sources));
  }
  if (!fits_) parts_.clear();
}

void RestoredAccumulation::verify() const {
  for (const Wanted& part : parts_)
    for (const Source& source : part.sources)
      reader_.verify(*source.record, part.want);
}

void RestoredAccumulation::apply() {
  zero::Accumulation& accumulation = engine_.accumulation();
  accumulation.begin(state_);
  for (const Wanted& part : parts_) {
    at::Tensor values;
    for (const Source& source : part.sources) {
      const at::Tensor one = reader_.read(*source.record, part.want);
      if (part.sources.size() == 1 && source.factor == 1.0)
        values = one;
      else
        values = values.defined() ? values.add_(one.to(at::kFloat), source.factor) : one.to(at::kFloat) * source.factor;
    }
    zero::HeldGradient gradient = part.gradient;
    gradient.values = values;
    accumulation.put(gradient);
  }
  accumulation.end(state_);
  if (const double now = engine_.scaling().gradient_scale(); now != scale_)
    engine_.scaling().gradients_times(scale_ / now);
}

}  // namespace tessera::engine
