#include "tessera/checkpoint/deepspeed/source.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/checkpoint/deepspeed/pieces.h"

namespace tessera::checkpoint::deepspeed {

namespace {

constexpr int64_t kChunk = int64_t{1} << 22;  // the largest piece, in elements
constexpr const char* kScaler = "deepspeed.runtime.fp16.loss_scaler";

bool is_own_kind(const std::string& kind) {
  constexpr std::array<const char*, 6> kOwn{"weight",      "master",   "buffer",
                                            "rank_buffer", "gradient", "partial_gradient"};
  return std::ranges::find(kOwn, kind) != kOwn.end();
}

bool is_true(const Value* value) {
  if (value == nullptr) return false;
  switch (value->kind) {
    case Kind::None:
      return false;
    case Kind::Bool:
    case Kind::Int:
      return value->number != 0;
    case Kind::Float:
      return value->real != 0;
    case Kind::Text:
      return !value->text->empty();
    case Kind::List:
    case Kind::Dict:
      return !value->items->empty();
    default:
      return true;
  }
}

const Value* in(const Value* dict, const char* key) {
  return dict != nullptr && dict->is_dict() ? find(*dict, key) : nullptr;
}

std::string lower(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

}  // namespace

Source::Source(const Reader& reader, Objects objects) : reader_(reader), objects_(objects) {
  for (const ParamRecord& param : params()) {
    params_[param.name] = &param;
    (param.trained ? trained_ : frozen_).push_back(param.name);
  }
  for (const TensorRecord& tensor : reader.manifest().tensors)
    tensors_[tensor.name].push_back(&tensor);
  run_ = nlohmann::ordered_json::parse(reader.manifest().run);
  python_ = blob("python");
  client_ = blob("client_state");
  const Value* config = find(python_, "config");
  const bool none = config == nullptr || config->is(Kind::None);
  TESSERA_CHECK_IO(none || config->is_dict(), "checkpoint", "'python', 'config' is damaged: ", shown(*config),
                   " in the place of a dict");
  config_ = none ? held_.items(Kind::Dict) : *config;
  extra_ = part("extra");
  if (const Value* names = find(python_, "group_names")) group_names_ = *names;
  param_groups_ = part("param_groups", true);
  schedule_ = part("schedule", true);
  read_numbers();
}

// The blob's value; without such a blob an empty dict, or None for a list.
Value Source::blob(const std::string& name, bool is_list) {
  if (!reader_.manifest().blobs.contains(name)) return is_list ? Value() : held_.items(Kind::Dict);
  blobs_.push_back(std::make_unique<PtFile>(reader_.blob(name), name, objects_));
  const Value& value = blobs_.back()->value();
  TESSERA_CHECK_IO(is_list || value.is_dict(), "checkpoint", "'", name, "' is damaged: ", shown(value),
                   " in the place of a dict");
  return value;
}

// A blob of its own; older checkpoints have it as a part of "python".
Value Source::part(const std::string& name, bool is_list) {
  const Value* older = find(python_, name);
  return older != nullptr ? *older : blob(name, is_list);
}

void Source::read_numbers() {
  for (const auto& [name, file] : reader_.manifest().blobs) {
    if (!name.starts_with("optimizer-")) continue;
    const Value all = blob(name);
    for (size_t i = 0; i < all.items->size(); i += 2) {
      const std::string& param = text_of((*all.items)[i]);
      const Value own = held_.items(Kind::Dict);
      const Items& items = pairs_of((*all.items)[i + 1]);
      const Value* cut = nullptr;
      for (size_t k = 0; k < items.size(); k += 2)
        if (items[k].is_text(kCut))
          cut = &items[k + 1];
        else
          own.items->insert(own.items->end(), {items[k], items[k + 1]});
      numbers_[param] = own;
      if (const Value* step = find(own, "step")) {
        const bool is_number =
            step->is(Kind::Tensor) ? step->tensor->numel() == 1 : step->is_number() && std::isfinite(real_of(*step));
        TESSERA_CHECK_IO(is_number, "checkpoint", "the optimizer's state of '", param,
                         "', 'step' is damaged: ", shown(*step), " in the place of a number");
      }
      if (cut == nullptr) continue;
      // States must belong to the whole parameter: no file of DeepSpeed's can hold a part's.
      const auto known = params_.find(param);
      const Shape shape = known == params_.end() ? Shape() : known->second->shape;
      const bool is_whole = items_of(*cut).size() == 5 && number_of(at(*cut, size_t{0}), kMostNumber) == 0 &&
                            number_of(at(*cut, size_t{1}), kMostNumber) == numel_of(shape) &&
                            shape_of(at(*cut, size_t{2})) == shape && number_of(at(*cut, size_t{4}), kMostNumber) == 1;
      if (!is_whole) check_states(param);
    }
  }
}

void Source::check_states(const std::string& name) const {
  const auto found = numbers_.find(name);
  if (found == numbers_.end()) return;
  std::string kinds;
  const Items& items = *found->second.items;
  for (size_t i = 0; i < items.size(); i += 2)
    if (items[i + 1].is(Kind::Tensor) && !items[i + 1].tensor->shape.empty())
      kinds += (kinds.empty() ? "" : ", ") + shown(items[i]);
  TESSERA_CHECK_VALUE(kinds.empty(), "checkpoints", kinds, " of '", name,
                      "' are neither numbers nor one value for each element, which DeepSpeed's files cannot hold");
}

int64_t Source::numel(const std::string& name) const {
  return numel_of(param(name).shape);
}

const Value* Source::section(const char* name) const {
  return in(&config_, name);
}

bool Source::is_bf16() const {
  const Value* given = is_true(section("bf16")) ? section("bf16") : section("bfloat16");
  return is_true(in(given, "enabled")) ||
         std::ranges::any_of(params(), [](const ParamRecord& param) { return param.dtype == at::kBFloat16; });
}

bool Source::is_low() const {
  return std::ranges::any_of(trained_, [&](const std::string& name) { return param(name).dtype != at::kFloat; });
}

bool Source::has_torch_optimizer() const {
  const Value* optimizer = section("optimizer");
  const Value* type = in(optimizer, "type");
  const std::string name = type != nullptr && type->is(Kind::Text) ? lower(*type->text) : "";
  return (name != "adam" && name != "adamw") || is_true(in(in(optimizer, "params"), "torch_adam"));
}

std::vector<Names> Source::groups() const {
  std::vector<Names> all;
  if (group_names_.is(Kind::None)) {
    TESSERA_CHECK_VALUE(
        run_["groups"].size() <= 1, "checkpoints",
        "this checkpoint does not say which parameters its groups have, and DeepSpeed's files need that: "
        "save it from Python by this version");
    all.push_back(trained_);
  } else {
    for (const Value& group : items_of(group_names_)) {
      all.emplace_back();
      for (const Value& name : items_of(group))
        if (params_.contains(text_of(name))) all.back().push_back(*name.text);
    }
  }
  std::erase_if(all, [](const Names& names) { return names.empty(); });
  return all;
}

Value Source::param_groups(const std::vector<Shape>& numbers) {
  Items saved;
  if (!param_groups_.is(Kind::None)) {
    saved = items_of(param_groups_);
  } else {
    for (const auto& group : run_["groups"]) {
      const auto number = [&](const char* key) { return Value::of(group.at(key).get<double>()); };
      const Value one = values_->items(Kind::Dict);
      values_->put(one, "lr", number("lr"));
      values_->put(one, "betas", values_->items(Kind::Tuple, {number("beta1"), number("beta2")}));
      values_->put(one, "eps", number("eps"));
      values_->put(one, "weight_decay", number("weight_decay"));
      saved.push_back(one);
    }
  }
  const Value all = values_->items(Kind::List);
  for (size_t i = 0; i < std::min(saved.size(), numbers.size()); ++i) {
    const Value one = values_->items(Kind::Dict, pairs_of(saved[i]));
    // DeepSpeed's own Adam needs this key.
    if (has(saved[0], "betas") && !has(one, "bias_correction")) values_->put(one, "bias_correction", Value::of(true));
    values_->put(one, "params", values_->list(numbers[i]));
    all.items->push_back(one);
  }
  return all;
}

int64_t Source::updates(const Names& names) const {
  int64_t most = 0;
  for (const std::string& name : names) {
    const auto found = numbers_.find(name);
    const Value* step = found == numbers_.end() ? nullptr : find(found->second, "step");
    int64_t own = param(name).step;
    if (step != nullptr && step->is(Kind::Tensor))
      own = step->tensor->storage->file->read(*step->tensor).item<int64_t>();
    else if (step != nullptr)
      own = static_cast<int64_t>(real_of(*step));
    most = std::max(most, own);
  }
  return most;
}

Value Source::step(const Names& names) {
  const int64_t most = updates(names);
  if (!has_torch_optimizer()) return Value::of(most);
  const at::Tensor step = at::full({}, most, at::kFloat);
  return values_->streamed({at::kFloat, {}, [step](const Streamed::Sink& sink) { sink(step.view({1})); }});
}

Value Source::steps_beside(const std::vector<Names>& groups) {
  const Value steps = values_->items(Kind::Dict);
  for (const Names& names : groups) {
    const int64_t most = updates(names);
    for (const std::string& name : names)
      if (const int64_t own = updates({name}); own != most) values_->put(steps, name, Value::of(own));
  }
  return steps;
}

Value Source::scalars(const Names& names) {
  const Value made = values_->items(Kind::Dict);
  const auto found = names.empty() ? numbers_.end() : numbers_.find(names[0]);
  if (found != numbers_.end())
    for (size_t i = 0; i < found->second.items->size(); i += 2)
      if (const Value& key = (*found->second.items)[i]; !key.is_text("step"))
        made.items->insert(made.items->end(), {key, (*found->second.items)[i + 1]});
  values_->put(made, "step", step(names));
  return made;
}

Names Source::moments(const std::string& name) const {
  Names kinds;
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) return kinds;
  for (const TensorRecord* tensor : found->second)
    if (!is_own_kind(tensor->kind)) kinds.push_back(tensor->kind);
  return kinds;
}

std::string Source::value_kind(const std::string& name) const {
  return reader_.find(name, kMaster) != nullptr ? kMaster : kWeight;
}

void Source::chunks(const std::string& name, const std::string& kind, at::ScalarType dtype, shard::Range range,
                    const Streamed::Sink& sink) const {
  for (int64_t begin = range.begin; begin < range.end; begin += kChunk)
    sink(reader_.read_range(name, kind, {begin, std::min(begin + kChunk, range.end)}).to(dtype));
}

Value Source::whole(const std::string& name, const std::string& kind, at::ScalarType dtype) {
  const TensorRecord* record = reader_.find(name, kind);
  const Shape shape = record != nullptr ? record->shape : param(name).shape;
  return values_->streamed({dtype, shape, [this, name, kind, dtype, shape](const Streamed::Sink& sink) {
                              chunks(name, kind, dtype, {0, numel_of(shape)}, sink);
                            }});
}

Value Source::module(int64_t rank) {
  const Value state = values_->items(Kind::Ordered);
  for (const ParamRecord& param : params()) {
    const Value value = whole(param.name, value_kind(param.name), param.dtype);
    values_->put(state, param.name, value);
    for (const std::string& alias : param.aliases)
      values_->put(state, alias, value);
  }
  for (const std::string& name : buffers()) {
    const std::string own = c10::str(name, "@rank=", rank);
    const TensorRecord* record = reader_.find(own, kRankBuffer);
    if (record == nullptr) record = reader_.find(name, kBuffer);
    values_->put(state, name, whole(record->name, record->kind, record->dtype));
  }
  const Items& extra = pairs_of(extra_);
  for (size_t i = 0; i < extra.size(); i += 2) {
    const std::string& prefix = text_of(extra[i]);
    values_->put(state, prefix.empty() ? "_extra_state" : prefix + "._extra_state", extra[i + 1]);
  }
  return state;
}

Names Source::buffers() const {
  Names names;
  for (const TensorRecord& tensor : reader_.manifest().tensors)
    if (tensor.kind == kBuffer) names.push_back(tensor.name);
  return names;
}

Value Source::rank_buffers() {
  const Value all = values_->items(Kind::Dict);
  for (const TensorRecord& tensor : reader_.manifest().tensors)
    if (tensor.kind == kRankBuffer) values_->put(all, tensor.name, whole(tensor.name, tensor.kind, tensor.dtype));
  return all;
}

Value Source::schedule() {
  const auto client = run_.find("client");
  if (!schedule_.is(Kind::None) || client == run_.end() || !client->contains("schedule_steps")) return schedule_;
  const Value state = values_->items(Kind::Dict);
  values_->put(state, "last_batch_iteration", Value::of((*client)["schedule_steps"].get<int64_t>() - 1));
  return state;
}

Value Source::loss_scaler() {
  const Value* fp16 = section("fp16");
  const auto number = [&](const char* key, int64_t otherwise) {
    const Value* given = in(fp16, key);
    return given != nullptr ? *given : Value::of(otherwise);
  };
  const bool has_scaler = run_.contains("scaler");
  const auto saved = [&](const char* key, int64_t otherwise) {
    return has_scaler ? run_["scaler"].at(key).get<int64_t>() : otherwise;
  };
  const bool dynamic = is_true(in(fp16, "enabled")) && !is_true(in(fp16, "loss_scale"));
  const Value state = values_->items(Kind::Dict);
  values_->put(state, "cur_scale", Value::of(has_scaler ? run_["scaler"].at("scale").get<double>() : 1.0));
  values_->put(state, "dynamic", Value::of(dynamic));
  if (dynamic) {
    const int64_t steps = saved("steps", 0);
    values_->put(state, "cur_iter", Value::of(steps));
    values_->put(state, "last_overflow_iter", Value::of(steps - saved("good_steps", 0) - 1));
    values_->put(state, "scale_factor", Value::of(2.0));
    values_->put(state, "scale_window", number("loss_scale_window", 1000));
    values_->put(state, "min_scale", number("min_loss_scale", 1));
    values_->put(state, "delayed_shift", number("hysteresis", 2));
    values_->put(state, "cur_hysteresis", Value::of(saved("budget", 1)));
    values_->put(state, "consecutive_hysteresis", Value::of(is_true(in(fp16, "consecutive_hysteresis"))));
    values_->put(state, "raise_error_at_min_scale", Value::of(true));
    values_->put(state, "dtype", Value::of(at::kHalf));
  }
  const Value name = values_->name({kScaler, dynamic ? "DynamicLossScaler" : "LossScaler", Meaning::Class, at::kByte});
  return values_->object({name, values_->items(Kind::Tuple), true, {{Step::What::State, {state}}}});
}

}  // namespace tessera::checkpoint::deepspeed
