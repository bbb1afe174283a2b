#include "tessera/config/parse.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "support.h"
#include "tessera/config/lookup.h"

namespace tessera::config {
namespace {

TEST(Parse, TakesAliases) {
  const Config c = Config::from_json(R"({"bfloat16": {"enabled": true},
    "fp16": {"fp16_master_weights_and_gradients": false},
    "tensor_parallel": {"tensor_parallel": {"tp_grain_size": 4}, "kernel_inject": true},
    "zero_optimization": {"prefetch_bucket_size": 7, "stage3_max_reuse_distance": 8}})");
  EXPECT_TRUE(c.bf16.enabled);
  EXPECT_EQ(c.tensor_parallel.tp.tp_grain_size, 4);
  EXPECT_TRUE(c.tensor_parallel.replace_with_kernel_inject);
  EXPECT_EQ(c.zero_optimization.stage3_prefetch_bucket_size, 7);
  EXPECT_EQ(c.zero_optimization.stage3_max_reuse_distance, 8);
  EXPECT_EQ(c.given.at("zero_optimization.stage3_prefetch_bucket_size"), "zero_optimization.prefetch_bucket_size");
}

TEST(Parse, TwoSpellingsMayAgreeButNotDiffer) {
  EXPECT_EQ(json_error(R"({"zero_optimization": {"max_live_parameters": 5, "stage3_max_live_parameters": 5}})"), "");
  const std::string text =
      json_error(R"({"zero_optimization": {"max_live_parameters": 5, "stage3_max_live_parameters": 6}})");
  EXPECT_HAS(text, "another spelling of the same key");
  EXPECT_HAS(text, "max_live_parameters");
}

TEST(Parse, UnknownTopLevelKeysOnlyWarn) {
  const Config c = Config::from_json(
      R"({"eval_batch_size": 8, "msamp": {}, "zero_optimization.reduce_bucket_size": 1e6, "stage": 3})");
  ASSERT_EQ(c.warnings.size(), 4u);
  std::string all;
  for (const auto& w : c.warnings) {
    all += w + "\n";
  }
  EXPECT_HAS(all, "eval_batch_size: unknown key, ignored; did you mean \"train_batch_size\"?");
  EXPECT_HAS(all, "msamp: unknown key, ignored\n");
  EXPECT_HAS(all, "write \"reduce_bucket_size\" inside \"zero_optimization\"");
  EXPECT_HAS(all, "write \"stage\" inside \"zero_optimization\"");
  EXPECT_EQ(c.zero_optimization.stage, 0);
}

TEST(Parse, UnknownKeysInSectionsAreErrors) {
  EXPECT_HAS(json_error(R"({"timers": {"throughput": {"on": true}}})"), "allowed are enabled, synchronized");
  EXPECT_HAS(json_error(R"({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}})"),
             "zero_optimization.offload_optimizer.devise: unknown key; did you mean \"device\"?");
  EXPECT_HAS(json_error(R"({"zero_optimization": {"quite_different_thing": 1}})"), "see docs/config.md");
  EXPECT_HAS(json_error(R"({"bf16": {"initial_scale_power": 16}})"), "bf16 needs no loss scale");
  EXPECT_HAS(json_error(R"({"bf16": true})"), "bf16: must be an object");
}

TEST(Parse, ExtraKeysBesideATypeOnlyWarn) {
  const Config c = Config::from_json(R"({"optimizer": {"type": "Adam", "lr": 1}, "scheduler": {"pa": {}}})");
  ASSERT_EQ(c.warnings.size(), 2u);
  EXPECT_HAS(c.warnings[0], "optimizer.lr: unknown key, ignored");
  EXPECT_HAS(c.warnings[1], "scheduler.pa: unknown key, ignored");
  EXPECT_HAS(json_error(R"({"optimizer": {"typ": "Adam"}})"), "optimizer.typ: unknown key; did you mean \"type\"?");
}

// With one letter dropped, doubled or swapped.
std::set<std::string> misspelt(const std::string& name) {
  std::set<std::string> all;
  for (const size_t at : {size_t{0}, name.size() / 2, name.size() - 1}) {
    std::string less = name, more = name, other = name;
    less.erase(at, 1);
    more.insert(at, 1, name[at]);
    std::swap(other[at], other[at + 1 < name.size() ? at + 1 : at - 1]);
    all.insert({less, more, other});
  }
  return all;
}

TEST(Parse, ANearMissIsAnErrorThatNamesTheKeyAtEveryLevel) {
  for (const std::string& section : sections()) {
    const std::vector<std::string> names = names_in(section);
    for (const std::string& name : names)
      for (const std::string& wrong : misspelt(name)) {
        if (std::find(names.begin(), names.end(), wrong) != names.end()) continue;
        std::string json = "{\"" + wrong + "\": null}";
        std::string rest = section;
        while (!rest.empty()) {
          const size_t dot = rest.rfind('.');
          const std::string last = dot == std::string::npos ? rest : rest.substr(dot + 1);
          json = std::string("{\"").append(last).append("\": ").append(json).append("}");
          rest = dot == std::string::npos ? "" : rest.substr(0, dot);
        }
        const std::string text = json_error(json);
        EXPECT_HAS(text, (section.empty() ? "" : section + ".") + wrong + ": unknown key; ");
        EXPECT_HAS(text, "\"" + name + "\"");
      }
  }
}

TEST(Parse, ReadsDeprecatedKeys) {
  const Config c = Config::from_json(R"({"zero_optimization": {"stage": 2, "cpu_offload": true,
    "cpu_offload_param": true, "cpu_offload_use_pin_memory": true, "stage3_gather_fp16_weights_on_model_save": true}})");
  EXPECT_EQ(c.zero_optimization.offload_optimizer.device, OffloadDevice::Cpu);
  EXPECT_EQ(c.zero_optimization.offload_param.device, OffloadDevice::Cpu);
  EXPECT_TRUE(c.zero_optimization.stage3_gather_16bit_weights_on_model_save);
  EXPECT_EQ(c.warnings.size(), 5u);
  EXPECT_HAS(json_error(R"({"zero_optimization": {"cpu_offload": true, "offload_optimizer": {"device": "cpu"}}})"),
             "cannot be combined with offload_optimizer");
  EXPECT_HAS(json_error(R"({"zero_optimization": {"cpu_offload": "yes"}})"), "must be true or false");
}

TEST(Parse, ReadsTheLegacyBoolOfZero) {
  const Config on = Config::from_json(R"({"zero_optimization": true})");
  EXPECT_EQ(on.zero_optimization.stage, 1);
  EXPECT_EQ(on.warnings.size(), 1u);
  EXPECT_EQ(Config::from_json(R"({"zero_optimization": false})").zero_optimization.stage, 0);
}

TEST(Parse, NotesForeignSectionsThatAreOn) {
  const auto on = [](const std::string& text) { return Config::from_json(text).foreign_sections; };
  using Names = std::vector<std::string>;
  EXPECT_EQ(on(R"({"amp": {"enabled": true}})"), Names{"amp"});
  EXPECT_EQ(on(R"({"amp": {"enabled": false, "opt_level": "O1"}, "curriculum_learning": {}, "nebula": null})"),
            Names{});
  EXPECT_EQ(on(R"({"compression_training": {"pruning": {"shared": {"enabled": true}}}})"),
            Names{"compression_training"});
  EXPECT_EQ(on(R"({"compression_training": {"pruning": {"shared": {"enabled": false}}}})"), Names{});
  EXPECT_EQ(on(R"({"data_efficiency": {"enabled": false, "data_sampling": {"enabled": true}}})"), Names{});
  EXPECT_EQ(on(R"({"sparse_attention": {"mode": "fixed"}})"), Names{"sparse_attention"});
  EXPECT_EQ(on(R"({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}})"), Names{"zero_optimization.zenflow"});
  EXPECT_EQ(on(R"({"zero_optimization": {"zenflow": null}})"), Names{});
  const Config aio = Config::from_json(R"({"aio": {"block_size": 1048576}})");
  EXPECT_TRUE(aio.foreign_sections.empty());
  EXPECT_EQ(aio.warnings.size(), 1u);
}

}  // namespace
}  // namespace tessera::config
