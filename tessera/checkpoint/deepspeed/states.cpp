#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>

#include "tessera/checkpoint/deepspeed/folder.h"

namespace tessera::checkpoint::deepspeed {

namespace {

constexpr int64_t kMostStage = 3;
constexpr int64_t kMostOfGroup = int64_t{1} << 60;  // the most elements of a group

std::string text_of_key(const Value& key) {
  return key.is(Kind::Text) ? *key.text : shown(key);
}

Held& slot_of(Trained& param, const std::string& kind, at::ScalarType dtype) {
  for (auto& [known, held] : param.tensors)
    if (known == kind) return held = Held{dtype, {}, {}};
  return param.tensors.emplace_back(kind, Held{dtype, {}, {}}).second;
}

// The dict's value under a number; an empty dict where there is none.
Value state_of(const Value& states, int64_t number, Values& values) {
  const Value* found = find(states, number);
  return found == nullptr ? values.items(Kind::Dict) : *found;
}

int64_t stage_of(const Value& state) {
  const Value* stage = find(state, "zero_stage");
  return stage == nullptr ? 1 : number_of(*stage, kMostStage);
}

int64_t end_of(int64_t begin, int64_t size) {
  if (begin > kMostOfGroup - size) unfit("a group of more than 2^60 elements");
  return begin + size;
}

const TensorRef& tensor_at(const Value& list, size_t number) {
  return deepspeed::tensor_of(at(list, number));
}

}  // namespace

int64_t Folder::read_states(const Optims& optims, bool is_sharded) {
  if (universal) return read_universal(is_sharded);
  if (optims.empty()) {
    if (is_sharded) fail("has no '*_optim_states.pt', which hold the weights of stage 3");
    const Value* listed = deepspeed::find(state, "param_shapes");
    const bool of_stages = listed != nullptr && !listed->is(Kind::None) && !items_of(*listed).empty();
    if (of_stages && hints.optimizer)
      fail(
          "has no '*_optim_states.pt', which hold masters and moments of stages 1 and 2; load its weights alone, "
          "without ",
          "the optimizer's states");
    read_stage0();
    return 0;
  }
  const int64_t world = ranks_of(*model_file);
  std::vector<int64_t> missing, there;
  for (const auto& [rank, name] : optims)
    there.push_back(rank);
  for (int64_t rank = 0; rank < world; ++rank)
    if (!optims.contains(rank)) missing.push_back(rank);
  if (!missing.empty() || std::cmp_not_equal(optims.size(), world))
    fail("was written by ", world, " ranks and has optim-states of ", shown(there), ": missing ", shown(missing));
  std::vector<const PtFile*> of;
  Items states;
  for (const auto& [rank, name] : optims) {
    of.push_back(&open(name));
    states.push_back(at(of.back()->value(), "optimizer_state_dict"));
  }
  const int64_t found = stage_of(states[0]);
  if (is_sharded != (found == kMostStage))
    of[0]->fail("is of stage ", found, ", the model-states beside it are not: of two checkpoints");
  if (is_sharded)
    read_sharded(of, states);
  else
    read_flat(of, states);
  const Value* scaling = deepspeed::find(states[0], "loss_scaler");
  if (scaling != nullptr && scaling->is(Kind::Object)) set_scaler(*scaling->object);
  read_own_steps(*of[0], of[0]->value());
  return found;
}

Folder::Flat Folder::flat_states(const std::vector<const TensorRef*>& masters, const std::vector<Value>& states,
                                 const std::vector<const PtFile*>& of) {
  Flat flat{{{kMaster, masters}}, 0, values.items(Kind::Dict)};
  std::set<int64_t> steps;
  for (size_t rank = 0; rank < states.size(); ++rank) {
    const Value* step = deepspeed::find(states[rank], "step");
    steps.insert(step == nullptr ? 0 : step_of(*of[rank], *step));
  }
  const Items& items = pairs_of(states[0]);
  for (size_t i = 0; i < items.size(); i += 2) {
    const std::string key = text_of_key(items[i]);
    const Value& value = items[i + 1];
    if (key == kMaster || key == kWeight || key == kBuffer)
      of[0]->fail("has a state of the optimizer that is named '", key, "'");
    if (value.is(Kind::Tensor) && value.tensor->shape.size() == 1) {
      std::vector<const TensorRef*> parts;
      for (const Value& own : states)
        parts.push_back(&deepspeed::tensor_of(at(own, key)));
      flat.parts.emplace_back(key, std::move(parts));
    } else if (value.is(Kind::Tensor) && !value.tensor->shape.empty()) {
      of[0]->fail("has a state '", printable(key), "' of shape ", at::IntArrayRef(value.tensor->shape),
                  ", which is not one value for each element");
    } else if (key != "step") {
      values.put(flat.numbers, key, value);
    }
  }
  if (steps.size() > 1)
    fail("has optim-states that were saved after ", shown(std::vector<int64_t>(steps.begin(), steps.end())),
         " updates: of several checkpoints");
  for (const auto& [kind, parts] : flat.parts)
    for (size_t rank = 0; rank < parts.size(); ++rank)
      if (!parts[rank]->is_contiguous() || parts[rank]->shape.size() != 1 ||
          parts[rank]->numel() < masters[rank]->numel())
        of[rank]->fail("has ", printable(kind), " of shape ", at::IntArrayRef(parts[rank]->shape), " for ",
                       masters[rank]->numel(), " elements of a group");
  flat.step = *steps.begin();
  return flat;
}

// Reads stages 1 and 2. A rank's part of a group is as long as rank 0's, but for the last parts: their masters lack the
// padding, while their moments may have it.
void Folder::read_flat(const std::vector<const PtFile*>& of, const Items& states) {
  const auto world = static_cast<int64_t>(of.size());
  Items base;
  for (const Value& own : states)
    base.push_back(at(own, "base_optimizer_state"));
  const bool elastic = !base[0].is_dict();
  const auto listed = shapes();
  for (size_t number = 0; number < listed.size(); ++number) {
    std::vector<const TensorRef*> masters;
    std::vector<Value> own;
    for (int64_t rank = 0; rank < world; ++rank) {
      masters.push_back(&tensor_at(at(states[rank], "single_partition_of_fp32_groups"), number));
      own.push_back(elastic ? at(base[rank], number)
                            : state_of(at(base[rank], "state"), static_cast<int64_t>(number), values));
      const Value* step = elastic ? deepspeed::find(states[0], "base_optimizer_state_step") : nullptr;
      if (step == nullptr || has(own.back(), "step")) continue;
      const Value with = values.items(Kind::Dict, pairs_of(own.back()));
      values.put(with, "step", *step);
      own.back() = with;
    }
    const Flat flat = flat_states(masters, own, of);
    const int64_t length = masters[0]->numel();
    if (length > kMostOfGroup / world) unfit("a group of more than 2^60 elements");
    int64_t begin = 0;
    group_names.emplace_back();
    for (const auto& [name, shape] : listed[number]) {
      const int64_t numel = numel_of(shape), end = end_of(begin, numel);
      Trained& param = add(name, shape, flat.step, flat.numbers);
      for (const auto& [kind, parts] : flat.parts) {
        Held& held = slot_of(param, kind, parts[0]->dtype());
        for (int64_t rank = 0; rank < world; ++rank) {
          const int64_t first = rank * length;
          const int64_t low = std::max(begin, first);
          const int64_t high = std::min({end, first + length, first + parts[rank]->numel()});
          add_piece(held, *parts[rank], low - first, low - begin, high - begin);
        }
      }
      begin = end;
      group_names.back().push_back(name);
    }
  }
  if (!elastic) set_groups(at(base[0], "param_groups"));
}

void Folder::read_sharded(const std::vector<const PtFile*>& of, const Items& states) {
  const auto world = static_cast<int64_t>(of.size());
  Items base;
  for (const Value& own : states)
    base.push_back(at(own, "optimizer_state_dict"));
  const auto listed = shapes();
  for (size_t number = 0; number < listed.size(); ++number) {
    std::vector<const TensorRef*> masters;
    std::vector<Value> own;
    for (int64_t rank = 0; rank < world; ++rank) {
      masters.push_back(&tensor_at(at(states[rank], "fp32_flat_groups"), number));
      own.push_back(state_of(at(base[rank], "state"), static_cast<int64_t>(number), values));
    }
    const Flat flat = flat_states(masters, own, of);
    int64_t begin = 0;
    for (const auto& [name, shape] : listed[number]) {
      const int64_t numel = numel_of(shape);
      Trained& param = add(name, shape, flat.step, flat.numbers);
      for (const auto& [kind, parts] : flat.parts)
        slot_of(param, kind, parts[0]->dtype()) = sharded(parts, begin, numel);
      begin = end_of(begin, (numel + world - 1) / world);
    }
  }
  // A group's sub-groups hold its parameters in order.
  set_groups(at(base[0], "param_groups"));
  for (const Value& group : items_of(at(base[0], "param_groups"))) {
    group_names.emplace_back();
    for (const Value& number : items_of(at(group, "params"))) {
      const auto place = static_cast<size_t>(number_of(number, kMostNumber));
      if (place >= listed.size()) unfit("a param group has a sub-group ", place, " that is not there");
      for (const auto& [name, shape] : listed[place])
        group_names.back().push_back(name);
    }
  }
}

void Folder::read_stage0() {
  const Value* saved = deepspeed::find(state, "optimizer");
  if (saved == nullptr || !saved->is_dict()) return;
  const Value* inner = deepspeed::find(*saved, "optimizer_state_dict");
  const Value& base = inner == nullptr ? *saved : *inner;
  const Value& given = at(base, "param_groups");
  set_groups(given);
  set_scaler(*saved);
  const Value* flat = deepspeed::find(*saved, "fp32_groups_flat");
  if (flat != nullptr && flat->is(Kind::None)) flat = nullptr;
  const auto names = named_groups(items_of(given), flat);
  if (!names) return;
  for (size_t number = 0; number < names->size(); ++number) {
    group_names.push_back((*names)[number]);
    const Value& states = at(base, "state");
    if (flat != nullptr)
      read_stage0_flat(tensor_at(*flat, number), state_of(states, static_cast<int64_t>(number), values),
                       (*names)[number]);
    else
      read_whole_states(*saved, at(given, number), states, number, (*names)[number]);
  }
  read_own_steps(*model_file, *saved);
}

// Reads states that are kept by parameter, in the parameters' shapes.
void Folder::read_whole_states(const Value& saved, const Value& group, const Value& states, size_t number,
                               const std::vector<std::string>& names) {
  const Value* masters = deepspeed::find(saved, "fp32_groups");
  for (size_t place = 0; place < names.size(); ++place) {
    const TensorRef& value = *held(names[place]);
    const Value own = state_of(states, number_of(at(at(group, "params"), place), kMostNumber), values);
    const Value* step = deepspeed::find(own, "step");
    Trained& param =
        add(names[place], value.shape, step == nullptr ? 0 : step_of(*model_file, *step), values.items(Kind::Dict));
    std::vector<std::pair<std::string, const TensorRef*>> tensors;
    if (masters != nullptr && !masters->is(Kind::None))
      tensors.emplace_back(kMaster, &tensor_at(at(*masters, number), place));
    const Items& items = pairs_of(own);
    for (size_t i = 0; i < items.size(); i += 2) {
      const std::string key = text_of_key(items[i]);
      const Value& item = items[i + 1];
      if (key == "step") continue;
      if (item.is(Kind::Tensor) && item.tensor->shape == value.shape) {
        tensors.emplace_back(key, item.tensor);
        continue;
      }
      values.put(param.numbers, key, item);
      if (!item.is(Kind::Tensor) || item.tensor->shape.empty() || has(param.numbers, kCut)) continue;
      const Value cut = values.list(Shape{0, value.numel()});
      cut.items->insert(cut.items->end(), {values.list(value.shape), Value::of(int64_t{0}), Value::of(int64_t{1})});
      values.put(param.numbers, kCut, cut);
    }
    for (const auto& [kind, tensor] : tensors) {
      if (tensor->shape != value.shape)
        model_file->fail("has ", printable(kind), " of shape ", at::IntArrayRef(tensor->shape), " for '",
                         printable(names[place]), "' of shape ", at::IntArrayRef(value.shape));
      slot_of(param, kind, tensor->dtype()) = whole(*tensor);
    }
  }
}

void Folder::read_stage0_flat(const TensorRef& master, const Value& own, const std::vector<std::string>& names) {
  const Flat flat = flat_states({&master}, {own}, {model_file});
  int64_t begin = 0;
  for (const std::string& name : names) {
    const TensorRef& value = *held(name);
    const int64_t numel = value.numel();
    Trained& param = add(name, value.shape, flat.step, flat.numbers);
    for (const auto& [kind, parts] : flat.parts)
      add_piece(slot_of(param, kind, parts[0]->dtype()), *parts[0], begin, 0, numel);
    begin = end_of(begin, numel);
  }
  if (begin > master.numel())
    model_file->fail("has a group of ", master.numel(), " elements for parameters of ", begin);
}

// The names of the optimizer's parameters by group. Without an engine's hint they are known only if one group has all parameters.
std::optional<std::vector<std::vector<std::string>>> Folder::named_groups(const Items& given, const Value* flat) const {
  using Names = std::vector<std::vector<std::string>>;
  std::vector<Names> candidates;
  if (hints.groups) {
    Names all, trained_ones;
    for (const auto& group : *hints.groups) {
      all.emplace_back();
      trained_ones.emplace_back();
      for (const auto& [name, is_trained] : group) {
        all.back().push_back(name);
        if (is_trained) trained_ones.back().push_back(name);
      }
    }
    candidates = {std::move(all), std::move(trained_ones)};
  } else {
    std::set<std::string> others;
    for (const auto& [alias, name] : aliases())
      others.insert(alias);
    candidates.push_back({{}});
    const Items& items = pairs_of(at(state, "module"));
    for (size_t i = 0; i < items.size(); i += 2)
      if (items[i + 1].is(Kind::Tensor) && !others.contains(*items[i].text) && !is_buffer(*items[i].text))
        candidates[0][0].push_back(*items[i].text);
  }
  const auto elements = [&](const std::vector<std::string>& names) {
    int64_t sum = 0;
    for (const std::string& name : names)
      sum = end_of(sum, std::min(held(name)->numel(), kMostOfGroup / 2));
    return sum;
  };
  for (const Names& names : candidates) {
    bool fits = names.size() == given.size() && (flat == nullptr || items_of(*flat).size() == names.size());
    for (size_t i = 0; fits && i < names.size(); ++i) {
      fits = std::ranges::all_of(names[i], [&](const std::string& name) { return held(name) != nullptr; });
      if (!fits) break;
      fits = flat != nullptr ? elements(names[i]) == tensor_at(*flat, i).numel()
                             : items_of(at(given[i], "params")).size() == names[i].size();
    }
    if (fits) return names;
  }
  if (hints.groups)
    model_file->fail(
        "has an optimizer of other parameters than the engine's: their names are not in files of stage 0, so groups "
        "must "
        "have the same parameters in the same order");
  return std::nullopt;
}

int64_t Folder::read_universal(bool is_sharded) {
  const PtFile& common = open("zero/optimizer_state.pt");
  const Value* base = deepspeed::find(common.value(), "optimizer_state_dict");
  const Value* states = base == nullptr ? nullptr : deepspeed::find(*base, "state");
  set_groups(at(common.value(), "param_groups"));
  const auto listed = shapes();
  for (size_t number = 0; number < listed.size(); ++number) {
    group_names.emplace_back();
    const Value own =
        states == nullptr ? values.items(Kind::Dict) : state_of(*states, static_cast<int64_t>(number), values);
    for (const auto& [name, shape] : listed[number]) {
      read_universal_param(common, name, shape, own);
      group_names.back().push_back(name);
    }
  }
  const Value* scaling = deepspeed::find(common.value(), "loss_scaler");
  if (scaling != nullptr && scaling->is(Kind::Object)) set_scaler(*scaling->object);
  return is_sharded ? kMostStage : stage_of(common.value());
}

void Folder::read_universal_param(const PtFile& common, const std::string& name, const Shape& shape, const Value& own) {
  if (name.empty() || name.find('/') != std::string::npos || name.find('\0') != std::string::npos || name[0] == '.')
    model_file->fail("has a parameter that is named '", printable(name), "'");
  const std::string folder = "zero/" + name;
  std::set<std::string> kinds;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::path(path) / folder, none))
    if (entry.path().extension() == ".pt") kinds.insert(entry.path().stem().string());
  TESSERA_CHECK_IO(kinds.contains("fp32"), "checkpoint", "'", path, "/", printable(folder), "/fp32.pt' is missing");
  const Value* common_step = deepspeed::find(own, "step");
  Trained& param = add(name, shape, common_step == nullptr ? 0 : step_of(common, *common_step), {});
  for (const std::string& kind : kinds) {
    const PtFile& file = open(folder + "/" + kind + ".pt");
    const Value& value = file.value().is_dict() ? at(file.value(), "param") : file.value();
    if (kind == "step") {
      param.step = step_of(file, value);
      continue;
    }
    if (!value.is(Kind::Tensor) || !value.tensor->is_contiguous()) file.fail("holds no tensor");
    const TensorRef& tensor = *value.tensor;
    const bool is_master = kind == "fp32";
    if (is_master && tensor.numel() != numel_of(shape))
      param.shape = tensor.shape;  // the model-states' tensor is a tensor-parallel part
    slot_of(param, is_master ? kMaster : kind, tensor.dtype()) = whole(tensor);
  }
}

}  // namespace tessera::checkpoint::deepspeed
