#include "tessera/checkpoint/deepspeed/files.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "tessera/base/error.h"
#include "tessera/checkpoint/deepspeed/pieces.h"
#include "tessera/checkpoint/deepspeed/pt_writer.h"
#include "tessera/io/file.h"

namespace tessera::checkpoint::deepspeed {

namespace {

constexpr const char* kVersionOfDeepSpeed = "0.19.8";  // the version whose layout these files have
constexpr int64_t kGroupAlignment = 2;                 // flat groups of stages 1 and 2, in elements for each rank
constexpr int64_t kSubGroup = 1'000'000'000;           // elements: the default of DeepSpeed's sub_group_size
constexpr int64_t kZeros = int64_t{1} << 22;           // zeros in memory
constexpr const char *kModelStates = "mp_rank_00_model_states.pt",
                     *kShardedStates = "zero_pp_rank_0_mp_rank_00_model_states.pt";

void put_zeros(int64_t count, at::ScalarType dtype, const Streamed::Sink& sink) {
  for (; count > 0; count -= kZeros)
    sink(at::zeros({std::min(count, kZeros)}, at::TensorOptions(dtype)));
}

Style style_of_files() {
  return {Objects::Kept, true};  // the source refuses objects before they come here
}

}  // namespace

Files::Files(Source& source, int64_t stage, int64_t world) : source_(source), stage_(stage), world_(world) {
  TESSERA_CHECK_VALUE(stage >= 0 && stage <= 3 && world >= 1, "checkpoints", "there is no stage ", stage, " on ", world,
                      " ranks");
  const std::vector<Names> all = source.groups();
  for (size_t number = 0; number < all.size(); ++number)
    if (stage == 3)
      add_sub_groups(number, all[number]);
    else
      groups_.push_back({number, all[number]});
}

// Stage 3 cuts a param group after the parameter with which a rank's part reaches sub_group_size elements.
void Files::add_sub_groups(size_t number, const Names& names) {
  const Value* zero = find(source_.config(), "zero_optimization");
  const Value* given = zero != nullptr && zero->is_dict() ? find(*zero, "sub_group_size") : nullptr;
  const double limit = given == nullptr ? kSubGroup : real_of(*given);
  Group group{number, {}};
  double size = 0, all = 0;
  for (const std::string& name : names)
    all += static_cast<double>(part(name));
  for (const std::string& name : names) {
    group.names.push_back(name);
    size += static_cast<double>(part(name));
    if (all <= limit || size < limit) continue;
    groups_.push_back(group);
    group.names.clear();
    size = 0;
  }
  if (!group.names.empty()) groups_.push_back(group);
}

int64_t Files::numel(const Group& group) const {
  int64_t sum = 0;
  for (const std::string& name : group.names)
    sum += source_.numel(name);
  return sum;
}

std::vector<Names> Files::names() const {
  std::vector<Names> all;
  for (const Group& group : groups_)
    all.push_back(group.names);
  return all;
}

Value Files::dict(std::initializer_list<std::pair<const char*, Value>> items) {
  const Value made = values().items(Kind::Dict);
  for (const auto& [key, value] : items)
    values().put(made, key, value);
  return made;
}

void Files::write(const std::string& folder, int64_t rank) {
  const auto write_one = [&](const std::string& name, const Value& value) {
    write_pt(folder + "/" + name, value, style_of_files());
  };
  const std::string place = c10::str("zero_pp_rank_", rank, "_mp_rank_00_");
  if (stage_ == 3) {
    write_one(place + "model_states.pt", model_states(rank));
  } else if (rank == 0) {
    write_one(kModelStates, model_states(rank));
    const Value own = source_.rank_buffers();
    const bool same_ranks = source_.run().value("ranks", "") == ranks_text(world_);
    if (same_ranks && !own.items->empty()) write_one(kOwnBuffers, own);
  }
  source_.renew();
  if (stage_ > 0) write_one((source_.is_bf16() ? "bf16_" : "") + place + "optim_states.pt", optim_states(rank));
}

// ---- model states

Value Files::model_states(int64_t rank) {
  const auto& run = source_.run();
  if (rank == 0 && run.contains("accumulation"))
    TORCH_WARN(
        "[checkpoints] DeepSpeed's files hold no gradients: what has come of an accumulation since the last update is "
        "left "
        "out, and a load begins it anew");
  const auto counter = [&](const char* key) { return Value::of(run.at("counters").at(key).get<int64_t>()); };
  const bool zero = stage_ > 0;
  const Value aliases = values().items(Kind::Dict);
  for (const ParamRecord& param : source_.params())
    for (const std::string& alias : param.aliases)
      if (rank == 0) values().put(aliases, alias, values().text(param.name));
  const Value state = dict({
      {"module", stage_ == 3 ? sharded_module(rank) : source_.module(0)},
      {"buffer_names", values().list(source_.buffers())},
      {"optimizer", zero ? Value() : whole_optimizer()},
      {"param_shapes", zero ? param_shapes() : Value()},
      {"frozen_param_shapes", stage_ >= 2 ? shapes(source_.frozen()) : Value()},
      {"shared_params", zero ? aliases : Value()},
      {"frozen_param_fragments", stage_ >= 2 ? frozen(rank) : Value()},
      {"lr_scheduler", source_.schedule()},
      {"data_sampler", {}},
      {"random_ltd", {}},
      {"sparse_tensor_module_names", values().items(Kind::Set)},
      {"skipped_steps", counter("skipped_steps")},
      {"global_steps", counter("global_steps")},
      {"global_samples", counter("global_samples")},
      {"dp_world_size", Value::of(world_)},
      {"mp_world_size", Value::of(int64_t{1})},
      {"checkpoint_parallel_dimensions",
       dict({{"pp_degree", Value::of(int64_t{1})}, {"tp_degree", Value::of(int64_t{1})}})},
      {"ds_config", source_.config()},
      {"ds_version", values().text(kVersionOfDeepSpeed)},
      {"universal_checkpoint_info", dict({{"universal_checkpoint_version", Value::of(0.4)}})},
  });
  state.items->insert(state.items->end(), source_.client().items->begin(), source_.client().items->end());
  return state;
}

Value Files::shapes(const Names& names) {
  const Value all = values().items(Kind::Ordered);
  for (const std::string& name : names) {
    const Value sizes = values().items(Kind::Tuple, items_of(values().list(source_.param(name).shape)));
    const Value type = values().name({"torch", "Size", Meaning::Unknown, at::kByte});
    values().put(all, name, values().object({type, values().items(Kind::Tuple, {sizes}), false, {}}));
  }
  return all;
}

Value Files::param_shapes() {
  Items all;
  for (const Group& group : groups_)
    all.push_back(shapes(group.names));
  return list(all);
}

// The state dict of stage 3 has empty tensors as parameters: their values are in the optim-states and the fragments.
Value Files::sharded_module(int64_t rank) {
  const bool same_ranks = source_.run().value("ranks", "") == ranks_text(world_);
  const Value state = source_.module(same_ranks ? rank : 0);
  std::set<std::string> params;
  for (const ParamRecord& param : source_.params()) {
    params.insert(param.name);
    params.insert(param.aliases.begin(), param.aliases.end());
  }
  for (size_t i = 0; i < state.items->size(); i += 2)
    if (const std::string& name = *(*state.items)[i].text; params.contains(name))
      (*state.items)[i + 1] = values().streamed({(*state.items)[i + 1].streamed->dtype, {0}, {}});
  return state;
}

Value Files::frozen(int64_t rank) {
  const Value fragments = values().items(Kind::Ordered);
  for (const std::string& name : source_.frozen()) {
    const std::string kind = source_.value_kind(name);
    const at::ScalarType dtype = source_.param(name).dtype;
    values().put(fragments, name, stage_ < 3 ? source_.whole(name, kind, dtype) : parts({name}, kind, dtype, rank));
  }
  return fragments;
}

// The optimizer's state in the model-states of stage 0.
Value Files::whole_optimizer() {
  std::vector<Shape> numbers, group_numbers;
  const Value states = values().items(Kind::Dict), flat = values().items(Kind::Dict);
  Items masters, flat_masters;
  const bool low = source_.is_low(), whole = !low || source_.has_torch_optimizer();
  int64_t count = 0;
  for (const Group& group : groups_) {
    const auto number = static_cast<int64_t>(group_numbers.size());
    numbers.emplace_back();
    group_numbers.push_back({number});
    Items own_masters;
    for (const std::string& name : whole ? group.names : Names()) {
      const Names moments = source_.moments(name);
      const Value state = moments.empty() ? values().items(Kind::Dict) : source_.scalars({name});
      for (const std::string& kind : moments)
        values().put(state, kind, source_.whole(name, kind, at::kFloat));
      numbers.back().push_back(count);
      states.items->insert(states.items->end(), {Value::of(count++), state});
      own_masters.push_back(source_.whole(name, source_.value_kind(name), at::kFloat));
    }
    masters.push_back(list(own_masters));
    if (whole) continue;
    const int64_t size = numel(group);
    const Value state =
        flat_state(group, [&](const std::string& kind) { return elements(group, {0, size}, size, kind); });
    flat.items->insert(flat.items->end(), {Value::of(number), state});
    flat_masters.push_back(elements(group, {0, size}, size, kMaster));
  }
  const Value optimizer =
      dict({{"state", whole ? states : flat}, {"param_groups", source_.param_groups(whole ? numbers : group_numbers)}});
  if (!low) return optimizer;
  const Value scaler = values().items(Kind::Dict, source_.scaler_state(source_.loss_scaler()));
  const auto saved = [&](const char* key, const Value& otherwise) {
    const Value* found = find(scaler, key);
    return found == nullptr ? otherwise : *found;
  };
  const Value made = dict({{"dynamic_loss_scale", at(scaler, "dynamic")},
                           {"cur_scale", at(scaler, "cur_scale")},
                           {"cur_iter", saved("cur_iter", Value::of(int64_t{0}))},
                           {"last_overflow_iter", saved("last_overflow_iter", Value::of(int64_t{-1}))},
                           {"scale_factor", Value::of(2.0)},
                           {"scale_window", saved("scale_window", Value::of(int64_t{1000}))},
                           {"clip_grad", clip()},
                           {"optimizer_state_dict", optimizer},
                           {whole ? "fp32_groups" : "fp32_groups_flat", list(whole ? masters : flat_masters)}});
  if (!whole)
    if (const Value steps = source_.steps_beside(names()); !steps.items->empty()) values().put(made, kOwnSteps, steps);
  return made;
}

Value Files::clip() {
  const Value* given = find(source_.config(), "gradient_clipping");
  return Value::of(given == nullptr ? 0.0 : real_of(*given));
}

// ---- optim states

Value Files::optim_states(int64_t rank) {
  const Value made = dict({{"optimizer_state_dict", stage_ == 3 ? sharded_state(rank) : flat_group_state(rank)},
                           {"ds_config", source_.config()},
                           {"ds_version", values().text(kVersionOfDeepSpeed)}});
  if (const Value steps = source_.steps_beside(names()); !steps.items->empty()) values().put(made, kOwnSteps, steps);
  return made;
}

// The optimizer's state in the optim-states of stages 1 and 2.
Value Files::flat_group_state(int64_t rank) {
  const Value states = values().items(Kind::Dict);
  Items masters, mappings;
  Shape paddings;
  std::vector<Shape> numbers;
  for (const Group& group : groups_) {
    const int64_t all = numel(group), unit = kGroupAlignment * world_;
    const int64_t size = (all + unit - 1) / unit * kGroupAlignment;
    const shard::Range range{std::min(rank * size, all), std::min((rank + 1) * size, all)};
    const auto number = static_cast<int64_t>(numbers.size());
    paddings.push_back(size - range.size());
    masters.push_back(elements(group, range, range.size(), kMaster));
    const Value state = flat_state(group, [&](const std::string& kind) { return elements(group, range, size, kind); });
    states.items->insert(states.items->end(), {Value::of(number), state});
    mappings.push_back(mapping(group, range));
    numbers.push_back({number});
  }
  const Value scaler = source_.loss_scaler();
  return dict({
      {"loss_scaler", scaler},
      {"dynamic_loss_scale", *scaler.object->attribute("dynamic")},
      {"overflow", Value::of(false)},
      {"clip_grad", clip()},
      {"base_optimizer_state", dict({{"state", states}, {"param_groups", source_.param_groups(numbers)}})},
      {"single_partition_of_fp32_groups", list(masters)},
      {"zero_stage", Value::of(stage_)},
      {"group_paddings", values().list(paddings)},
      {"partition_count", values().list(Shape(groups_.size(), world_))},
      {"ds_version", values().text(kVersionOfDeepSpeed)},
      {"param_slice_mappings", list(mappings)},
      {"universal_checkpoint_info", dict({{"universal_checkpoint_version", Value::of(0.4)}})},
  });
}

// The optimizer's state in the optim-states of stage 3.
Value Files::sharded_state(int64_t rank) {
  const Value states = values().items(Kind::Dict);
  Items masters;
  std::vector<Shape> numbers;
  int64_t number = 0;
  for (const Group& group : groups_) {
    const Value state =
        flat_state(group, [&](const std::string& kind) { return parts(group.names, kind, at::kFloat, rank); });
    states.items->insert(states.items->end(), {Value::of(number), state});
    numbers.resize(group.number + 1);
    numbers[group.number].push_back(number++);
    masters.push_back(parts(group.names, kMaster, at::kFloat, rank));
  }
  const Value scaler = source_.loss_scaler();
  return dict({
      {"zero_stage", Value::of(stage_)},
      {"loss_scaler", scaler},
      {"dynamic_loss_scale", *scaler.object->attribute("dynamic")},
      {"overflow", Value::of(false)},
      {"partition_count", Value::of(world_)},
      {"optimizer_state_dict", dict({{"state", states}, {"param_groups", source_.param_groups(numbers)}})},
      {"fp32_flat_groups", list(masters)},
  });
}

Value Files::flat_state(const Group& group, const Part& part) {
  const Names kinds = source_.moments(group.names.front());
  for (const std::string& name : group.names) {
    source_.check_states(name);
    TESSERA_CHECK_VALUE(source_.moments(name) == kinds || source_.numel(name) == 0, "checkpoints", "'", name, "' and '",
                        group.names.front(),
                        "' are of one param group and have other states: DeepSpeed's flat groups cannot hold that");
  }
  if (kinds.empty()) return values().items(Kind::Dict);
  const Value state = source_.scalars(group.names);
  for (const std::string& kind : kinds)
    values().put(state, kind, part(kind));
  return state;
}

// Where each parameter lies in this rank's part of the flat group.
Value Files::mapping(const Group& group, shard::Range range) {
  const Value places = values().items(Kind::Ordered);
  int64_t begin = 0;
  for (const std::string& name : group.names) {
    const int64_t end = begin + source_.numel(name);
    const shard::Range both = shard::intersect({begin, end}, range);
    begin = end;
    if (both.empty()) continue;
    const Value type =
        values().name({"deepspeed.utils.tensor_fragment", "fragment_address", Meaning::Class, at::kByte});
    const Value place = dict({{"numel", Value::of(both.size())}, {"start", Value::of(both.begin - range.begin)}});
    values().put(places, name,
                 values().object({type, values().items(Kind::Tuple), true, {{Step::What::State, {place}}}}));
  }
  return places;
}

std::string Files::kind_of(const std::string& name, const std::string& kind) const {
  return kind == kMaster ? source_.value_kind(name) : kind;
}

Value Files::elements(const Group& group, shard::Range range, int64_t size, const std::string& kind) {
  return values().streamed({at::kFloat, {size}, [this, &group, range, size, kind](const Streamed::Sink& sink) {
                              int64_t begin = 0;
                              for (const std::string& name : group.names) {
                                const int64_t end = begin + source_.numel(name);
                                const shard::Range both = shard::intersect({begin, end}, range);
                                if (!both.empty())
                                  source_.chunks(name, kind_of(name, kind), at::kFloat,
                                                 {both.begin - begin, both.end - begin}, sink);
                                begin = end;
                              }
                              put_zeros(size - range.size(), at::kFloat, sink);
                            }});
}

Value Files::parts(const Names& names, const std::string& kind, at::ScalarType dtype, int64_t rank) {
  int64_t size = 0;
  for (const std::string& name : names)
    size += part(name);
  return values().streamed({dtype, {size}, [this, names, kind, dtype, rank](const Streamed::Sink& sink) {
                              for (const std::string& name : names) {
                                const int64_t own = part(name), numel = source_.numel(name);
                                const shard::Range range{std::min(rank * own, numel),
                                                         std::min((rank + 1) * own, numel)};
                                source_.chunks(name, kind_of(name, kind), dtype, range, sink);
                                put_zeros(own - range.size(), dtype, sink);
                              }
                            }});
}

// ---- universal

void write_universal(Source& source, const std::string& folder) {
  Files flat(source, 2, 1), sharded(source, 3, 1);
  const auto write_one = [&](const std::string& name, const Value& value) {
    write_pt(folder + "/" + name, value, style_of_files());
  };
  write_one(kModelStates, flat.model_states(0));
  source.renew();
  write_one(kShardedStates, sharded.model_states(0));
  source.renew();
  const Value all = at(flat.optim_states(0), "optimizer_state_dict"), common = source.values().items(Kind::Dict);
  for (size_t i = 0; i < all.items->size(); i += 2) {
    const Value& key = (*all.items)[i];
    if (!key.is_text("base_optimizer_state") && !key.is_text("single_partition_of_fp32_groups") &&
        !key.is_text("param_slice_mappings"))
      common.items->insert(common.items->end(), {key, (*all.items)[i + 1]});
  }
  const Value groups = at(at(all, "base_optimizer_state"), "param_groups"), states = source.values().items(Kind::Dict);
  int64_t number = 0;
  for (const Files::Group& group : sharded.groups_)
    states.items->insert(states.items->end(),
                         {Value::of(number++), sharded.dict({{"step", source.step(group.names)}})});
  source.values().put(common, "param_groups", groups);
  source.values().put(common, "optimizer_state_dict", sharded.dict({{"state", states}, {"param_groups", groups}}));
  io::make_folder(folder + "/zero");
  write_one("zero/optimizer_state.pt", common);
  for (const Files::Group& group : flat.groups_)
    for (const std::string& name : group.names) {
      TESSERA_CHECK_VALUE(name.find('/') == std::string::npos && !name.starts_with('.'), "checkpoints",
                          "a parameter named '", name, "' cannot be the name of a folder");
      source.renew();
      const std::string own = "zero/" + name + "/";
      io::make_folder(folder + "/" + own);
      const auto write_kind = [&](const std::string& file, const std::string& kind) {
        write_one(own + file + ".pt",
                  sharded.dict({{"param", source.whole(name, kind, at::kFloat)}, {"cat_dim", Value::of(int64_t{0})}}));
      };
      write_kind("fp32", source.value_kind(name));
      for (const std::string& kind : source.moments(name))
        write_kind(kind, kind);
      write_one(own + "step.pt", source.step({name}));
    }
}

}  // namespace tessera::checkpoint::deepspeed
