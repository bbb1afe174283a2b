#include "tessera/nn/state_dict.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/checkpoint/misfits.h"
#include "tessera/engine/checkpoint.h"
#include "tessera/engine/logical.h"
#include "tessera/parallel/functions.h"
#include "tessera/zero/memory_for.h"

namespace tessera::nn {

namespace {

using zero::Writes;
using Ids = std::vector<int>;
using Shape = std::vector<int64_t>;

// A name of the module: a parameter of the engine by its number, or another tensor.
struct Entry {
  std::string name;
  int param = -1;
  at::Tensor tensor;
};

std::vector<Entry> entries_of(const torch::nn::Module& module, const engine::Engine& core) {
  std::unordered_map<const void*, int> numbers;
  for (size_t i = 0; i < core.params().size(); ++i)
    numbers[core.params()[i].tensor.unsafeGetTensorImpl()] = static_cast<int>(i);
  std::vector<Entry> entries;
  for (const auto& item : module.named_parameters()) {
    const auto found = numbers.find(item.value().unsafeGetTensorImpl());
    entries.push_back({item.key(), found == numbers.end() ? -1 : found->second, item.value()});
  }
  for (const auto& item : module.named_buffers())
    entries.push_back({item.key(), -1, item.value()});
  return entries;
}

// Parameters that are gathered together, as lists.
std::vector<Ids> units_of(const engine::Engine& core) {
  std::map<std::string, size_t> known;
  std::vector<Ids> units;
  for (size_t i = 0; i < core.params().size(); ++i) {
    const auto [at, is_new] = known.try_emplace(core.params()[i].unit, units.size());
    if (is_new) units.emplace_back();
    units[at->second].push_back(static_cast<int>(i));
  }
  return units;
}

// Runs f() while these parameters are whole. Collective.
template <class F>
void in_region(engine::Engine& core, const Ids& params, Writes writes, const F& f) {
  core.regions().open(params, writes);
  try {
    f();
  } catch (...) {
    core.regions().close(params, writes);
    throw;
  }
  core.regions().close(params, writes);
}

bool is_cut(const engine::Engine& core, int param) {
  return core.params()[param].cut != nullptr;
}

// Where the values of a load come from.
struct Source {
  std::vector<std::vector<std::string>> names;  // of each tensor
  std::function<std::optional<Shape>(const std::string& name)> sizes;
  std::function<std::string(const std::string& name, const at::Tensor& own)> misfit;
  std::function<at::Tensor(const std::string& name, const shard::CutPtr& cut)>
      value;  // this rank's slice of a tensor, or all
  bool on_disk = false;
};

struct LoadPlan {
  std::vector<std::string> of_param;  // the name in the source; empty: none
  std::vector<std::pair<at::Tensor, std::string>> others;
  LoadedNames names;
};

std::string renamed(const LoadOptions& options, const std::string& name) try {
  return options.rename ? options.rename(name) : name;
} catch (const c10::Error& error) {
  TESSERA_FAIL(c10::ValueError, "[engine.load_module_state_dict] `rename` threw for '", name,
               "': ", error.what_without_backtrace());
} catch (const std::exception& error) {
  TESSERA_FAIL(c10::ValueError, "[engine.load_module_state_dict] `rename` threw for '", name, "': ", error.what());
}

// Value error for what does not fit. Local.
LoadPlan plan_of(const std::vector<Entry>& entries, engine::Engine& core, const Source& source,
                 const LoadOptions& options) {
  LoadPlan plan{std::vector<std::string>(core.params().size()), {}, {}};
  checkpoint::Misfits misfits;
  std::set<std::string> used;
  std::vector<std::string> named;  // by entry
  named.reserve(entries.size());
  for (const Entry& entry : entries) {
    const std::string& name = named.emplace_back(renamed(options, entry.name));
    const auto there = source.sizes(name);
    used.insert(name);
    if (!there) continue;
    const Shape own = entry.param < 0 ? entry.tensor.sizes().vec() : core.states().form(entry.param).sizes;
    const shard::CutPtr cut = entry.param < 0 ? nullptr : core.params()[entry.param].cut;
    if (*there != own && (cut == nullptr || *there != cut->sizes))
      misfits.add(entry.name, c10::str("has shape ", at::IntArrayRef(*there), " there and ",
                                       at::IntArrayRef(cut ? cut->sizes : own), " here"));
    else
      misfits.add(entry.name, source.misfit(name, entry.tensor));
    if (entry.param < 0)
      plan.others.emplace_back(entry.tensor, name);
    else
      plan.of_param[entry.param] = name;
  }
  for (size_t i = 0; i < entries.size(); ++i) {
    const Entry& entry = entries[i];
    const std::string& name = named[i];
    const bool filled = source.sizes(name) || (entry.param >= 0 && !plan.of_param[entry.param].empty());
    if (!filled) plan.names.missing.push_back(entry.name);
  }
  for (const auto& names : source.names)
    if (std::ranges::none_of(names, [&](const std::string& name) { return used.contains(name); }))
      plan.names.unexpected.push_back(names[0]);
  if (options.strict) {
    misfits.list("not there:", plan.names.missing);
    misfits.list("not in the module:", plan.names.unexpected);
  }
  misfits.check();
  return plan;
}

// All is compared on all ranks before anything changes.
LoadedNames load(const torch::nn::Module& module, engine::Engine& core, const Source& source,
                 const LoadOptions& options) {
  const at::NoGradGuard no_grad;
  core.finish_update();
  LoadPlan plan;
  core.checkpoints().on_all([&] { plan = plan_of(entries_of(module, core), core, source, options); });
  bool rounds = false;
  for (const Ids& unit : units_of(core)) {
    std::map<int, at::Tensor> values;
    const auto read = [&] {
      for (const int id : unit)
        if (!plan.of_param[id].empty()) values[id] = source.value(plan.of_param[id], core.params()[id].cut);
    };
    if (source.on_disk)
      core.checkpoints().on_all(read);
    else
      read();
    in_region(core, unit, Writes::Own, [&] {
      for (const auto& [id, value] : values) {
        at::Tensor param = core.params()[id].tensor;
        param.copy_(value);
      }
    });
    for (const auto& [id, value] : values)
      rounds = core.states().set_unrounded(id, value) || rounds;
  }
  for (const auto& [tensor, name] : plan.others) {
    at::Tensor to = tensor;
    to.copy_(source.value(name, nullptr));
  }
  rounds ? core.refresh_params() : core.adopt_params();
  return plan.names;
}

}  // namespace

NamedTensors module_state_dict(const torch::nn::Module& module, engine::Engine& core, bool frozen) {
  const at::NoGradGuard no_grad;
  core.finish_update();
  std::vector<at::Tensor> whole(core.params().size());
  std::exception_ptr error;  // this rank's error: the others go on to the next unit
  bool alone = true;
  for (const Ids& unit : units_of(core)) {
    Ids parts;
    for (const int id : unit) {
      if (core.regions().partition_of(id).partitioned) parts.push_back(id);
      alone = alone && parts.empty() && !is_cut(core, id);
    }
    in_region(core, parts, Writes::None, [&] {
      for (const int id : unit) {
        const engine::ParamSpec& spec = core.params()[id];
        at::Tensor value = spec.tensor.detach();
        const bool copies = std::ranges::find(parts, id) != parts.end();
        if (spec.cut) {
          value = parallel::join_slices(value, *spec.cut, core.mesh().group(comm::Axis::Tp),
                                        "whole value of '" + spec.name + "'");
        } else if (copies && !error) {
          try {
            value = zero::memory_for([&] { return value.clone(); }, "copies of the whole parameters");
          } catch (...) {
            error = std::current_exception();
          }
        }
        whole[id] = value;
      }
    });
  }
  if (!alone)
    core.checkpoints().on_all([&] {
      if (error) std::rethrow_exception(error);
    });
  NamedTensors state;
  for (const Entry& entry : entries_of(module, core))
    if (frozen || entry.param < 0 || entry.tensor.requires_grad())
      state.insert(entry.name, entry.param < 0 ? entry.tensor.detach() : whole[entry.param]);
  return state;
}

LoadedNames load_state_dict(const torch::nn::Module& module, engine::Engine& core, const NamedTensors& state,
                            const LoadOptions& options) {
  Source source;
  for (const auto& item : state)
    source.names.push_back({item.key()});
  source.sizes = [&](const std::string& name) -> std::optional<Shape> {
    const at::Tensor* found = state.find(name);
    if (found == nullptr || !found->defined()) return std::nullopt;
    return found->sizes().vec();
  };
  source.misfit = [&](const std::string& name, const at::Tensor& own) { return checkpoint::misfit(state[name], own); };
  source.value = [&](const std::string& name, const shard::CutPtr& cut) {
    const at::Tensor& value = state[name];
    return cut && value.sizes() == cut->sizes ? parallel::take_slice(value, *cut) : value;
  };
  return load(module, core, source, options);
}

LoadedNames load_state_dict(const torch::nn::Module& module, engine::Engine& core,
                            const checkpoint::WeightReader& files, const LoadOptions& options) {
  Source source;
  for (const checkpoint::WeightTensor& tensor : files.tensors())
    source.names.push_back(tensor.names);
  source.sizes = [&](const std::string& name) -> std::optional<Shape> {
    const checkpoint::WeightTensor* found = files.find(name);
    if (found == nullptr) return std::nullopt;
    return found->shape;
  };
  source.misfit = [&](const std::string& name, const at::Tensor& own) {
    const checkpoint::WeightTensor& found = *files.find(name);
    return found.dtype == at::ScalarType::Undefined ? "has the dtype '" + found.unknown + "', which torch does not have"
                                                    : checkpoint::misfit(found.dtype, own);
  };
  source.value = [&](const std::string& name, const shard::CutPtr& cut) {
    const bool whole = cut && files.find(name)->shape == cut->sizes;
    return whole ? files.read(name, engine::slice_of(cut)[0]) : files.read(name);
  };
  source.on_disk = true;
  return load(module, core, source, options);
}

}  // namespace tessera::nn
