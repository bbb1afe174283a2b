// What a load refuses, and what it finds.
#include "tessera/engine/restore.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <tuple>

#include "tessera/io/file.h"
#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"
#include "tests/support/host_home.h"
#include "tests/support/modes.h"
#include "tests/support/saved.h"

namespace tessera::testing {

using io::TempFolder;

// Damage of any kind is an error on every rank that names what is damaged, and leaves the engine as it was.
TEST(Restore, DamageIsRefusedBeforeAnythingChanges) {
  const TempFolder folder;
  Values saved;
  for (const std::string& to : {folder / "other", folder.path()})
    run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
      const Toy toy;
      Engine engine = toy_engine({.stage = 1}, toy, group);
      train(engine, toy, rank, 0, 3);
      engine.checkpoints().save(to, {});
      const Values values = values_of(engine);
      if (rank == 0) saved = values;
    });
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "global_step3"))
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path().string());
  ASSERT_EQ(files.size(), 2u);
  const std::string manifest = folder / "global_step3/manifest.json";
  const auto contents = [](const std::string& path) { return io::read_text(path, 1 << 30); };
  const auto put = [](const std::string& path, const std::string& text) { std::ofstream(path) << text; };
  std::srand(3);
  run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
    const Toy toy(5);
    Engine engine = toy_engine({.stage = 2}, toy, group);
    const Values before = values_of(engine);
    const auto refused = [&](const std::string& path, const std::function<void()>& damage, const std::string& part) {
      std::string good;
      if (rank == 0) {
        good = contents(path);
        damage();
      }
      group->barrier();
      const std::string error = error_of([&] { engine.checkpoints().open(folder.path(), "", {}); });
      EXPECT_HAS(error, part);
      group->barrier();
      if (rank == 0) put(path, good);
      group->barrier();
    };
    refused(files[0], [&] { std::filesystem::remove(files[0]); }, files[0]);
    refused(files[1], [&] { std::filesystem::resize_file(files[1], 100); }, "the manifest says");
    refused(files[0], [&] { put(files[0], contents(files[1])); }, "global_step3");
    refused(
        files[0],
        [&] {
          std::string bytes = contents(files[0]);
          bytes[bytes.size() - 3] ^= 1;
          put(files[0], bytes);
        },
        "damaged");
    refused(manifest, [&] { put(manifest, contents(folder / "other/global_step3/manifest.json")); }, "global_step3");
    refused(manifest, [&] { std::filesystem::remove(manifest); }, "no complete checkpoint");
    refused(manifest, [&] { std::filesystem::resize_file(manifest, 0); }, "manifest.json' is empty");
    refused(
        manifest, [&] { std::filesystem::resize_file(manifest, 90); }, "manifest.json' ends in the middle, after 90 b");
    for (int i = 0; i < 200; ++i) {
      refused(
          manifest,
          [&] {
            std::string text = contents(manifest);
            text[static_cast<size_t>(std::rand()) % text.size()] ^= static_cast<char>(1 + std::rand() % 127);
            put(manifest, text);
          },
          "manifest.json");
    }
    const Values after = values_of(engine);
    expect_same(after.masters, before.masters, at::kFloat, "masters");
    engine.checkpoints().open(folder.path(), "", {})->apply();
    expect_same(values_of(engine).masters, saved.masters, at::kFloat, "masters");
  });
}

// What had not been updated when it was saved, or was frozen, has no moments in the file. Those of an engine that has
// trained go back to where they began, in every form and home that they have.
TEST(Restore, StatesFromBeforeTheFirstUpdateBeginAnew) {
  using comm::Axis;
  using optim::Rule;
  const std::vector<AxisSizes> grids{
      {{Axis::DpShard, 1}}, {{Axis::DpShard, 2}}, {{Axis::DpReplicate, 2}, {Axis::DpShard, 2}}};
  auto group = toy_adamw();
  group.momentum = 0.9;
  group.initial_accumulator_value = 0.5;
  size_t number = 0;
  for (const amp::PrecisionPolicy& mode : all_modes()) {
    for (const Rule rule : {Rule::Adam, Rule::Lion, Rule::Adagrad, Rule::Sgd}) {
      for (const bool away : {false, true}) {
        const bool frozen = number % 2 == 1;
        auto options = toy_options({.stage = static_cast<int>(number / 2 % 4), .precision = mode});
        const TempFolder folder;
        run_axes(grids[number++ % grids.size()], [&](int, const comm::Mesh& mesh) {
          const Toy start(5), toy, other(9);
          auto specs = start.specs();
          for (auto& spec : specs)
            if (frozen) spec.group = -1;
          auto without_states = options;
          without_states.rule = Rule::External;
          Engine(without_states, mesh, specs, {group}).checkpoints().save(folder.path(), {});
          auto own = options;
          own.rule = rule;
          if (away)
            own.zero.home = [](Quantity, int64_t size, const at::TensorOptions& of) {
              return std::make_shared<HostHome>(size, of);
            };
          Engine trained(own, mesh, toy.specs(), {group}), fresh(own, mesh, other.specs(), {group});
          const int batch = mesh.rank(comm::kBatchAxes);
          train(trained, toy, batch, 0, 2);
          for (Engine* engine : {&trained, &fresh})
            engine->checkpoints().open(folder.path(), "", {})->apply();
          const std::string what = c10::str("case ", number - 1);
          for (int step = 0; step < 2; ++step) {
            const Values is = values_of(trained), was = values_of(fresh);
            for (const at::Tensor& state : is.first)
              EXPECT_TRUE(step > 0 || state.eq(rule == Rule::Adagrad ? 0.5 : 0).all().item<bool>()) << what;
            expect_same(is.masters, was.masters, at::kFloat, what);
            expect_same(is.first, was.first, at::kFloat, what);
            if (rule == Rule::Adam) expect_same(is.second, was.second, at::kFloat, what);
            EXPECT_EQ(is.steps, was.steps) << what;
            train(trained, toy, batch, 0, 1);
            train(fresh, other, batch, 0, 1);
          }
        });
      }
    }
  }
}

// Checksums tell of damage; what the run's record says is checked itself, before anything changes.
TEST(Restore, ARecordOfARunIsCheckedByKey) {
  using Json = nlohmann::ordered_json;
  const TempFolder folder;
  run_ranks(1, [&](int rank, const comm::GroupPtr& group) {
    const Toy toy, other(5);
    Engine saved = toy_engine({.stage = 1}, toy, group), engine = toy_engine({.stage = 1}, other, group);
    train(saved, toy, rank, 0, 2);
    saved.checkpoints().save(folder.path(), {});
    const std::string path = folder / "global_step2/manifest.json";
    Json good = Json::parse(io::read_text(path, 1 << 30));
    good.erase("crc32c");
    good["run"]["scaler"] = {{"scale", 2.0}, {"steps", 2}, {"good_steps", 1}, {"budget", 1}, {"overridden", false}};
    const Values before = values_of(engine);
    const auto try_with = [&](const char* pointer, const Json& value) {
      Json json = good;
      json[Json::json_pointer(pointer)] = value;
      std::ofstream(path) << checkpoint::sealed(json.dump());
      return error_of([&] { engine.checkpoints().open(folder.path(), "", {}); });
    };
    EXPECT_EQ(try_with("/run/scaler/scale", 4.0), "");
    const std::vector<std::tuple<const char*, Json, const char*>> rows{
        {"/run", Json::object(), "run: has no 'counters'"},
        {"/run/counters", 3, "run.counters: has no 'micro_steps'"},
        {"/run/counters/global_steps", -5, "run.counters.global_steps:"},
        {"/run/counters/global_samples", 1.5, "run.counters.global_samples:"},
        {"/run/counters/global_steps", (int64_t{1} << 52) + 1, "run.counters.global_steps:"},
        {"/run/counters/norm", "x", "run.counters.norm:"},
        {"/run/counters/norm", -0.5, "run.counters.norm:"},
        {"/run/groups/0/beta1", 5.0, "run.groups[0].beta1:"},
        {"/run/groups/0/beta2", -0.5, "run.groups[0].beta2:"},
        {"/run/groups/0/eps", -1e-8, "run.groups[0].eps: is below 0"},
        {"/run/groups/0/momentum", -0.9, "run.groups[0].momentum: is below 0"},
        {"/run/groups/0/weight_decay", -0.1, "run.groups[0].weight_decay: is below 0"},
        {"/run/groups", nullptr, "run.groups:"},
        {"/run/groups/0", "x", "run.groups[0]:"},
        {"/run/groups/0/lr", "0.1", "run.groups[0].lr:"},
        {"/run/groups/0/lr", nullptr, "run.groups[0].lr:"},
        {"/run/groups/0/maximize", 1, "run.groups[0].maximize:"},
        {"/run/ranks", 2, "run.ranks:"},
        {"/run/client", 2, "run.client:"},
        {"/run/client/schedule_steps", "2", "run.client.schedule_steps:"},
        {"/run/scaler", nullptr, "run.scaler: has no 'scale'"},
        {"/run/scaler/scale", 0, "run.scaler.scale:"},
        {"/run/scaler/budget", 0, "run.scaler.budget:"},
        {"/run/scaler/steps", "2", "run.scaler.steps:"}};
    for (const auto& [pointer, value, key] : rows) {
      const std::string error = try_with(pointer, value);
      EXPECT_HAS(error, key);
      EXPECT_HAS(error, path);
    }
    expect_same(values_of(engine).masters, before.masters, at::kFloat, "masters");
  });
}

// States of one optimizer mean something else to another, also where the names are the same; what Adam has is AdamW's and torch's, too.
TEST(Restore, StatesOfAnotherOptimizerAreRefusedOnAllRanks) {
  using Json = nlohmann::ordered_json;
  using optim::Rule;
  struct Here {
    Rule rule;
    const char* client = "";
    const char* name;
    bool decoupled = true;
  };
  const std::vector<Here> optimizers{
      {Rule::Adam, "", "AdamW"},
      {Rule::Adam, "", "Adam", false},
      {Rule::Lion, "", "Lion"},
      {Rule::Sgd, "", "SGD"},
      {Rule::Adagrad, "", "Adagrad"},
      {Rule::External, "Lamb (lr 0.1)", "Lamb"},
      {Rule::External, "torch::optim::AdamW (lr 0.1)", "torch::optim::AdamW"},
      {Rule::External, "torch.optim.nadam.NAdam [{'lr': 0.1}]", "torch.optim.nadam.NAdam"},
      {Rule::External, "mine.AdamW [{'lr': 0.1}]", ""}};
  const auto masters_of = [](Engine& engine) {
    std::vector<at::Tensor> masters;
    for (int i = 0; i < static_cast<int>(engine.params().size()); ++i)
      masters.push_back(engine.states().get_full(i, Quantity::Master));
    return masters;
  };
  const auto is_adam = [](const std::string& name) { return name == "Adam" || name.ends_with("AdamW"); };
  for (const Here& there : optimizers) {
    if (there.rule == Rule::External) continue;
    for (const bool named : {true, false}) {
      const TempFolder folder;
      run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
        const auto built = [&](const Here& which, const Toy& toy) {
          auto options = toy_options({.stage = 1});
          options.rule = which.rule;
          options.client_optimizer = which.client;
          auto of_group = toy_adamw();
          of_group.decoupled = which.decoupled;
          return Engine(options, comm::Mesh(group), toy.specs(), {of_group});
        };
        const Toy toy;
        Engine saved = built(there, toy);
        train(saved, toy, rank, 0, 1);
        saved.checkpoints().save(folder.path(), {});
        if (rank == 0 && !named) {
          const std::string path = folder / "global_step1/manifest.json";
          Json json = Json::parse(io::read_text(path, 1 << 30));
          json.erase("crc32c");
          json["run"].erase("optimizer");
          std::ofstream(path) << checkpoint::sealed(json.dump());
        }
        group->barrier();
        for (const Here& here : optimizers) {
          const Toy other(5);
          Engine engine = built(here, other);
          const auto before = masters_of(engine);
          const auto error = [&](const engine::Restore::Options& options) {
            return error_of([&] { std::ignore = engine.checkpoints().open(folder.path(), "", options); });
          };
          const std::string name = here.name, what = c10::str(there.name, " into ", here.client, name);
          EXPECT_EQ(error({.optimizer = false, .run = false}), "") << what;
          if (here.name == there.name || *here.name == 0 || (is_adam(name) && is_adam(there.name))) {
            EXPECT_EQ(error({}), "") << what;
            continue;
          }
          const std::string text = error({});
          if (named) {
            EXPECT_HAS(text, c10::str("its optimizer was ", there.name, ", here it is ", name, ", to which"));
            EXPECT_HAS(text, "load the weights alone: load_module_only=True");
          } else if (is_adam(there.name) && here.rule != Rule::External) {
            EXPECT_HAS(text, "its optimizer was another one, which has exp_avg");
          }
          expect_same(masters_of(engine), before, at::kFloat, what);
        }
      });
    }
  }
}

TEST(Restore, WhatDoesNotFitIsListedAtOnce) {
  const TempFolder folder;
  run_ranks(2, [&](int, const comm::GroupPtr& group) {
    const Toy toy(5);
    Engine engine = toy_engine({.stage = 1}, toy, group);
    engine.checkpoints().save(folder.path(), {});
    auto specs = Toy(6).specs();
    specs[0].name = "alpha";
    specs[2].tensor = at::randn({18}).requires_grad_(true);
    Engine second(toy_options({.stage = 1}), comm::Mesh(group), specs, {toy_adamw()});
    const std::string error = error_of([&] { second.checkpoints().open(folder.path(), "", {}); });
    EXPECT_HAS(error, "not in the checkpoint: 'alpha'");
    EXPECT_HAS(error, "not in the model: 'a'");
    EXPECT_HAS(error, "'c' has shape [17] there and [18] here");
    EXPECT_FALSE(second.checkpoints().open(folder / "empty", "", {}));
    EXPECT_HAS(error_of([&] { second.checkpoints().open(folder.path(), "../x", {}); }), "name of one folder");
  });
}

// An expert is a tensor of its own on every rank along its axes: each gets its own back, whatever else changes; at another
// extent of the axes it is refused by name.
TEST(Restore, ExpertsAreFoundByTheirPlace) {
  using comm::Axis;
  const auto build = [](const comm::Mesh& mesh, int stage, bool varies, int64_t fill) {
    std::vector<engine::ParamSpec> specs{
        {"shared", at::full({70}, 3.0).requires_grad_(true), 0, "a"},
        {"expert", at::full({40, 3}, fill).to(at::kFloat).requires_grad_(true), 0, "a"},
        {"fixed", at::full({9}, fill), -1, "b"}};
    if (varies) specs[1].varies = specs[2].varies = {Axis::DpShard, Axis::Tp};
    return Engine(toy_options({.stage = stage, .persistence = 0}), mesh, specs, {toy_adamw()});
  };
  const auto number = [](const comm::Mesh& mesh) { return 10 * mesh.rank(Axis::DpShard) + mesh.rank(Axis::Tp) + 1; };
  const TempFolder folder;
  const AxisSizes sizes{{Axis::DpReplicate, 2}, {Axis::DpShard, 2}, {Axis::Tp, 2}};
  run_axes(sizes, [&](int, const comm::Mesh& mesh) {
    Engine engine = build(mesh, 2, true, number(mesh));
    engine.checkpoints().save(folder.path(), {});
  });
  for (int stage = 0; stage <= 3; ++stage) {
    run_axes({{Axis::DpShard, 2}, {Axis::Sp, 2}, {Axis::Tp, 2}}, [&](int, const comm::Mesh& mesh) {
      Engine engine = build(mesh, stage, true, 0);
      engine.checkpoints().open(folder.path(), "", {})->apply();
      EXPECT_TRUE(engine.states().get_full(1, Quantity::Master).eq(number(mesh)).all().item<bool>());
      EXPECT_TRUE(engine.params()[2].tensor.eq(number(mesh)).all().item<bool>());
    });
  }
  const auto refused = [&](const AxisSizes& other, bool varies, const std::string& part) {
    run_axes(other, [&](int, const comm::Mesh& mesh) {
      Engine engine = build(mesh, 2, varies, 1);
      const std::string error = error_of([&] { engine.checkpoints().open(folder.path(), "", {}); });
      EXPECT_HAS(error, "'expert' is another one on each of 2 ranks along dp_shard 2 ranks along tp there and " + part);
      EXPECT_EQ(error.find("not in the"), std::string::npos) << error;
    });
  };
  refused({{Axis::DpShard, 3}, {Axis::Tp, 2}}, true,
          "another one on each of 3 ranks along dp_shard 2 ranks along tp here");
  refused({{Axis::DpShard, 2}}, true, "another one on each of 2 ranks along dp_shard here");
  refused({{Axis::DpShard, 1}}, true, "the same on all ranks here");
  refused(sizes, false, "the same on all ranks here");
}

}  // namespace tessera::testing
