#include "tessera/checkpoint/deepspeed/folder.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <regex>
#include <set>
#include <tuple>

namespace tessera::checkpoint::deepspeed {

Folder::Folder(std::string folder, const std::vector<std::string>& names, const DeepSpeedHints& given)
    : path(std::move(folder)), hints(given) {
  has_own_buffers = std::ranges::find(names, kOwnBuffers) != names.end();
  universal = std::filesystem::is_directory(std::filesystem::path(path) / "zero");
  Models all;
  Optims optims;
  sort_names(names, all, optims);
  model_file = &open(all.begin()->second);
  for (const auto& [ranks, name] : all)
    models[ranks.first] = name;
  state = model_file->value();
  if (!state.is_dict() || !has(state, "module")) model_file->fail("is no model-states file: it has no 'module'");
  read_module();
  stage = read_states(optims, all.begin()->first.first >= 0);
}

// Sorts model-states files by data-parallel rank (-1: one file for all) and tensor-parallel rank, optim-states by the first.
void Folder::sort_names(const std::vector<std::string>& names, Models& all, Optims& optims) {
  static const std::regex optim_name(R"((bf16_|fp16_)?zero_pp_rank_(\d{1,9})_mp_rank_(\d{1,9})_optim_states\.pt)");
  static const std::regex model_name(R"((?:zero_pp_rank_(\d{1,9})_)?mp_rank_(\d{1,9})_model_states\.pt)");
  const auto part = [](const std::ssub_match& match) { return match.matched ? std::stoll(match.str()) : -1; };
  for (const std::string& name : names) {
    TESSERA_CHECK_IO(!name.starts_with("layer_") && !name.starts_with("expp_"), "checkpoint", "'", path, "/", name,
                     "': checkpoints with experts cannot be read");
    std::smatch match;
    if (std::regex_match(name, match, model_name)) all[{part(match[1]), part(match[2])}] = name;
    if (!std::regex_match(name, match, optim_name)) continue;
    const auto [known, is_new] = optims.emplace(part(match[2]), name);
    TESSERA_CHECK_IO(is_new, "checkpoint", "'", path, "': ", known->second, " and ", name, " are of two checkpoints");
    if (part(match[3]) > 0) all[{-1, part(match[3])}] = name;
  }
  for (const auto& [ranks, name] : all)
    TESSERA_CHECK_IO(ranks.second == 0 || universal, "checkpoint", "'", path, "/", name,
                     "': tensor-parallel checkpoints can be read as universal ones only");
  const bool of_all = all.begin()->first.first < 0;
  if (universal && of_all) std::erase_if(all, [](const auto& one) { return one.first.first >= 0; });  // ours have both
  TESSERA_CHECK_IO((all.rbegin()->first.first < 0) == of_all, "checkpoint", "'", path,
                   "' has files of stage 3 and of another stage: of two checkpoints");
}

PtFile& Folder::open(const std::string& name) {
  const auto number = static_cast<int>(files.size());
  if (const auto [known, is_new] = opened_.emplace(name, files.size()); !is_new) return *files[known->second].second;
  files.emplace_back(name, std::make_unique<PtFile>(path + "/" + name, hints.objects, number));
  return *files.back().second;
}

void Folder::read_module() {
  for (const Value& name : items_of(at(state, "buffer_names"))) {
    buffer_names.push_back(text_of(name));
    buffers[buffer_names.back()] = false;
  }
  const Items& items = pairs_of(at(state, "module"));
  for (size_t i = 0; i < items.size(); i += 2) {
    const std::string& name = text_of(items[i]);
    const Value& value = items[i + 1];
    if (value.is(Kind::Object) && !name.ends_with("_extra_state"))
      model_file->fail("has an object of ", value.object->name() ? shown(value.object->callable) : "some class",
                       " in the place of '", printable(name), "'");
    module_[name] = value.is(Kind::Tensor) ? value.tensor : nullptr;
    if (const auto buffer = buffers.find(name); buffer != buffers.end()) buffer->second = value.is(Kind::Tensor);
  }
}

const TensorRef* Folder::held(const std::string& name) const {
  const auto found = module_.find(name);
  return found == module_.end() ? nullptr : found->second;
}

const Trained* Folder::find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &trained[found->second];
}

Trained& Folder::add(const std::string& name, const Shape& shape, int64_t step, const Value& numbers) {
  if (!index_.emplace(name, trained.size()).second) model_file->fail("lists parameter '", printable(name), "' twice");
  return trained.emplace_back(Trained{name, shape, step, numbers, {}});
}

std::vector<std::pair<std::string, std::string>> Folder::aliases() const {
  std::vector<std::pair<std::string, std::string>> all;
  const Value* shared = deepspeed::find(state, "shared_params");
  if (shared != nullptr && shared->is_dict()) {
    for (size_t i = 0; i < shared->items->size(); i += 2)
      all.emplace_back(text_of((*shared->items)[i]), text_of((*shared->items)[i + 1]));
    return all;
  }
  std::map<std::tuple<int64_t, Shape, Shape, at::ScalarType>, std::string> first;
  const Items& items = pairs_of(at(state, "module"));
  for (size_t i = 0; i < items.size(); i += 2) {
    if (!items[i + 1].is(Kind::Tensor) || is_buffer(*items[i].text)) continue;
    const TensorRef& tensor = *items[i + 1].tensor;
    if (tensor.numel() == 0) continue;
    const auto [known, is_new] =
        first.try_emplace({tensor.begin(), tensor.shape, tensor.strides, tensor.dtype()}, *items[i].text);
    if (!is_new) all.emplace_back(*items[i].text, known->second);
  }
  return all;
}

std::vector<std::vector<std::pair<std::string, Shape>>> Folder::shapes() const {
  std::vector<std::vector<std::pair<std::string, Shape>>> all;
  for (const Value& group : items_of(at(state, "param_shapes"))) {
    all.emplace_back();
    const Items& items = pairs_of(group);
    for (size_t i = 0; i < items.size(); i += 2)
      all.back().emplace_back(text_of(items[i]), shape_of(items[i + 1]));
  }
  return all;
}

// ---- numbers

int64_t Folder::step_of(const PtFile& file, const Value& value) const {
  if (!value.is(Kind::Tensor)) return number_of(value, kMostNumber);
  const at::Tensor step = file.read(*value.tensor);
  if (step.numel() != 1) unfit("a step of shape ", step.sizes());
  return number_of(Value::of(step.item<double>()), kMostNumber);
}

// Reads the updates that we write by parameter beside those of flat groups; DeepSpeed's own files have none.
void Folder::read_own_steps(const PtFile& file, const Value& holder) {
  const Value* steps = deepspeed::find(holder, kOwnSteps);
  const Items none;
  const Items& items = steps == nullptr ? none : pairs_of(*steps);
  for (size_t i = 0; i < items.size(); i += 2)
    if (const auto known = index_.find(text_of(items[i])); known != index_.end())
      trained[known->second].step = step_of(file, items[i + 1]);
}

template <class Find>
void Folder::set_scaler_from(const Find& find) {
  const auto integer = [&](const char* key, int64_t otherwise) {
    const Value* value = find(key);
    if (value == nullptr) return otherwise;
    const double number = real_of(*value);
    if (!(std::abs(number) <= static_cast<double>(kMostNumber))) unfit(shown(*value), " is no number that can be");
    return static_cast<int64_t>(number);
  };
  const double scale = real_of(*find("cur_scale"));
  const Value *iteration = find("cur_iter"), *dynamic = find("dynamic_loss_scale");
  const int64_t steps = iteration == nullptr ? 0 : number_of(*iteration, kMostNumber);
  const bool fixed = dynamic != nullptr && dynamic->is(Kind::Bool) && dynamic->number == 0;
  if (scale == 1 && (iteration == nullptr || fixed)) return;  // the state of the modes without loss scaling
  scaler = Scaler{scale, steps, std::max<int64_t>(0, steps - integer("last_overflow_iter", -1) - 1),
                  std::max<int64_t>(1, integer("cur_hysteresis", 1))};
}

void Folder::set_scaler(const Value& of) {
  const Value* scale = deepspeed::find(of, "cur_scale");
  if (scale != nullptr && !scale->is(Kind::None))
    set_scaler_from([&](const char* key) { return deepspeed::find(of, key); });
}

void Folder::set_scaler(const Object& of) {
  if (of.attribute("cur_scale") != nullptr) set_scaler_from([&](const char* key) { return of.attribute(key); });
}

void Folder::set_groups(const Value& given) {
  for (const Value& group : items_of(given)) {
    const Value kept = values.items(Kind::Dict);
    const Items& items = pairs_of(group);
    for (size_t i = 0; i < items.size(); i += 2)
      if (!items[i].is_text("params")) kept.items->insert(kept.items->end(), {items[i], items[i + 1]});
    groups.push_back(kept);
  }
}

}  // namespace tessera::checkpoint::deepspeed
