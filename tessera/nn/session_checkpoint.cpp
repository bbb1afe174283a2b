// Checkpoints and exports of a Session.
#include <map>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/checkpoint/torch_file.h"
#include "tessera/config/resolve.h"
#include "tessera/config/value.h"
#include "tessera/engine/export.h"
#include "tessera/nn/saved_values.h"
#include "tessera/nn/session.h"

namespace tessera::nn {

void Session::read_checkpoint_section(const Config& config) {
  const auto& section = config.checkpoint;
  save_options_.asynchronous = section.asynchronous;
  save_options_.keep_last = static_cast<int>(section.keep_last);
  using Tags = engine::SaveOptions::Tags;
  save_options_.tags = section.tag_validation == config::TagValidation::Fail   ? Tags::Fail
                       : section.tag_validation == config::TagValidation::Warn ? Tags::Warn
                                                                               : Tags::Ignore;
  config_text_ = config::Value(config.to_dict()).text();
  if (section.format == config::CheckpointFormat::DeepSpeed)
    save_options_.deepspeed = {static_cast<int>(config.zero_optimization.stage), 1};
  if (section.load_universal) load_from_.latest = "latest_universal";
  loads_masters_ = config.zero_optimization.load_from_fp32_weights;
  keeps_random_ = section.random_state;
}

void Session::keep_generators(std::vector<at::Generator> generators) {
  live().check_one_thread("keep_generators");
  for (const at::Generator& generator : generators)
    TESSERA_CHECK_VALUE(generator.defined() && generator.device().is_cpu(), "engine.keep_generators",
                        "a generator is of ", generator.defined() ? generator.device().str() : "no device",
                        "; give those of the CPU: torch's of the device is saved with checkpoint.random_state");
  generators_ = std::move(generators);
}

// The other names of tied parameters, by the name that the engine has for each.
std::map<std::string, std::vector<std::string>> Session::aliases() const {
  std::map<const void*, std::string> own;
  for (const auto& spec : live().params())
    own[spec.tensor.unsafeGetTensorImpl()] = spec.name;
  std::map<std::string, std::vector<std::string>> aliases;
  for (const auto& item : module_->named_parameters())
    if (const std::string& name = own[item.value().unsafeGetTensorImpl()]; !name.empty() && name != item.key())
      aliases[name].push_back(item.key());
  return aliases;
}

bool Session::save_16bit_model(const std::string& dir, const std::string& name, const ExportOptions& options) {
  const auto call = live().enter("save_16bit_model");
  if (!gathers_for_export_) {
    warn({engine::kNothingExported});
    return false;
  }
  check_contents("save_16bit_model");
  const auto aliases = this->aliases();
  std::vector<engine::LiveTensor> tensors;
  for (int id = 0; id < static_cast<int>(live().params().size()); ++id) {
    const engine::ParamSpec& spec = live().params()[id];
    if (spec.group < 0 && !options.frozen) continue;
    tensors.push_back({{spec.name}, id});
    if (const auto found = aliases.find(spec.name); found != aliases.end())
      tensors.back().names.insert(tensors.back().names.end(), found->second.begin(), found->second.end());
  }
  for (const auto& buffer : module_->named_buffers())
    tensors.push_back({{buffer.key()}, -1, buffer.value()});
  engine::export_weights(*core_, tensors, dir, name, options.max_shard_bytes);
  return true;
}

// Throws on all ranks alike.
void Session::check_contents(const char* call) {
  const std::string wrong = fault();
  live().checkpoints().on_all([&] {
    if (!wrong.empty()) TESSERA_FAIL(UsageError, "[engine.", call, "] ", wrong);
    live().check_groups(call);
  });
}

std::string Session::save_checkpoint(const std::string& dir, std::optional<engine::SaveOptions> options,
                                     const ClientValues& client) {
  const auto call = live().enter("save_checkpoint");
  check_contents("save_checkpoint");
  engine::SaveOptions chosen = options.value_or(engine::SaveOptions{});
  if (!chosen.asynchronous) chosen.asynchronous = save_options_.asynchronous;
  if (!chosen.keep_last) chosen.keep_last = save_options_.keep_last;
  if (!chosen.tags) chosen.tags = save_options_.tags;
  if (save_options_.deepspeed)
    chosen.deepspeed = {save_options_.deepspeed->stage, live().mesh().size(comm::kBatchAxes)};
  engine::ClientPart part;
  live().checkpoints().on_all([&] {
    std::vector<std::string> keys;
    for (const auto& [name, value] : client)
      keys.push_back(name);
    checkpoint::deepspeed::check_client_keys(keys, chosen.deepspeed.has_value());
    part = client_part(client);
  });
  return noting([&] { return live().checkpoints().save(dir, chosen, std::move(part)); });
}

// The names of parameters by group of the optimizer.
std::vector<std::vector<std::string>> Session::trained_names() const {
  const auto groups = client_ != nullptr ? client_->names(*core_) : engine::names_by_group(*core_);
  std::vector<std::vector<std::string>> names(groups.size());
  for (size_t number = 0; number < groups.size(); ++number)
    for (const auto& [name, is_trained] : groups[number])
      if (is_trained) names[number].push_back(name);
  return names;
}

engine::ClientPart Session::client_part(const ClientValues& client) const {
  const std::string place = std::to_string(live().checkpoints().place());
  engine::ClientPart part;
  part.aliases = aliases();
  nlohmann::json run{{"schedule_steps", schedule_steps_}};
  if (own_schedule_ != nullptr) run["own_schedule"] = own_schedule_->state();
  part.run = run.dump();
  for (const auto& buffer : module_->named_buffers())
    part.tensors.push_back({buffer.key(), "buffer", buffer.value()});
  if (client_ != nullptr) {
    part.states = client_->states(*core_);
    part.blobs["optimizer-" + place] = checkpoint::to_torch_file(client_->numbers(*core_), "the optimizer's state");
  }
  if (keeps_random_)
    part.blobs["random-" + place] =
        checkpoint::to_torch_file(random_states(device(), generators_), "the random generators");
  // For DeepSpeed's files, now or later. Of several engines nobody has all names.
  if (place == "0" && (save_options_.deepspeed || !live().checkpoints().spans()))
    part.blobs["python"] = checkpoint::deepspeed::run_blob(config_text_, trained_names());
  if (place == "0") part.blobs["client_state"] = checkpoint::to_torch_file(dict_of(client), "client_state");
  return part;
}

Loaded Session::load_checkpoint(const std::string& dir, const std::string& tag, const engine::Restore::Options& given) {
  const auto call = live().enter("load_checkpoint");
  TESSERA_CHECK_VALUE(!dir.empty(), "engine.load_checkpoint", "the folder has no name");
  check_contents("load_checkpoint");
  engine::Restore::Options options = given;
  options.from_master = options.from_master && loads_masters_;
  live().checkpoints().on_all([&] {  // what was thawed before the load has states there
    live().join();
    take_joined();
  });
  engine::Foreign from = load_from_;
  if (client_ != nullptr) from.groups = client_->names(*core_);
  auto found = noting([&] { return live().checkpoints().open(dir, tag, options, from); });
  if (!found) {
    TESSERA_CHECK_IO(!checkpoint::is_other_than_folder(dir), "engine.load_checkpoint",
                     checkpoint::why_no_latest(dir, load_from_.latest));
    return {};
  }
  Loaded loaded{found->folder(), found->tag()};
  const SavedValues saved(*found, live().checkpoints().place());
  std::map<std::string, at::Tensor> here;
  for (const auto& buffer : module_->named_buffers())
    here[buffer.key()] = buffer.value();
  engine::Restore::Buffers buffers;
  nlohmann::json run;
  std::string states, present;
  std::optional<std::string> schedule;
  // Every check that can refuse the checkpoint comes before anything changes, on any rank.
  live().checkpoints().on_all([&] {
    buffers = found->buffers(here);
    run = nlohmann::json::parse(found->client_run());
    if (own_schedule_ != nullptr && options.run && run.contains("own_schedule")) schedule = run["own_schedule"];
    if (schedule) {  // a trial: what it refuses is refused before anything changes
      const std::string before = own_schedule_->state();
      own_schedule_->load_state(*schedule);
      own_schedule_->load_state(before);
    }
    loaded.client = saved.client();
    if (options.run) saved.try_random(device(), generators_);
    if (client_ != nullptr && options.optimizer) states = client_->saved(*core_, *found);
    if (!states.empty()) {
      present = client_->present();
      client_->try_load(states, present);
    }
  });
  noting([&] { return found->apply(), true; });
  if (client_ != nullptr) client_->keep_options(*core_);
  if (!states.empty()) client_->load(states);
  const at::NoGradGuard no_grad;
  for (const auto& [buffer, value] : buffers)
    buffer.copy_(value);
  loaded.missing = found->missing();
  loaded.unexpected = found->unexpected();
  if (!options.run) return loaded;
  schedule_steps_ = run.value("schedule_steps", int64_t{0});
  if (schedule) live().checkpoints().on_all([&] { own_schedule_->load_state(*schedule); });
  if (client_ != nullptr) put_rates(lr());
  apply_schedule();
  give_options();
  saved.put_random(device(), generators_);
  return loaded;
}

}  // namespace tessera::nn
