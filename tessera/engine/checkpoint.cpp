#include "tessera/engine/checkpoint.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <deque>
#include <filesystem>
#include <future>
#include <nlohmann/json.hpp>
#include <set>

#include "tessera/base/error.h"
#include "tessera/checkpoint/numbering.h"
#include "tessera/io/concurrently.h"
#include "tessera/io/file.h"

namespace tessera::engine {

namespace {

using Json = nlohmann::ordered_json;
using checkpoint::Item;
using checkpoint::TensorRecord;
using shard::NamedShard;
using shard::Range;

constexpr int64_t kManifestLimit = int64_t{1} << 31;
constexpr int64_t kSmall = 1 << 16;               // elements that are not spread over the ranks that have them
constexpr int64_t kLoadChunk = int64_t{8} << 20;  // elements that are read at once
constexpr int kReaders = 4;
constexpr const char* kWeight = "weight";
constexpr const char* kMaster = "master";
constexpr const char* kBuffer = "buffer";

// ---- all ranks together

enum Outcome : char { kFine = 'f', kValue = 'v', kDisk = 'd', kOther = 'o' };

// Runs f on every rank. Then either all have the texts that it returned, by rank, or all throw what one of them threw.
template <class F>
std::vector<std::string> together(const zero::Ranks& ranks, comm::Label label, const F& f) {
  std::string mine;
  try {
    mine = std::string(1, kFine) + f();
  } catch (const c10::ValueError& e) {
    mine = std::string(1, kValue) + e.what_without_backtrace();
  } catch (const IoError& e) {
    mine = std::string(1, kDisk) + e.what_without_backtrace();
  } catch (const c10::Error& e) {
    mine = std::string(1, kOther) + e.what_without_backtrace();
  } catch (const std::exception& e) {
    mine = std::string(1, kOther) + e.what();
  }
  std::vector<std::string> texts = ranks.gather_text(mine, label);
  for (size_t r = 0; r < texts.size(); ++r) {
    const char outcome = texts[r][0];
    texts[r].erase(0, 1);
    if (outcome == kFine) continue;
    const std::string where = texts.size() > 1 ? " (rank " + std::to_string(r) + ")" : "";
    if (outcome == kValue) C10_THROW_ERROR(ValueError, texts[r] + where);
    if (outcome == kDisk) throw IoError({__func__, __FILE__, __LINE__}, texts[r] + where);
    TORCH_CHECK(false, texts[r], where);
  }
  return texts;
}

// ---- numbers of a run

template <class G, class F>
void each_field(G& group, const F& f) {
  f("lr", group.lr);
  f("beta1", group.beta1);
  f("beta2", group.beta2);
  f("eps", group.eps);
  f("weight_decay", group.weight_decay);
  f("decoupled", group.decoupled);
  f("bias_correction", group.bias_correction);
  f("momentum", group.momentum);
  f("dampening", group.dampening);
  f("nesterov", group.nesterov);
  f("lr_decay", group.lr_decay);
  f("initial_accumulator_value", group.initial_accumulator_value);
  f("maximize", group.maximize);
}

Json run_of(Engine& engine) {
  Json run;
  // Gradients are not saved: an accumulation that has begun starts again.
  const int64_t micro = engine.micro_steps();
  const int64_t begun =
      engine.options().managed_accumulation ? micro % engine.options().gradient_accumulation_steps : 0;
  run["counters"] = {{"micro_steps", micro - begun},
                     {"global_steps", engine.global_steps()},
                     {"skipped_steps", engine.skipped_steps()},
                     {"global_samples", engine.global_samples()}};
  const amp::GradScaler::State& s = engine.scaling().scaler().state();
  run["scaler"] = {{"scale", s.scale},
                   {"steps", s.steps},
                   {"good_steps", s.good_steps},
                   {"budget", s.budget},
                   {"overridden", s.overridden}};
  run["groups"] = Json::array();
  for (const optim::GroupOptions& group : engine.groups()) {
    Json one;
    each_field(group, [&](const char* name, const auto& value) { one[name] = value; });
    run["groups"].push_back(one);
  }
  return run;
}

void restore_run(Engine& engine, const Json& run) {
  const Json& c = run.at("counters");
  engine.set_counters(c.at("micro_steps"), c.at("global_steps"), c.at("skipped_steps"), c.at("global_samples"));
  // Not of all foreign checkpoints.
  if (engine.scaling().scaler().needed() && run.contains("scaler")) {
    const Json& s = run.at("scaler");
    engine.scaling().restore({s.at("scale"), s.at("steps"), s.at("good_steps"), s.at("budget"), s.at("overridden")});
  }
  const Json& groups = run.at("groups");
  for (size_t i = 0; i < engine.groups().size() && i < groups.size(); ++i)
    each_field(engine.groups()[i], [&](const char* name, auto& value) {
      if (groups[i].contains(name)) groups[i].at(name).get_to(value);
    });
}

// ---- parameters

std::vector<int64_t> whole_shape(const ParamSpec& spec, const shard::Form& form) {
  return spec.cut ? spec.cut->sizes : form.sizes;
}

std::vector<checkpoint::Slice> slice_of(const shard::CutPtr& cut) {
  if (cut == nullptr) return {};
  return {{cut->dim, cut->ranges}};
}

// "weight", "master" or the state's name in torch.
std::string kind_of(Engine& engine, shard::Quantity quantity) {
  if (quantity == shard::Quantity::Weight) return kWeight;
  if (quantity == shard::Quantity::Master) return kMaster;
  const auto names = optim::state_names(engine.options().rule, engine.groups());
  return names.name[quantity == shard::Quantity::State0 ? 0 : 1];
}

// What this rank writes of elements that several ranks have: a part of many, all or nothing of few.
Range mine_of(const NamedShard& shard) {
  if (shard.replicas == 1) return shard.range;
  if (shard.range.size() < kSmall)
    return shard.param % shard.replicas == shard.replica ? shard.range : Range{shard.range.begin, shard.range.begin};
  const int64_t part =
      (shard.range.size() / shard.replicas + shard::kAlignment) / shard::kAlignment * shard::kAlignment;
  return shard::intersect(shard.range,
                          {shard.range.begin + shard.replica * part, shard.range.begin + (shard.replica + 1) * part});
}

}  // namespace

// ---------------------------------------------------------------- save

struct Checkpointer::Job {
  std::string dir, tag, id;
  SaveOptions options;
  std::vector<Item> items;
  std::map<std::string, std::string> blobs;
  checkpoint::Manifest manifest;

  std::string folder() const { return checkpoint::folder_of(dir, tag); }
  std::string write(int rank, std::vector<std::string>& written) const;
  void complete(const std::vector<std::string>& texts);
  void run(const zero::Ranks& ranks);
};

// This rank's files; what is in them, as a text.
std::string Checkpointer::Job::write(int rank, std::vector<std::string>& written) const {
  Json part{{"files", Json::array()}, {"blobs", Json::object()}, {"records", ""}};
  const auto path = [&](const std::string& name) { return (std::filesystem::path(folder()) / name).string(); };
  if (!items.empty()) {
    checkpoint::FileRecord file;
    written.push_back(path(checkpoint::file_name(id, rank)));
    part["records"] = checkpoint::records_text(checkpoint::write_items(written.back(), id, items, file));
    part["files"].push_back({file.name, file.bytes});
  }
  for (const auto& [name, bytes] : blobs) {
    written.push_back(path(checkpoint::blob_name(id, name)));
    const checkpoint::FileRecord file = checkpoint::write_blob(written.back(), bytes);
    part["blobs"][name] = {file.name, file.bytes, file.checksum};
  }
  return part.dump();
}

void Checkpointer::Job::complete(const std::vector<std::string>& texts) {
  for (const std::string& text : texts) {
    const Json part = Json::parse(text);
    for (const Json& file : part["files"]) {
      checkpoint::merge_records(manifest.tensors, part["records"], static_cast<int>(manifest.files.size()));
      manifest.files.push_back({file[0], file[1]});
      const std::string path = (std::filesystem::path(folder()) / manifest.files.back().name).string();
      TESSERA_CHECK_IO(std::filesystem::exists(path), "checkpoint", "'", path,
                       "' was written by another rank and is not seen here: all ranks need the same folder");
    }
    for (const auto& [name, file] : part["blobs"].items())
      TESSERA_CHECK_VALUE(manifest.blobs.insert({name, {file[0], file[1], file[2]}}).second, "checkpoint",
                          "two ranks save a blob named '", name, "'");
  }
  checkpoint::parse_manifest(checkpoint::to_text(manifest), folder());  // complete, and without overlaps
  checkpoint::commit(folder(), manifest);
  if (options.latest) checkpoint::set_latest(dir, tag);
  checkpoint::clean(dir, tag, options.keep_last);
}

void Checkpointer::Job::run(const zero::Ranks& ranks) {
  std::vector<std::string> written;
  try {
    const auto texts = together(ranks, "files of a checkpoint", [&] { return write(ranks.place(), written); });
    together(ranks, "end of a checkpoint", [&] {
      if (ranks.place() == 0) complete(texts);
      return std::string();
    });
  } catch (...) {
    std::error_code ignored;
    if (checkpoint::complete_id(folder()) != id)
      for (const std::string& path : written)
        std::filesystem::remove(path, ignored);
    throw;
  }
}

Checkpointer::~Checkpointer() {
  if (thread_.joinable()) thread_.join();
}

const zero::Ranks& Checkpointer::ranks() {
  if (!ranks_) {
    ranks_.emplace(zero::Ranks(engine_.mesh()).siblings());
    if (!engine_.params().empty()) ranks_->device = engine_.params().front().tensor.device();
  }
  return *ranks_;
}

void Checkpointer::wait() {
  if (thread_.joinable()) thread_.join();
  const std::string error = std::exchange(error_, "");
  TESSERA_CHECK_IO(error.empty(), "checkpoint", "the save in the background failed: ", error);
}

std::vector<std::string> Checkpointer::exchange(const std::string& text, const std::string& error) {
  return together(ranks(), "texts of a checkpoint", [&] {
    TESSERA_CHECK_IO(error.empty(), "checkpoint", error);
    return text;
  });
}

std::vector<Item> Checkpointer::items(const SaveOptions& options, const ClientPart& client) {
  std::vector<Item> items;
  zero::StateAccess& states = engine_.states();
  for (const NamedShard& shard : states.named_shards()) {
    if (shard.quantity == shard::Quantity::Gradient || (!shard.trained && !options.frozen)) continue;
    // A weight that is the rounding of its master says nothing more.
    if (shard.quantity == shard::Quantity::Weight && shard.trained && !states.master_is_weight(shard.param)) continue;
    const Range mine = mine_of(shard);
    if (mine.empty()) continue;
    items.push_back({shard.name, kind_of(engine_, shard.quantity),
                     whole_shape(engine_.params()[shard.param], shard.form), checkpoint::order_of(shard.form),
                     shard.dtype, slice_of(shard.cut), mine, [&states, shard, mine] {
                       return states.read_shard(shard).narrow(0, mine.begin - shard.range.begin, mine.size());
                     }});
  }
  for (const ClientState& state : client.states) {
    const auto [begin, end] = states.local_range(state.param);
    const NamedShard shard = states.owned_shard(state.param);
    TESSERA_CHECK_VALUE(state.values.numel() == end - begin, "checkpoint", "this rank holds ", end - begin,
                        " elements of parameter '", shard.name, "', its state '", state.kind, "' has ",
                        state.values.numel());
    const Range mine = mine_of(shard);
    if (mine.empty()) continue;
    const at::Tensor flat = state.values.sizes() == shard.form.sizes
                                ? shard::flatten_like_param(state.values, shard.form)
                                : state.values.detach().flatten();
    items.push_back({shard.name, state.kind, whole_shape(engine_.params()[state.param], shard.form),
                     checkpoint::order_of(shard.form), flat.scalar_type(), slice_of(shard.cut), mine,
                     [flat, mine, begin = begin] { return flat.narrow(0, mine.begin - begin, mine.size()); }});
  }
  if (ranks().place() != 0) return items;
  for (const ClientTensor& t : client.tensors) {
    if (t.tensor.numel() == 0) continue;
    items.push_back({t.name,
                     t.kind,
                     t.tensor.sizes().vec(),
                     {},
                     t.tensor.scalar_type(),
                     {},
                     {0, t.tensor.numel()},
                     [tensor = t.tensor] { return tensor.detach().contiguous().view(-1); }});
  }
  return items;
}

checkpoint::Manifest Checkpointer::manifest(const SaveOptions& options, const ClientPart& client) {
  checkpoint::Manifest manifest;
  Json run = run_of(engine_);
  run["client"] = Json::parse(client.run, nullptr, /*allow_exceptions=*/false);
  TESSERA_CHECK_VALUE(run["client"].is_object(), "checkpoint", "the client's part of the run is not a JSON object");
  manifest.run = run.dump();
  zero::StateAccess& states = engine_.states();
  for (int id = 0; id < static_cast<int>(engine_.params().size()); ++id) {
    const ParamSpec& spec = engine_.params()[id];
    if (spec.group < 0 && !options.frozen) continue;
    checkpoint::ParamRecord record{spec.name, whole_shape(spec, states.form(id)), spec.tensor.scalar_type(),
                                   spec.group >= 0};
    if (record.trained) record.step = states.param_step(id);
    if (const auto found = client.aliases.find(spec.name); found != client.aliases.end())
      record.aliases = found->second;
    manifest.params.push_back(std::move(record));
  }
  // Tensors without elements have no pieces, so no rank writes them.
  for (const ClientTensor& t : client.tensors)
    if (t.tensor.numel() == 0)
      manifest.tensors.push_back({t.name, t.kind, t.tensor.sizes().vec(), {}, t.tensor.scalar_type(), {}, {}});
  return manifest;
}

// The items' values in host memory that is kept from save to save.
void Checkpointer::stage(std::vector<Item>& items) {
  staging_.resize(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    at::Tensor& place = staging_[i];
    if (!place.defined() || place.scalar_type() != items[i].dtype || place.numel() != items[i].range.size())
      place = at::empty({items[i].range.size()}, at::TensorOptions(items[i].dtype));
    place.copy_(items[i].values());
    items[i].values = [place] { return place; };
  }
}

std::string Checkpointer::save(const std::string& dir, const SaveOptions& options, ClientPart client) {
  TESSERA_CHECK_VALUE(!dir.empty(), "checkpoint", "save_dir is empty; name a folder");
  wait();
  const c10::AutoGradMode no_grad(false);
  auto job = std::make_shared<Job>();
  job->dir = dir;
  job->options = options;
  const auto plans = together(ranks(), "start of a checkpoint", [&] {
    engine_.adopt_params();
    const std::string tag = options.tag.empty() ? "global_step" + std::to_string(engine_.global_steps()) : options.tag;
    checkpoint::check_tag(tag);
    job->items = items(options, client);
    job->manifest = manifest(options, client);
    if (ranks().place() == 0) io::make_folder(checkpoint::folder_of(dir, tag));
    return checkpoint::new_id() + tag;
  });
  const size_t digits = checkpoint::new_id().size();
  for (const std::string& plan : plans) {
    const bool same = options.tags == SaveOptions::Tags::Ignore || plan.substr(digits) == plans[0].substr(digits);
    const std::string text = same ? ""
                                  : c10::str("ranks save under different tags: '", plans[0].substr(digits), "' and '",
                                             plan.substr(digits), "'");
    TESSERA_CHECK_VALUE(same || options.tags == SaveOptions::Tags::Warn, "checkpoint", text);
    if (!same && ranks().place() == 0) TORCH_WARN("[checkpoint] ", text);
  }
  job->id = plans[0].substr(0, digits);
  job->tag = plans[0].substr(digits);
  job->manifest.id = job->id;
  job->blobs = std::move(client.blobs);
  if (!options.asynchronous) {
    job->run(ranks());
    return job->tag;
  }
  together(ranks(), "copies for a checkpoint", [&] { return stage(job->items), std::string(); });
  thread_ = std::thread([this, job] {
    const c10::AutoGradMode no_grad(false);
    try {
      job->run(*ranks_);
    } catch (const c10::Error& e) {
      error_ = e.what_without_backtrace();
    } catch (const std::exception& e) {
      error_ = e.what();
    }
  });
  return job->tag;
}

// ---------------------------------------------------------------- load

const checkpoint::ParamRecord* Restore::record_of(const ParamSpec& spec) const {
  const auto& params = reader_->manifest().params;
  const auto named = [&](const auto& p) { return p.name == spec.name; };
  auto found = std::find_if(params.begin(), params.end(), named);
  if (found == params.end())
    found = std::find_if(params.begin(), params.end(), [&](const auto& p) {
      return std::find(p.aliases.begin(), p.aliases.end(), spec.name) != p.aliases.end();
    });
  return found == params.end() ? nullptr : &*found;
}

void Restore::plan(Engine& engine) {
  engine_ = &engine;
  zero::StateAccess& states = engine.states();
  std::vector<std::string> problems;
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
    const checkpoint::ParamRecord* record = record_of(spec);
    records_.push_back(record);
    if (record == nullptr) {
      missing_.push_back(spec.name);
      continue;
    }
    used.insert(record->name);
    const TensorRecord* master = reader_->find(record->name, kMaster);
    if (master == nullptr) master = reader_->find(record->name, kWeight);
    if (spec.tensor.numel() > 0)
      add(master, id, spec.group >= 0 ? shard::Quantity::Master : shard::Quantity::Weight, "weight");
    if (spec.group < 0 || !options_.optimizer || !record->trained || spec.tensor.numel() == 0) continue;
    const auto names = optim::state_names(engine.options().rule, engine.groups());
    for (int i = 0; i < names.count; ++i) {
      const TensorRecord* state = reader_->find(record->name, names.name[i]);
      if (state == nullptr && record->step == 0) continue;  // before its first update
      add(state, id, i == 0 ? shard::Quantity::State0 : shard::Quantity::State1, names.name[i]);
    }
  }
  for (const auto& param : reader_->manifest().params)
    if (!used.contains(param.name)) unexpected_.push_back(param.name);
  const auto list = [&](const char* what, const std::vector<std::string>& names) {
    if (names.empty()) return;
    std::string line = what;
    for (const std::string& name : names)
      line += " '" + name + "'";
    problems.push_back(line);
  };
  if (options_.strict) {
    list("not in the checkpoint:", missing_);
    list("not in the model:", unexpected_);
  }
  check(problems);
}

void Restore::check(const std::vector<std::string>& problems) const {
  std::string text;
  for (const std::string& problem : problems)
    text += "\n  " + problem;
  TESSERA_CHECK_VALUE(problems.empty(), "checkpoint", "'", folder_, "' does not fit this engine:", text);
}

void Restore::verify() const {
  const auto& parts = parts_;
  io::concurrently(static_cast<int64_t>(parts.size()), kReaders,
                   [&](int64_t i) { reader_->verify(*parts[i].record, parts[i].want); });
  for (const TensorRecord& record : reader_->manifest().tensors)
    if (record.kind == kBuffer) reader_->verify(record, {{}, record.order, {0, record.numel()}});
  for (const auto& [name, file] : reader_->manifest().blobs)
    reader_->blob(name);
  for (int id = 0; id < static_cast<int>(records_.size()); ++id)
    for (const std::string& kind : options_.client_kinds)
      client_state(id, kind);
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

void Restore::apply() {
  const c10::AutoGradMode no_grad(false);
  Engine& engine = *engine_;
  zero::StateAccess& states = engine.states();
  states.begin_writes();
  std::string error;
  try {
    // Read ahead of what is written.
    std::deque<std::future<at::Tensor>> ahead;
    size_t next = 0;
    for (const Part& part : parts_) {
      for (; next < parts_.size() && ahead.size() < kReaders; ++next)
        ahead.push_back(
            std::async(std::launch::async, [this, &p = parts_[next]] { return reader_->read(*p.record, p.want); }));
      at::Tensor values = ahead.front().get();
      ahead.pop_front();
      const checkpoint::ParamRecord& record = *records_[part.param];
      const bool is_weight = part.quantity == shard::Quantity::Master || part.quantity == shard::Quantity::Weight;
      if (is_weight && !options_.from_master) values = values.to(record.dtype);
      states.write(part.param, part.quantity, part.want.range, values);
    }
  } catch (const std::exception& e) {
    error = e.what();
  }
  states.end_writes();
  for (int id = 0; id < static_cast<int>(records_.size()); ++id)
    if (options_.optimizer && records_[id] != nullptr && engine.params()[id].group >= 0)
      states.set_param_step(id, records_[id]->trained ? records_[id]->step : 0);
  engine.refresh_params();
  if (options_.run) restore_run(engine, Json::parse(reader_->manifest().run));
  TESSERA_CHECK_IO(error.empty(), "checkpoint", "'", folder_,
                   "' could not be read to its end, the engine has changed in "
                   "part: load again. ",
                   error);
}

std::optional<Restore> Checkpointer::open(const std::string& dir, const std::string& given,
                                          const Restore::Options& options, const Foreign& foreign) {
  wait();
  const auto first = together(ranks(), "name of a checkpoint", [&]() -> std::string {
    if (ranks().place() != 0) return "";
    const std::string tag = given.empty() ? checkpoint::latest_tag(dir, foreign.latest) : given;
    TESSERA_CHECK_VALUE(!tag.empty() || foreign.latest == Foreign().latest, "checkpoint", "there is no file '",
                        foreign.latest, "' in '", dir, "' that says which checkpoint to load");
    if (tag.empty()) return "";
    checkpoint::check_tag(tag);
    const std::string path =
        (std::filesystem::path(checkpoint::folder_of(dir, tag)) / checkpoint::kManifestName).string();
    std::string text;
    if (std::filesystem::exists(path))
      text = io::read_text(path, kManifestLimit);
    else if (foreign.manifest)
      text = foreign.manifest(checkpoint::folder_of(dir, tag));
    TESSERA_CHECK_IO(!text.empty(), "checkpoint", "there is no complete checkpoint '", tag, "' in '", dir, "': '", path,
                     "' is missing", foreign.names.empty() ? "" : ", and so are " + foreign.names);
    return Json{{"tag", tag}, {"manifest", text}}.dump();
  });
  if (first[0].empty()) return std::nullopt;
  Restore restore;
  restore.options_ = options;
  together(ranks(), "what a checkpoint holds", [&] {
    const Json said = Json::parse(first[0]);
    restore.tag_ = said["tag"];
    restore.folder_ = checkpoint::folder_of(dir, restore.tag_);
    restore.reader_ = std::make_unique<checkpoint::Reader>(restore.folder_, said["manifest"].get<std::string>());
    const Json run = Json::parse(restore.reader_->manifest().run);
    restore.client_run_ = run.contains("client") ? run["client"].dump() : "{}";
    restore.plan(engine_);
    restore.verify();
    const auto needed = [&](const TensorRecord& record) {
      return options.optimizer || record.kind == kWeight || record.kind == kMaster || record.kind == kBuffer;
    };
    restore.reader_->verify_blocks(needed, ranks().place(), static_cast<int>(first.size()));
    return std::string();
  });
  return restore;
}

}  // namespace tessera::engine
