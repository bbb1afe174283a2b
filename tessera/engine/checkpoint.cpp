#include "tessera/engine/checkpoint.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/outlive.h"
#include "tessera/checkpoint/numbering.h"
#include "tessera/engine/accumulation.h"
#include "tessera/engine/group_fields.h"
#include "tessera/engine/logical.h"
#include "tessera/engine/saved_run.h"
#include "tessera/engine/together.h"
#include "tessera/io/crc32c.h"
#include "tessera/io/file.h"
#include "tessera/io/progress.h"

namespace tessera::engine {

namespace {

using Json = nlohmann::ordered_json;
using checkpoint::Item;
using shard::NamedShard;
using shard::Range;

constexpr int64_t kSmall = 1 << 16;  // elements that are not divided among the ranks that have them

// ---- numbers of a run

Json run_of(Engine& engine) {
  Json run;
  run["counters"] = {
      {"micro_steps", engine.micro_steps()},     {"global_steps", engine.global_steps()},
      {"skipped_steps", engine.skipped_steps()}, {"global_samples", engine.global_samples()},
      {"begun", engine.begun_micro_steps()},     {"accumulation_steps", engine.options().gradient_accumulation_steps}};
  // A norm that is not finite becomes null, as JSON has none.
  if (const auto norm = engine.previous_norm()) run["counters"]["norm"] = std::isfinite(*norm) ? Json(*norm) : Json();
  const amp::GradScaler::State& s = engine.scaling().scaler().state();
  if (engine.scaling().scaler().needed())
    run["scaler"] = {{"scale", s.scale},
                     {"steps", s.steps},
                     {"good_steps", s.good_steps},
                     {"budget", s.budget},
                     {"overridden", s.overridden}};
  for (int id = 0; id < static_cast<int>(engine.params().size()); ++id)
    if (const auto updates = engine.states().unwritten(id))
      run["unwritten"][file_name_of(engine, engine.params()[id])] = *updates;
  run["groups"] = Json::array();
  for (const optim::GroupOptions& group : engine.groups()) {
    Json one;
    each_field(group, [&](const char* name, const auto& value) { one[name] = value; });
    run["groups"].push_back(one);
  }
  return run;
}

int64_t bytes_of(const Item& item) {
  return item.range.size() * static_cast<int64_t>(c10::elementSize(item.dtype));
}

// What this rank writes of elements that several ranks have: a part of many elements, all or nothing of few.
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
  std::optional<checkpoint::SaveMark> mark;  // of rank 0
  bool describes_all = false;                // the first rank's engine is another one

  std::string folder() const { return checkpoint::folder_of(dir, tag); }
  std::string write(int rank, std::vector<std::string>& written) const;
  void complete(const std::vector<std::string>& texts);
  void run(const zero::Ranks& ranks);
};

// Writes this rank's files; returns what is in them, as a text.
std::string Checkpointer::Job::write(int rank, std::vector<std::string>& written) const {
  Json part{{"files", Json::array()}, {"blobs", Json::object()}, {"records", ""}};
  std::vector<checkpoint::ParamRecord> own;
  std::copy_if(manifest.params.begin(), manifest.params.end(), std::back_inserter(own),
               [this](const auto& param) { return describes_all || !param.along.empty(); });
  part["params"] = checkpoint::params_text(own);
  if (describes_all) part["empty"] = checkpoint::records_text(manifest.tensors);
  const auto path = [&](const std::string& name) { return (std::filesystem::path(folder()) / name).string(); };
  if (!items.empty()) {
    checkpoint::FileRecord file;
    std::vector<Item> counted = items;
    int64_t bytes = 0;
    for (const Item& item : counted)
      bytes += bytes_of(item);
    io::Progress progress("saving '" + folder() + "'", bytes);
    for (Item& item : counted)
      if (rank == 0)
        item.values = [values = item.values, &progress](Range part) {
          at::Tensor found = values(part);
          progress.add(static_cast<int64_t>(found.nbytes()));
          return found;
        };
    written.push_back(path(checkpoint::file_name(id, rank)));
    part["records"] = checkpoint::records_text(checkpoint::write_items(written.back(), id, std::move(counted), file));
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
    checkpoint::merge_params(manifest.params, part["params"]);
    if (part.contains("empty")) checkpoint::merge_records(manifest.tensors, part["empty"], 0);
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
  checkpoint::clean(dir, tag, options.keep_last.value_or(0));
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
    mark.reset();
    throw;
  }
  mark.reset();
}

// What the thread of a save and its owner have in common: the owner may be gone first.
struct Checkpointer::Background {
  explicit Background(std::string of) : folder(std::move(of)) {}

  const std::string folder;
  std::mutex mutex;
  bool over = false, alone = false;  // alone: nobody will wait
  std::string error;

  void end(std::string why) {
    const std::lock_guard lock(mutex);
    over = true;
    error = std::move(why);
    if (alone) warn_of_error();
  }
  // Returns whether the thread is through.
  bool leave() {
    const std::lock_guard lock(mutex);
    alone = true;
    if (over) {
      warn_of_error();
    } else {
      TORCH_WARN("[checkpoint] an engine is gone while its save in the background of '", folder,
                 "' is not complete: the save goes on, and the process waits for it when it ends; call "
                 "wait_for_checkpoint() or destroy() first, which raise its error");
    }
    return over;
  }
  void warn_of_error() const {
    if (!error.empty()) TORCH_WARN("[checkpoint] the save in the background of '", folder, "' failed: ", error);
  }
};

Checkpointer::~Checkpointer() {
  if (!thread_.joinable()) return;
  bool over = false;
  try {
    over = background_->leave();
  } catch (const std::exception&) {
    // Whoever takes warnings refuses this one.
  }
  if (over) {
    thread_.join();
  } else {
    outlive(std::move(thread_));
  }
}

void Checkpointer::span(comm::GroupPtr group, std::vector<int> copies) {
  wait();
  const c10::Device device = ranks_.device;
  ranks_ = zero::Ranks(group->size() > 1 ? group->sibling(device) : std::move(group));
  ranks_.device = device;
  spans_ = true;
  copies_ = std::move(copies);
}

bool Checkpointer::is_first_of_engine() const {
  return ranks_of(engine_).place() == 0;
}

bool Checkpointer::is_copy(int param) const {
  return std::find(copies_.begin(), copies_.end(), param) != copies_.end();
}

void Checkpointer::wait() {
  engine_.check_one_thread("wait_for_checkpoint", /*together=*/false);
  finish();
  const auto over = std::exchange(background_, nullptr);
  const std::string error = over ? over->error : "";
  TESSERA_CHECK_IO(error.empty(), "checkpoint", "the save in the background failed: ", error);
}

// Waits: sends of a save in the background go one after the other. wait() throws its error.
void Checkpointer::finish() {
  if (thread_.joinable()) thread_.join();
}

std::vector<std::string> Checkpointer::exchange(const std::string& text, const std::string& error) {
  finish();
  return together(ranks_, "texts of a checkpoint", [&] {
    TESSERA_CHECK_IO(error.empty(), "checkpoint", error);
    return text;
  });
}

void Checkpointer::on_all(const std::function<void()>& f) {
  finish();
  together(ranks_, "what ranks check alone", [&] {
    f();
    return std::string();
  });
}

std::vector<Item> Checkpointer::items(const SaveOptions& options, const ClientPart& client) {
  std::vector<Item> items;
  zero::StateAccess& states = engine_.states();
  for (const NamedShard& shard : states.named_shards()) {
    if (shard.quantity == shard::Quantity::Gradient || (!shard.trained && !options.frozen)) continue;
    if (is_copy(shard.param)) continue;
    // A weight that is the rounding of its master adds nothing.
    if (shard.quantity == shard::Quantity::Weight && shard.trained && !states.master_is_weight(shard.param)) continue;
    const Range mine = mine_of(shard);
    if (mine.empty()) continue;
    const ParamSpec& spec = engine_.params()[shard.param];
    items.push_back({file_name_of(engine_, spec), kind_of(engine_, shard.quantity), whole_shape(spec, shard.form),
                     checkpoint::order_of(shard.form), shard.dtype, slice_of(shard.cut), mine,
                     [&states, shard](Range part) { return states.read_shard(shard, part); }});
  }
  for (const ClientState& state : client.states) {
    if (is_copy(state.param)) continue;
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
    const ParamSpec& spec = engine_.params()[state.param];
    items.push_back({file_name_of(engine_, spec), state.kind, whole_shape(spec, shard.form),
                     checkpoint::order_of(shard.form), flat.scalar_type(), slice_of(shard.cut), mine,
                     [flat, begin = begin](Range part) { return flat.narrow(0, part.begin - begin, part.size()); }});
  }
  SavedAccumulation accumulation = save_accumulation(engine_);
  std::move(accumulation.items.begin(), accumulation.items.end(), std::back_inserter(items));
  for (const ClientTensor& t : client.tensors) {
    if (t.tensor.numel() == 0) continue;
    items.push_back({t.name,
                     t.kind,
                     t.tensor.sizes().vec(),
                     {},
                     t.tensor.scalar_type(),
                     {},
                     {0, t.tensor.numel()},
                     [tensor = t.tensor.detach().contiguous().view(-1)](Range part) {
                       return tensor.narrow(0, part.begin, part.size());
                     }});
  }
  return items;
}

// This rank's buffers that differ from those of its engine's first rank, under names of this rank. Parameters that wait to join
// the engine have joined afterwards. Collective.
std::vector<ClientTensor> Checkpointer::own_buffers(const ClientPart& client) {
  std::map<std::string, std::string> mine;
  const auto all = together(ranks_, "buffers of a checkpoint", [&] {
    engine_.join();
    for (const ClientTensor& t : client.tensors) {
      if (t.kind != kBuffer || t.tensor.numel() == 0) continue;
      const at::Tensor values = t.tensor.detach().cpu().contiguous();
      mine[t.name] =
          c10::str(t.tensor.sizes(), values.scalar_type(), io::crc32c(values.const_data_ptr(), values.nbytes()));
    }
    return Json{{"first", is_first_of_engine()}, {"buffers", mine}}.dump();
  });
  int first = ranks_.place();
  while (first > 0 && !Json::parse(all[first]).at("first").get<bool>())
    --first;
  const auto theirs = Json::parse(all[first]).at("buffers").get<std::map<std::string, std::string>>();
  std::vector<ClientTensor> own;
  for (const ClientTensor& t : client.tensors) {
    const auto found = mine.find(t.name);
    if (found == mine.end() || t.kind != kBuffer) continue;
    if (const auto other = theirs.find(t.name); other == theirs.end() || other->second != found->second)
      own.push_back({buffer_name_of(t.name, ranks_.place()), kRankBuffer, t.tensor});
  }
  return own;
}

checkpoint::Manifest Checkpointer::manifest(const SaveOptions& options, const ClientPart& client) {
  checkpoint::Manifest manifest;
  Json run = run_of(engine_);
  if (const std::string optimizer = optimizer_of(engine_); !optimizer.empty()) run["optimizer"] = optimizer;
  run["ranks"] = c10::str(ranks_.all(), ": ", spread_of(engine_.mesh()));
  run["client"] = Json::parse(client.run, nullptr, /*allow_exceptions=*/false);
  TESSERA_CHECK_VALUE(run["client"].is_object(), "checkpoint", "the client's part of the run is not a JSON object");
  const std::string accumulation = save_accumulation(engine_).run;
  if (!accumulation.empty()) run["accumulation"] = Json::parse(accumulation);
  manifest.run = run.dump();
  zero::StateAccess& states = engine_.states();
  for (int id = 0; id < static_cast<int>(engine_.params().size()); ++id) {
    const ParamSpec& spec = engine_.params()[id];
    if (spec.group < 0 && !options.frozen) continue;
    checkpoint::ParamRecord record{file_name_of(engine_, spec),
                                   whole_shape(spec, states.form(id)),
                                   spec.tensor.scalar_type(),
                                   spec.group >= 0,
                                   0,
                                   {}};
    if (record.trained) record.step = states.param_step(id);
    if (const auto found = client.aliases.find(spec.name); found != client.aliases.end())
      record.aliases = found->second;
    record.along = place_of(engine_, spec);
    for (std::string& alias : record.aliases)
      alias += checkpoint::suffix_of(record.along);
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
    const Range range = items[i].range;
    for (int64_t begin = range.begin; begin < range.end; begin += shard::kTile) {
      const Range part{begin, std::min(begin + shard::kTile, range.end)};
      place.narrow(0, begin - range.begin, part.size()).copy_(items[i].values(part));
    }
    items[i].values = [place, range](Range part) { return place.narrow(0, part.begin - range.begin, part.size()); };
  }
}

std::string Checkpointer::save(const std::string& dir, const SaveOptions& options, ClientPart client) {
  const OneThread::Call call = engine_.enter("save_checkpoint");
  on_all([&] {
    TESSERA_CHECK_VALUE(!dir.empty(), "engine.save_checkpoint", "save_dir is empty; name a folder");
    TESSERA_CHECK_VALUE(options.keep_last.value_or(0) >= 0, "engine.save_checkpoint",
                        "keep_last is a number of checkpoints, or 0 for all, not ", *options.keep_last);
    TESSERA_CHECK_VALUE(!options.deepspeed || !options.asynchronous.value_or(false), "engine.save_checkpoint",
                        "checkpoint.format \"deepspeed\" cannot be written asynchronously");
  });
  if (options.deepspeed) return save_as_deepspeed(dir, options, std::move(client));
  engine_.finish_update();
  wait();
  const c10::AutoGradMode no_grad(false);
  auto job = std::make_shared<Job>();
  job->dir = std::filesystem::absolute(dir).string();  // a save in the background outlives a chdir()
  job->options = options;
  std::vector<ClientTensor> own = own_buffers(client);
  const SaveOptions::Tags rule = options.tags.value_or(SaveOptions::Tags::Ignore);
  if (!is_first_of_engine()) client.tensors = std::move(own);
  const auto plans = together(ranks_, "start of a checkpoint", [&] {
    engine_.states().check_whole();
    engine_.adopt_params();
    const std::string tag = options.tag.empty() ? "global_step" + std::to_string(engine_.global_steps()) : options.tag;
    checkpoint::check_tag(tag);
    job->items = items(options, client);
    job->manifest = manifest(options, client);
    const std::string id = checkpoint::new_id();
    if (ranks_.place() == 0) job->mark.emplace(checkpoint::folder_of(job->dir, tag), id);
    return id + tag;
  });
  const size_t digits = checkpoint::new_id().size();
  for (const std::string& plan : plans) {
    const bool same = rule == SaveOptions::Tags::Ignore || plan.substr(digits) == plans[0].substr(digits);
    const std::string text = same ? ""
                                  : c10::str("ranks save under different tags: '", plans[0].substr(digits), "' and '",
                                             plan.substr(digits), "'");
    TESSERA_CHECK_VALUE(same || rule == SaveOptions::Tags::Warn, "checkpoint", text);
    if (!same && ranks_.place() == 0) TORCH_WARN("[checkpoint] ", text);
  }
  job->id = plans[0].substr(0, digits);
  job->tag = plans[0].substr(digits);
  job->manifest.id = job->id;
  job->describes_all = spans_ && is_first_of_engine() && ranks_.place() != 0;
  job->blobs = std::move(client.blobs);
  if (const std::string counts = save_accumulation(engine_).blob; !counts.empty())
    job->blobs[blob_of_accumulation(ranks_.place())] = counts;
  // States that live on a disk are not copied to memory, which they are on the disk to spare.
  if (!options.asynchronous.value_or(false) || engine_.memory().disk > 0) {
    job->run(ranks_);
    return job->tag;
  }
  together(ranks_, "copies for a checkpoint", [&] { return stage(job->items), std::string(); });
  background_ = std::make_shared<Background>(job->folder());
  thread_ = std::thread([job, ranks = ranks_, background = background_] {
    const c10::AutoGradMode no_grad(false);
    std::string error;
    try {
      job->run(ranks);
    } catch (const c10::Error& e) {
      error = e.what_without_backtrace();
    } catch (const std::exception& e) {
      error = e.what();
    }
    background->end(std::move(error));
  });
  return job->tag;
}

}  // namespace tessera::engine
