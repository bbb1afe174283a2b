#include "tessera/checkpoint/deepspeed/read.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "tessera/checkpoint/deepspeed/folder.h"
#include "tessera/checkpoint/deepspeed/pt_writer.h"

namespace tessera::checkpoint::deepspeed {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kExtra = "_extra_state";
constexpr int64_t kSharded = 3;  // the stage whose module holds no values of parameters

// Builds the manifest, and the blobs that the front ends of a checkpoint of ours put beside its tensors.
class Description {
 public:
  explicit Description(Folder& folder) : folder_(folder) {}
  std::string text();

 private:
  struct Frozen {
    Shape shape;
    Held held;
  };
  void add_params();
  void add_param(const std::string& name, const std::map<std::string, Frozen>& frozen,
                 std::map<std::string, std::vector<std::string>>& aliases);
  void add_tensor(const std::string& name, const std::string& kind, const Shape& shape, const Held& held);
  void add_buffer(const std::string& name, const std::string& kind, const TensorRef& tensor);
  void add_buffers();
  void add_rank_buffers();
  std::map<std::string, Frozen> frozen_parts();
  void add_blob(const std::string& name, const Value& value);
  void add_blobs();
  int64_t accumulation() const;
  Json run() const;
  Json group(const Value& group) const;

  Folder& folder_;
  Manifest manifest_;
};

int64_t count_of(const Value& state, const char* key) {
  return number_of(at(state, key), kMostNumber);
}

// ---- parameters and buffers

void Description::add_tensor(const std::string& name, const std::string& kind, const Shape& shape, const Held& held) {
  manifest_.tensors.push_back({name, kind, shape, held.order, held.dtype, {}, held.pieces});
}

void Description::add_buffer(const std::string& name, const std::string& kind, const TensorRef& tensor) {
  add_tensor(name, kind, tensor.shape, whole(tensor));
}

void Description::add_params() {
  std::map<std::string, std::vector<std::string>> aliases;
  std::set<std::string> others;
  for (const auto& [alias, name] : folder_.aliases()) {
    aliases[name].push_back(alias);
    others.insert(alias);
  }
  const std::map<std::string, Frozen> frozen = frozen_parts();
  std::set<std::string> there;
  const Items& items = pairs_of(at(folder_.state, "module"));
  for (size_t i = 0; i < items.size(); i += 2) {
    const std::string& name = *items[i].text;
    there.insert(name);
    if (items[i + 1].is(Kind::Tensor) && !others.contains(name) && !folder_.is_buffer(name))
      add_param(name, frozen, aliases);
  }
  for (const Trained& param : folder_.trained)
    if (!there.contains(param.name)) add_param(param.name, frozen, aliases);
}

void Description::add_param(const std::string& name, const std::map<std::string, Frozen>& frozen,
                            std::map<std::string, std::vector<std::string>>& aliases) {
  const Trained* known = folder_.find(name);
  const TensorRef* held = folder_.held(name);
  const auto part = frozen.find(name);
  ParamRecord param;
  param.name = name;
  if (known != nullptr)
    param.shape = known->shape;
  else
    param.shape = part != frozen.end() ? part->second.shape : held->shape;
  param.dtype = held == nullptr ? at::kFloat : held->dtype();
  // Without hints, all parameters of a stage 0 whose optimizer is not understood may be trained.
  param.trained = known != nullptr || (folder_.stage == 0 && folder_.trained.empty());
  param.step = known == nullptr ? 0 : known->step;
  param.aliases = aliases[name];
  std::vector<std::pair<std::string, Held>> tensors;
  if (known != nullptr) tensors = known->tensors;
  const auto is_master = [](const auto& one) { return one.first == kMaster; };
  if (std::ranges::none_of(tensors, is_master)) {
    if (held == nullptr && part == frozen.end()) unfit("nothing holds the values of '", printable(name), "'");
    const auto is_weight = [](const auto& one) { return one.first == kWeight; };
    std::erase_if(tensors, is_weight);
    tensors.emplace_back(kWeight, part != frozen.end() ? part->second.held : whole(*held));
  }
  for (const auto& [kind, of_kind] : tensors)
    add_tensor(name, kind, param.shape, of_kind);
  manifest_.params.push_back(std::move(param));
}

// The frozen parameters of stage 3, whose module does not hold their values.
std::map<std::string, Description::Frozen> Description::frozen_parts() {
  std::map<std::string, Frozen> parts;
  const Value* shapes = find(folder_.state, "frozen_param_shapes");
  if (folder_.stage != kSharded || shapes == nullptr || shapes->is(Kind::None) || pairs_of(*shapes).empty())
    return parts;
  const int64_t world = ranks_of(*folder_.model_file);
  std::vector<int64_t> missing;
  for (int64_t rank = 0; rank < world; ++rank)
    if (!folder_.models.contains(rank)) missing.push_back(rank);
  if (!missing.empty()) folder_.fail("has no model-states of ranks ", shown(missing), ", which hold frozen parameters");
  std::vector<const PtFile*> files;
  for (int64_t rank = 0; rank < world; ++rank) {
    files.push_back(&folder_.open(folder_.models.at(rank)));
    if (count_of(files.back()->value(), "global_steps") != count_of(folder_.state, "global_steps"))
      files.back()->fail("was saved at another step than '", folder_.model_file->path(), "'");
  }
  for (size_t i = 0; i < shapes->items->size(); i += 2) {
    const std::string& name = text_of((*shapes->items)[i]);
    std::vector<const TensorRef*> of_ranks;
    for (const PtFile* file : files)
      of_ranks.push_back(&tensor_of(at(at(file->value(), "frozen_param_fragments"), name)));
    const Shape shape = shape_of((*shapes->items)[i + 1]);
    parts[name] = {shape, sharded(of_ranks, 0, numel_of(shape))};
  }
  return parts;
}

void Description::add_buffers() {
  for (const std::string& name : folder_.buffer_names)
    if (const TensorRef* tensor = folder_.held(name)) add_buffer(name, kBuffer, *tensor);
}

// Adds the buffers that differ from rank 0's: those of stage 3, where every rank has its own file, and those in our file.
void Description::add_rank_buffers() {
  if (folder_.stage == kSharded && !folder_.buffer_names.empty())
    for (const auto& [rank, name] : folder_.models) {
      if (rank <= 0) continue;
      const PtFile& file = folder_.open(name);
      for (const std::string& buffer : folder_.buffer_names) {
        const Value* value = find(at(file.value(), "module"), buffer);
        const TensorRef* first = folder_.held(buffer);
        if (value == nullptr || !value->is(Kind::Tensor) || first == nullptr) continue;
        const at::Tensor own = file.read(*value->tensor), of_first = folder_.model_file->read(*first);
        if (own.scalar_type() != of_first.scalar_type() || !own.equal(of_first))
          add_buffer(c10::str(buffer, "@rank=", rank), kRankBuffer, *value->tensor);
      }
    }
  if (!folder_.has_own_buffers) return;
  const PtFile& file = folder_.open(kOwnBuffers);
  const Items& items = pairs_of(file.value());
  for (size_t i = 0; i < items.size(); i += 2) {
    const std::string& name = text_of(items[i]);
    const size_t place = name.rfind("@rank=");
    if (!items[i + 1].is(Kind::Tensor) || place == std::string::npos || !folder_.is_buffer(name.substr(0, place)))
      file.fail("has ", shown(items[i]), ", which is no tensor of a buffer");
    add_buffer(name, kRankBuffer, *items[i + 1].tensor);
  }
}

// ---- what is no tensor

void Description::add_blob(const std::string& name, const Value& value) {
  FileRecord blob;
  blob.text = pt_bytes(value, {folder_.hints.objects, false});
  blob.bytes = static_cast<int64_t>(blob.text.size());
  manifest_.blobs[name] = std::move(blob);
}

void Description::add_blobs() {
  Values& values = folder_.values;
  const auto get = [&](const char* key) {
    const Value* found = find(folder_.state, key);
    return found == nullptr ? Value() : *found;
  };
  const Value python = values.items(Kind::Dict);
  values.put(python, "config", get("ds_config"));
  if (!folder_.group_names.empty()) {
    const Value names = values.items(Kind::List);
    for (const auto& group : folder_.group_names)
      names.items->push_back(values.list(group));
    values.put(python, "group_names", names);
  }
  add_blob("python", python);
  if (!folder_.groups.empty()) add_blob("param_groups", values.items(Kind::List, folder_.groups));
  if (!get("lr_scheduler").is(Kind::None)) add_blob("schedule", get("lr_scheduler"));

  const Value extra = values.items(Kind::Dict);
  const Items& module = pairs_of(at(folder_.state, "module"));
  for (size_t i = 0; i < module.size(); i += 2) {
    std::string name = *module[i].text;
    if (!name.ends_with(kExtra) || module[i + 1].is(Kind::Tensor)) continue;
    name.resize(name.size() - std::string_view(kExtra).size());
    if (name.ends_with('.')) name.pop_back();
    values.put(extra, name, module[i + 1]);
  }
  add_blob("extra", extra);

  const Value client = values.items(Kind::Dict);
  const Items& state = pairs_of(folder_.state);
  for (size_t i = 0; i < state.size(); i += 2)
    if (!state[i].is(Kind::Text) || !is_own_key(*state[i].text))
      client.items->insert(client.items->end(), {state[i], state[i + 1]});
  add_blob("client_state", client);

  const Value numbers = values.items(Kind::Dict);
  for (const Trained& param : folder_.trained)
    if (param.numbers.is_dict() && !param.numbers.items->empty()) values.put(numbers, param.name, param.numbers);
  if (!numbers.items->empty()) add_blob("optimizer-0", numbers);
}

int64_t Description::accumulation() const {
  if (folder_.hints.accumulation.value_or(0) > 0) return *folder_.hints.accumulation;
  const Value* config = find(folder_.state, "ds_config");
  const Value* steps = config != nullptr && config->is_dict() ? find(*config, "gradient_accumulation_steps") : nullptr;
  return steps != nullptr && steps->is(Kind::Int) && steps->number > 0 ? steps->number : 1;
}

Json Description::group(const Value& group) const {
  Json one = Json::object();
  const auto number = [](const Value* value) {
    return value != nullptr && value->is_number() && std::isfinite(real_of(*value));
  };
  for (const char* key : {"lr", "eps", "weight_decay"})
    if (const Value* value = find(group, key); number(value)) one[key] = real_of(*value);
  const Value* betas = find(group, "betas");
  if (betas == nullptr || !betas->is_list() || betas->items->size() != 2) return one;
  if (!number(betas->items->data()) || !number(&betas->items->back())) return one;
  one["beta1"] = real_of(betas->items->front());
  one["beta2"] = real_of(betas->items->back());
  return one;
}

Json Description::run() const {
  const Value& state = folder_.state;
  const int64_t steps = count_of(state, "global_steps"), world = ranks_of(*folder_.model_file);
  int64_t micro_steps = 0;
  if (__builtin_mul_overflow(steps, accumulation(), &micro_steps)) unfit(steps, " updates of ", accumulation());
  const Value* samples = find(state, "global_samples");
  const Value* version = find(state, "ds_version");
  Json run{{"counters",
            {{"micro_steps", micro_steps},
             {"global_steps", steps},
             {"skipped_steps", count_of(state, "skipped_steps")},
             {"global_samples", samples == nullptr ? 0 : number_of(*samples, kMostNumber)}}},
           {"ranks", ranks_text(world)}};
  run["groups"] = Json::array();
  for (const Value& one : folder_.groups)
    run["groups"].push_back(group(one));
  run["client"] = Json::object();
  // The counters that a schedule of the core is made from.
  const Value* schedule = find(state, "lr_scheduler");
  const Value* last = schedule != nullptr && schedule->is_dict() ? find(*schedule, "last_batch_iteration") : nullptr;
  if (last != nullptr && last->is(Kind::Int) && last->number >= -1 && last->number < kMostNumber / 2)
    run["client"]["schedule_steps"] = last->number + 1;
  const bool has_version = version != nullptr && version->is(Kind::Text);
  run["source"] = {{"format", folder_.universal ? "DeepSpeed, universal" : "DeepSpeed"},
                   {"version", has_version          ? *version->text
                               : version == nullptr ? "None"
                                                    : shown(*version)},
                   {"stage", folder_.stage},
                   {"ranks", world}};
  if (folder_.scaler)
    run["scaler"] = {{"scale", folder_.scaler->scale},
                     {"steps", folder_.scaler->steps},
                     {"good_steps", folder_.scaler->good_steps},
                     {"budget", folder_.scaler->budget},
                     {"overridden", false}};
  return run;
}

std::string Description::text() {
  add_params();
  add_buffers();
  add_rank_buffers();
  add_blobs();
  manifest_.run = run().dump();
  for (const auto& [name, file] : folder_.files) {
    FileRecord record{name, file->size()};
    record.raw = true;
    record.blocks = file->blocks();
    manifest_.files.push_back(std::move(record));
  }
  return to_text(manifest_);
}

}  // namespace

std::string manifest_of(const std::string& folder, const DeepSpeedHints& hints) {
  static const std::regex looked_for(R"((?:zero_pp_rank_\d{1,9}_)?mp_rank_\d{1,9}_model_states\.pt)");
  std::vector<std::string> names;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(folder, none))
    names.push_back(entry.path().filename().string());
  std::ranges::sort(names);
  if (std::ranges::none_of(names, [](const std::string& name) { return std::regex_match(name, looked_for); }))
    return "";
  try {
    Folder found(folder, names, hints);
    return Description(found).text();
  } catch (const Unfit& error) {
    TESSERA_FAIL(IoError, "[checkpoint] '", folder, "' is damaged, or no checkpoint of DeepSpeed's: ", error.what());
  } catch (const nlohmann::json::exception&) {
    TESSERA_FAIL(IoError, "[checkpoint] '", folder,
                 "' is damaged, or no checkpoint of DeepSpeed's: a name is no UTF-8");
  }
}

}  // namespace tessera::checkpoint::deepspeed
