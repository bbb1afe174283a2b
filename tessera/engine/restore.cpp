#include "tessera/engine/restore.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <deque>
#include <filesystem>
#include <future>
#include <nlohmann/json.hpp>
#include <set>

#include "tessera/base/error.h"
#include "tessera/checkpoint/node.h"
#include "tessera/checkpoint/numbering.h"
#include "tessera/engine/checkpoint.h"
#include "tessera/engine/logical.h"
#include "tessera/engine/saved_run.h"
#include "tessera/engine/together.h"
#include "tessera/io/concurrently.h"
#include "tessera/io/file.h"
#include "tessera/io/progress.h"
#include "tessera/optim/types.h"
#include "tessera/zero/memory_for.h"

namespace tessera::engine {

namespace {

using Json = nlohmann::ordered_json;
using checkpoint::TensorRecord;
using shard::Range;

constexpr int64_t kLoadChunk = int64_t{8} << 20;  // elements that are read at once
constexpr int kReaders = 4;

template <class P>
int64_t bytes_of(const P& part) {
  return part.want.range.size() * static_cast<int64_t>(c10::elementSize(part.record->dtype));
}

template <class P>
int64_t bytes_of_all(const std::vector<P>& parts) {
  int64_t bytes = 0;
  for (const P& part : parts)
    bytes += bytes_of(part);
  return bytes;
}

}  // namespace

// The record of a parameter; null, or a problem, where none fits.
const checkpoint::ParamRecord* Restore::record_of(const ParamSpec& spec, std::vector<std::string>& problems) const {
  const auto along = place_of(*engine_, spec);
  const auto suffix = checkpoint::suffix_of(along);
  const auto& params = reader_->manifest().params;
  const auto find = [&](const auto& fits) {
    const auto found = std::find_if(params.begin(), params.end(), fits);
    return found == params.end() ? nullptr : &*found;
  };
  const auto* found = find([&](const auto& p) { return p.name == spec.name + suffix; });
  if (found == nullptr)
    found = find([&](const auto& p) {
      return std::find(p.aliases.begin(), p.aliases.end(), spec.name + suffix) != p.aliases.end();
    });
  if (found != nullptr && found->along == along) return found;
  // The name may be that of an expert of other ranks than these.
  const auto* other = found != nullptr ? found : find([&](const auto& p) { return p.base_name() == spec.name; });
  if (other == nullptr) return nullptr;
  const auto announced = [](const std::vector<checkpoint::Along>& axes) {
    std::string text = axes.empty() ? "the same on all ranks" : "another one on each of";
    for (const checkpoint::Along& axis : axes)
      text += c10::str(" ", axis.of, " ranks along ", axis.axis);
    return text;
  };
  problems.push_back(
      c10::str("'", spec.name, "' is ", announced(other->along), " there and ", announced(along), " here"));
  return nullptr;
}

const std::string& Restore::client_run() const {
  return run_->client;
}

// Says that the states are those of an optimizer to which they mean something else; empty where they are not. Before its first update
// an optimizer has none.
std::string Restore::other_optimizer() const {
  const checkpoint::Manifest& manifest = reader_->manifest();
  std::set<std::string> updated;
  for (const checkpoint::ParamRecord& param : manifest.params)
    if (param.trained && param.step > 0) updated.insert(param.name);
  const std::string own = optimizer_of(*engine_), family = optim::family_of(own);
  if (updated.empty() || family.empty()) return "";
  std::string there = run_->optimizer;
  if (there.empty()) {  // the states themselves say it
    std::set<std::string> states;
    for (const TensorRecord& record : manifest.tensors)
      if (updated.contains(record.name) && !optim::may_have_state(family, record.kind)) states.insert(record.kind);
    if (states.empty()) return "";
    there = c10::str("another one, which has ", c10::Join(", ", states));
  } else if (const std::string other = optim::family_of(there); other.empty() || other == family) {
    return "";
  }
  return c10::str("its optimizer was ", there, ", here it is ", own,
                  ", to which states and rates of that one mean something else; load the weights alone: "
                  "load_module_only=True in Python, Restore::Options{.optimizer = false, .run = false} in C++");
}

void Restore::plan(Engine& engine) {
  engine_ = &engine;
  zero::StateAccess& states = engine.states();
  std::vector<std::string> problems;
  if (options_.optimizer) problems = {other_optimizer()};
  std::erase(problems, "");
  const bool takes_states = options_.optimizer && problems.empty();
  std::set<std::string> used;
  const auto add = [&](const TensorRecord* record, int id, shard::Quantity quantity, const std::string& kind) {
    const shard::Form form = states.form(id);
    const ParamSpec& spec = engine.params()[id];
    if (record == nullptr) return problems.push_back("'" + spec.name + "' has no " + kind);
    if (record->shape != whole_shape(spec, form))
      return problems.push_back(c10::str("'", spec.name, "' has shape ", at::IntArrayRef(record->shape), " there and ",
                                         at::IntArrayRef(whole_shape(spec, form)), " here"));
    const Range mine = states.writable(id, quantity);
    checkpoint::Want want{slice_of(spec.cut), checkpoint::order_of(form), mine};
    const int64_t step = record->order == want.order ? kLoadChunk : std::max<int64_t>(1, mine.size());
    for (int64_t begin = mine.begin; begin < mine.end; begin += step) {
      want.range = {begin, std::min(begin + step, mine.end)};
      parts_.push_back({record, want, id, quantity});
    }
  };
  for (int id = 0; id < static_cast<int>(engine.params().size()); ++id) {
    const ParamSpec& spec = engine.params()[id];
    const size_t before = problems.size();
    const checkpoint::ParamRecord* record = record_of(spec, problems);
    records_.push_back(record);
    used.insert(record == nullptr ? spec.name : record->base_name());
    if (record == nullptr) {
      if (problems.size() == before) missing_.push_back(spec.name);
      continue;
    }
    const TensorRecord* master = reader_->find(record->name, kMaster);
    if (master == nullptr) master = reader_->find(record->name, kWeight);
    if (spec.tensor.numel() > 0)
      add(master, id, spec.group >= 0 ? shard::Quantity::Master : shard::Quantity::Weight, "weight");
    if (spec.group < 0 || !takes_states || spec.tensor.numel() == 0) continue;
    // One line a parameter.
    const auto names = optim::state_names(engine.options().rule, engine.groups());
    for (int i = 0; i < names.count && problems.size() == before; ++i) {
      const shard::Quantity quantity = i == 0 ? shard::Quantity::State0 : shard::Quantity::State1;
      const TensorRecord* state = record->trained ? reader_->find(record->name, names.name[i]) : nullptr;
      if (state == nullptr && (!record->trained || record->step == 0))
        unborn_.emplace_back(id, quantity);
      else
        add(state, id, quantity, names.name[i]);
    }
  }
  for (const auto& param : reader_->manifest().params)
    if (!used.contains(param.base_name())) unexpected_.push_back(param.name);
  const auto list = [&](const char* what, const std::vector<std::string>& names) {
    if (names.empty()) return;
    std::string line = what;
    for (const std::string& name : names)
      line += " '" + name + "'";
    problems.push_back(line);
  };
  if (options_.strict) {
    list("not in the checkpoint:", missing_);
    if (!of_several_) list("not in the model:", unexpected_);
  }
  check(problems);
}

// Note [Another number of micro-batches].
void Restore::plan_accumulation() {
  const int64_t here = engine_->options().gradient_accumulation_steps;
  if (run_->accumulation)
    accumulation_ = std::make_unique<RestoredAccumulation>(*engine_, *reader_, *run_->accumulation, place_, records_);
  const int64_t there = run_->accumulation_steps.value_or(here);
  const auto times_here = [&](int64_t steps) {
    int64_t product = 0;
    const bool fits = !__builtin_mul_overflow(steps, here, &product) && product <= checkpoint::Node::kLargestCount;
    TESSERA_CHECK_IO(fits, "checkpoint", "'", folder_, "' has ", steps,
                     " steps, more than can be with gradient_accumulation_steps ", here);
    return product;
  };
  begun_ = run_->begun.value_or(accumulation_ ? run_->micro_steps % here : 0);
  if (accumulation_ && !accumulation_->fits()) {
    anew_ = "with slices or experts that lie otherwise here";
  } else if (accumulation_ && there != here && run_->accumulation->uncounted) {
    anew_ = c10::str("between a backward and its step(), with gradient_accumulation_steps ", there, ", which is ", here,
                     " here");
  } else if (accumulation_ && times_here(begun_) % there != 0) {
    anew_ = c10::str("after ", begun_, " of ", there, " micro-batches, which is no whole number of the ", here,
                     " that are a step here");
  }
  if (!anew_.empty()) accumulation_.reset();
  micro_steps_ = std::max<int64_t>(0, run_->micro_steps - (anew_.empty() ? 0 : begun_));
  begun_ = accumulation_ ? times_here(begun_) / there : anew_.empty() && there == here ? begun_ : 0;
  if (there != here && engine_->options().managed_accumulation) micro_steps_ = times_here(run_->global_steps) + begun_;
}

void Restore::check(const std::vector<std::string>& problems) const {
  std::string text;
  for (const std::string& problem : problems)
    text += "\n  " + problem;
  TESSERA_CHECK_VALUE(problems.empty(), "checkpoint", "'", folder_, "' does not fit this engine:", text);
}

// Keeps the names that none of several engines has. `of_all_ranks`: the lists of all ranks, each as JSON.
void Restore::check_unexpected(const std::vector<std::string>& of_all_ranks) {
  for (const std::string& text : of_all_ranks) {
    const auto there = Json::parse(text).get<std::set<std::string>>();
    std::erase_if(unexpected_, [&](const std::string& name) { return !there.contains(name); });
  }
  std::vector<std::string> problems;
  for (const std::string& name : unexpected_)
    problems.push_back("not in the model: '" + name + "'");
  if (options_.strict) check(problems);
}

void Restore::verify() const {
  const auto& parts = parts_;
  io::Progress progress("checking '" + folder_ + "'", bytes_of_all(parts_));
  io::concurrently(static_cast<int64_t>(parts.size()), kReaders, [&](int64_t i) {
    reader_->verify(*parts[i].record, parts[i].want);
    if (place_ == 0) progress.add(bytes_of(parts[i]));
  });
  for (const TensorRecord& record : reader_->manifest().tensors) {
    const TensorRecord* found = record.kind == kBuffer ? buffer_of(record.name) : nullptr;
    if (found != nullptr) reader_->verify(*found, {{}, found->order, {0, found->numel()}});
  }
  for (const auto& [name, file] : reader_->manifest().blobs)
    reader_->blob(name);
  for (int id = 0; id < static_cast<int>(records_.size()); ++id)
    for (const std::string& kind : options_.client_kinds)
      client_state(id, kind);
  if (accumulation_) accumulation_->verify();
}

const TensorRecord* Restore::buffer_of(const std::string& name) const {
  const TensorRecord* own = same_ranks_ ? reader_->find(buffer_name_of(name, place_), kRankBuffer) : nullptr;
  return own != nullptr ? own : reader_->find(name, kBuffer);
}

Restore::Buffers Restore::buffers(const std::map<std::string, at::Tensor>& here) {
  Buffers found;
  std::vector<std::string> missing, unexpected, shapes;
  for (const auto& [name, buffer] : here) {
    const TensorRecord* record = buffer_of(name);
    if (record == nullptr) {
      missing.push_back(name);
      continue;
    }
    const at::Tensor value = reader_->read_whole(*record);
    if (value.sizes() == buffer.sizes())
      found.emplace_back(buffer, value);
    else
      shapes.push_back(c10::str("'", name, "' has shape ", value.sizes(), " there and ", buffer.sizes(), " here"));
  }
  for (const TensorRecord& record : reader_->manifest().tensors)
    if (record.kind == kBuffer && !here.contains(record.name)) unexpected.push_back(record.name);
  std::ranges::sort(unexpected);
  std::string problems;
  for (const std::string& name : options_.strict ? missing : std::vector<std::string>())
    problems += "\n  not in the checkpoint: '" + name + "'";
  for (const std::string& name : options_.strict && !of_several_ ? unexpected : std::vector<std::string>())
    problems += "\n  not in the model: '" + name + "'";
  for (const std::string& text : shapes)
    problems += "\n  " + text;
  TESSERA_CHECK_VALUE(problems.empty(), "engine.load_checkpoint", "buffers of '", folder_,
                      "' do not fit this model:", problems);
  missing_.insert(missing_.end(), missing.begin(), missing.end());
  unexpected_.insert(unexpected_.end(), unexpected.begin(), unexpected.end());
  return found;
}

void Restore::warn_of_buffers() const {
  std::set<std::string> names;
  for (const TensorRecord& record : reader_->manifest().tensors)
    if (record.kind == kRankBuffer) names.insert(record.name.substr(0, record.name.rfind('@')));
  if (names.empty() || same_ranks_ || place_ != 0) return;
  std::string text;
  for (const std::string& name : names)
    text += c10::str(text.empty() ? "'" : ", '", name, "'");
  TORCH_WARN("[checkpoint] the ranks that saved '", folder_, "' had each its own values of ", text,
             ", and lie otherwise here: all ranks have those of the first");
}

at::Tensor Restore::client_state(int param, const std::string& kind) const {
  const checkpoint::ParamRecord* of = records_.at(param);
  const TensorRecord* record = of == nullptr ? nullptr : reader_->find(of->name, kind);
  const ParamSpec& spec = engine_->params()[param];
  if (record == nullptr || spec.group < 0) return {};
  const shard::Form form = engine_->states().form(param);
  const checkpoint::Want want{slice_of(spec.cut), checkpoint::order_of(form),
                              engine_->states().writable(param, shard::Quantity::Master)};
  reader_->verify(*record, want);
  return reader_->read(*record, want);
}

// Reads straight to where values belong where writing is no more than a copy; through memory of their own where it is more.
void Restore::read_parts(io::Progress& progress) {
  zero::StateAccess& states = engine_->states();
  const auto done = [&](const Piece& part) {
    if (place_ == 0) progress.add(bytes_of(part));
  };
  const auto is_rounded = [&](const Piece& part) {
    const bool is_weight = part.quantity == shard::Quantity::Master || part.quantity == shard::Quantity::Weight;
    return is_weight && !options_.from_master;
  };
  std::vector<std::pair<const Piece*, at::Tensor>> direct;
  std::vector<const Piece*> others;
  for (const Piece& part : parts_) {
    const at::Tensor place =
        is_rounded(part) ? at::Tensor() : states.writable_view(part.param, part.quantity, part.want.range);
    if (place.defined() && place.is_cpu() && place.scalar_type() == part.record->dtype)
      direct.emplace_back(&part, place);
    else
      others.push_back(&part);
  }
  io::concurrently(static_cast<int64_t>(direct.size()), kReaders, [&](int64_t i) {
    const auto& [part, place] = direct[i];
    reader_->read_to(place, *part->record, part->want);
    done(*part);
  });
  // Values are read ahead of the one that is written.
  std::deque<std::future<at::Tensor>> ahead;
  size_t next = 0;
  for (const Piece* part : others) {
    for (; next < others.size() && ahead.size() < kReaders; ++next)
      ahead.push_back(
          std::async(std::launch::async, [this, p = others[next]] { return reader_->read(*p->record, p->want); }));
    at::Tensor values = ahead.front().get();
    ahead.pop_front();
    if (is_rounded(*part)) values = values.to(records_[part->param]->dtype);
    states.write(part->param, part->quantity, part->want.range, values);
    done(*part);
  }
}

// Memory of the device that a tile takes while it is written (its values in fp32, a weight and a residual): where there is none,
// an error comes before the first write.
void Restore::check_room() const {
  if (ranks_->device.is_cpu()) return;
  int64_t elements = 0;
  for (const Piece& part : parts_)
    elements = std::min(elements + part.want.range.size(), shard::kTile);
  together(*ranks_, "room for a load", [&] {
    zero::memory_for([&] { at::empty({2 * elements}, at::TensorOptions(at::kFloat).device(ranks_->device)); },
                     "what a load writes");
    return std::string();
  });
}

// Counts updates since a write as at the save: weights that a later write leaves alone keep their masters.
void Restore::follow_writes() {
  for (int id = 0; id < static_cast<int>(engine_->params().size()); ++id) {
    const auto found = run_->unwritten.find(file_name_of(*engine_, engine_->params()[id]));
    engine_->states().set_unwritten(
        id, found == run_->unwritten.end() ? std::nullopt : std::optional<int64_t>(found->second));
  }
}

void Restore::apply() {
  const c10::AutoGradMode no_grad(false);
  check_room();
  warn_of_buffers();
  Engine& engine = *engine_;
  zero::StateAccess& states = engine.states();
  states.begin_writes();
  std::string error;
  bool of_memory = false;
  const auto note = [&](const std::exception& e) {
    const auto* known = dynamic_cast<const c10::Error*>(&e);
    of_memory = dynamic_cast<const c10::OutOfMemoryError*>(&e) != nullptr;
    error = known == nullptr ? e.what() : known->what_without_backtrace();
  };
  io::Progress progress("loading '" + folder_ + "'", bytes_of_all(parts_));
  try {
    read_parts(progress);
    for (const auto& [id, quantity] : unborn_)
      states.reset(id, quantity);
    states.flush();
  } catch (const std::exception& e) {
    note(e);
  }
  states.end_writes();
  for (int id = 0; id < static_cast<int>(records_.size()); ++id)
    if (options_.optimizer && records_[id] != nullptr && engine.params()[id].group >= 0)
      states.set_param_step(id, records_[id]->trained ? records_[id]->step : 0);
  try {
    if (options_.run) follow_writes();
    engine.refresh_params();
  } catch (const std::exception& e) {
    note(e);
  }
  engine.set_previous_norm(options_.run ? run_->norm : std::nullopt);
  if (options_.run) {
    engine.zero_grad();
    run_->apply(engine, micro_steps_, begun_);
    try {
      if (accumulation_) accumulation_->apply();
    } catch (const std::exception& e) {
      note(e);
    }
  }
  if (accumulation_begins_anew() && place_ == 0)
    TORCH_WARN("[checkpoint] '", folder_, "' was saved inside an accumulation, ", anew_,
               ": the accumulation begins anew");
  try {
    together(*ranks_, "end of a load", [&] {
      const std::string text =
          c10::str("[checkpoint] '", folder_,
                   "' could not be loaded to its end, the engine has changed in part: load again. ", error);
      if (of_memory) TESSERA_FAIL(c10::OutOfMemoryError, text);
      if (!error.empty()) TESSERA_FAIL(IoError, text);
      return std::string();
    });
  } catch (const c10::Error& e) {
    states.not_written(e.what_without_backtrace());
    throw;
  }
  if (options_.optimizer && missing_.empty()) states.all_written();
}

namespace {

checkpoint::DeepSpeedHints hints_of(Engine& engine, const Restore::Options& options, const Foreign& foreign) {
  checkpoint::DeepSpeedHints hints{foreign.groups, engine.options().gradient_accumulation_steps, options.optimizer,
                                   foreign.objects};
  if (!hints.groups && !engine.groups().empty()) hints.groups = names_by_group(engine);
  return hints;
}

}  // namespace

checkpoint::DeepSpeedHints::Groups names_by_group(Engine& engine) {
  checkpoint::DeepSpeedHints::Groups groups(engine.groups().size());
  for (const ParamSpec& param : engine.params())
    if (const int group = std::max(param.group, param.joins); group >= 0)
      groups[group].emplace_back(param.name, param.group >= 0);
  return groups;
}

std::optional<Restore> Checkpointer::open(const std::string& dir, const std::string& given,
                                          const Restore::Options& options, const Foreign& foreign) {
  const OneThread::Call call = engine_.enter("load_checkpoint");
  engine_.finish_update();
  wait();
  const auto first = together(ranks_, "name of a checkpoint", [&]() -> std::string {
    engine_.join();
    if (ranks_.place() != 0) return "";
    const std::string tag = given.empty() ? checkpoint::latest_tag(dir, foreign.latest) : given;
    TESSERA_CHECK_VALUE(!tag.empty() || foreign.latest == Foreign().latest, "checkpoint", "there is no file '",
                        foreign.latest, "' in '", dir, "' that says which checkpoint to load");
    if (tag.empty()) return "";
    const std::string text = checkpoint::manifest_text(dir, tag, hints_of(engine_, options, foreign));
    return Json{{"tag", tag}, {"manifest", text}}.dump();
  });
  if (first[0].empty()) return std::nullopt;
  Restore restore;
  restore.options_ = options;
  const auto left = together(ranks_, "what a checkpoint holds", [&] {
    const Json announced = Json::parse(first[0]);
    restore.tag_ = announced["tag"];
    restore.folder_ = checkpoint::folder_of(dir, restore.tag_);
    restore.reader_ = std::make_unique<checkpoint::Reader>(restore.folder_, announced["manifest"].get<std::string>());
    restore.run_ = std::make_shared<const SavedRun>(
        restore.reader_->manifest().run, (std::filesystem::path(restore.folder_) / checkpoint::kManifestName).string());
    restore.place_ = ranks_.place();
    restore.ranks_ = &ranks_;
    restore.of_several_ = spans_;
    restore.same_ranks_ = restore.run_->ranks == c10::str(ranks_.all(), ": ", spread_of(engine_.mesh()));
    restore.plan(engine_);
    if (options.run) restore.plan_accumulation();
    restore.verify();
    const auto needed = [&](const TensorRecord& record) {
      return options.optimizer || record.kind == kWeight || record.kind == kMaster || record.kind == kBuffer ||
             record.kind == kRankBuffer;
    };
    restore.reader_->verify_blocks(needed, ranks_.place(), static_cast<int>(first.size()));
    return Json(restore.unexpected_).dump();
  });
  if (spans_) restore.check_unexpected(left);
  return restore;
}

RunCounters counters_of(const checkpoint::Reader& reader) {
  const SavedRun run(reader.manifest().run,
                     (std::filesystem::path(reader.folder()) / checkpoint::kManifestName).string());
  return {run.micro_steps, run.global_steps, run.skipped_steps, run.global_samples};
}

}  // namespace tessera::engine
