#include "tessera/nn/session.h"

#include <gtest/gtest.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/nn.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <tuple>

#include "tessera/io/file.h"
#include "tessera/nn/engine.h"
#include "tessera/nn/hooked.h"
#include "tessera/nn/parallel.h"
#include "tessera/nn/together.h"
#include "tests/io/temp_folder.h"
#include "tests/nn/session_steps.h"
#include "tests/nn/stages.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera::nn {
namespace {

using testing::pass;
using testing::train_step;

Session session(const std::string& json) {
  return Session(torch::nn::Linear(2, 2).ptr(), Config::from_json(json), comm::Mesh());
}

void expect_value_error(const std::string& json, const std::string& text) {
  EXPECT_HAS(testing::message_of<c10::ValueError>([&] { session(json); }), text);
}

// What a configuration asks of the ranks and the mesh has not is an error, never left out.
TEST(Session, AxesOfTheConfigurationAreThoseOfTheMesh) {
  const std::string sgd = R"("optimizer": {"type": "SGD"})";
  expect_value_error("{" + sgd + R"(, "sequence_parallel_size": 2})",
                     "sequence_parallel_size is 2, but the mesh has 1 ranks along 'sp'");
  expect_value_error("{" + sgd + R"(, "tensor_parallel": {"autotp_size": 2}})",
                     "tensor_parallel.autotp_size is 2, but the mesh has 1 ranks along 'tp'");
}

// What ends where an object goes throws at the next step(), what end() does at once; an exception that passes counts alone.
TEST(Session, WhatTheEndOfAHeldReductionThrows) {
  for (const std::string how : {"goes", "ends", "unwinds"}) {
    testing::run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
      comm::Mesh mesh;
      mesh.set(comm::Axis::DpShard, group);
      Session s(torch::nn::Linear(2, 2).ptr(),
                Config::from_json(R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"},
                    "zero_optimization": {"stage": 2}})"),
                mesh);
      const auto body = [&] {
        auto held = s.coalesce();
        pass(s);
        group->barrier();
        if (rank == 0) group->abort("enough");
        if (how == "ends") held.end();
        if (how == "unwinds") throw std::runtime_error("the caller's own");
      };
      const std::string text = testing::error_of(body);
      if (how == "ends") {
        EXPECT_HAS(text, "enough");
      } else {
        EXPECT_EQ(text, how == "goes" ? "" : "the caller's own");
      }
      EXPECT_HAS(testing::error_of([&] { s.step(); }), "enough");
    });
  }
}

TEST(Session, TheScheduleMovesTheLearningRateAtEveryAppliedStep) {
  auto s = session(R"({"train_batch_size": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.5}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.4, "warmup_num_steps": 4,
                                                 "warmup_type": "linear"}}})");
  const auto at = [](int64_t i) {
    optim::WarmupLR options;
    options.warmup_max_lr = {0.4};
    options.warmup_num_steps = 4;
    options.warmup_type = optim::WarmupType::Linear;
    return optim::evaluate(options, i, {0.5}).lr;
  };
  for (int64_t step = 0; step < 6; ++step) {
    EXPECT_EQ(s.lr(), at(step)) << step;
    train_step(s);
  }
}

TEST(Session, AModelWithoutAnythingToTrainIsWarnedOfOnce) {
  for (int stage = 0; stage < 4; ++stage) {
    testing::run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
      const testing::KeptWarnings kept;
      const auto config = Config::from_json(c10::str(
          R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": )",
          stage, "}}"));
      torch::nn::Linear frozen(2, 2);
      for (at::Tensor& param : frozen->parameters())
        param.requires_grad_(false);
      auto engine = initialize(frozen, config, comm::Mesh(group));
      engine.forward(at::ones({1, 2}));
      ASSERT_EQ(kept.lines.size(), rank == 0 ? 1U : 0U);
      if (rank == 0) {
        EXPECT_HAS(kept.lines[0], "nothing is trained: all parameters of the model are frozen");
      }
    });
  }
}

TEST(Session, TheScheduleHasOneOwner) {
  static_assert(!std::is_copy_constructible_v<Session> && !std::is_copy_assignable_v<Session>);
  auto first = session(R"({"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}})");
  train_step(first);
  const auto rates = first.lr();
  Session second = std::move(first);
  EXPECT_EQ(second.lr(), rates);
  train_step(second);
  EXPECT_NE(second.lr(), rates);
}

TEST(Session, AHolderWithoutAModuleIsRefused) {
  const torch::nn::Linear none(nullptr);
  const auto config = Config::from_json(R"({"train_micro_batch_size_per_gpu": 1})");
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { initialize(none, config); }, [&] { initialize(none, config, comm::Mesh()); },
           [&] { std::ignore = unit(none); },
           [&] { std::ignore = unit_as<at::Tensor(const at::Tensor&)>(none); }})  // NOLINT
    EXPECT_HAS(testing::error_of<c10::ValueError>(call), "] the module is null");
}

TEST(Session, TheScheduleWaitsForTheBoundary) {
  auto s = session(R"({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}})");
  const auto before = s.lr();
  EXPECT_FALSE(s.step());
  EXPECT_EQ(s.lr(), before);
}

TEST(Session, UnitsAreTheUsersOrThoseOfUnitPolicy) {
  const auto units = [](int stage, const UnitPolicy& policy = default_unit_policy, const std::string& zero = "") {
    const auto config = Config::from_json(R"({"train_batch_size": 1, "optimizer": {"type": "SGD"},
      "zero_optimization": {"stage": )" + std::to_string(stage) +
                                          zero + "}}");
    const torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::LayerNorm(torch::nn::LayerNormOptions({2})));
    const Session s(net.ptr(), config, comm::Mesh(), nullptr, {.units = policy});
    std::vector<std::string> names;
    for (const auto& spec : s.core().params())
      names.push_back(spec.unit);
    return names;
  };
  const auto mine = [](const torch::nn::Module&) { return engine::UnitNames{{"0.bias", "mine"}}; };
  using Names = std::vector<std::string>;
  EXPECT_EQ(units(2), Names(4, "root"));
  EXPECT_EQ(units(3), (Names{"0", "0", "1", "1"})) << "each is whole only while it runs";
  EXPECT_EQ(units(2, mine), (Names{"root", "mine", "root", "root"}));
  EXPECT_EQ(units(3, mine), (Names{"0", "mine", "1", "1"}));
  const std::string leaf = R"(, "leaf_module": {"names": "0", "name_suffixes": ["nowhere"]})";
  EXPECT_EQ(units(3, mine, leaf), (Names{"0", "0", "1", "1"}));
  EXPECT_EQ(units(2, mine, leaf), (Names{"root", "mine", "root", "root"})) << "marks are for partitioned parameters";
}

TEST(Session, WithoutAScheduleTheLearningRateStays) {
  auto s = session(R"({"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}})");
  train_step(s);
  EXPECT_EQ(s.lr(), std::vector<double>{0.5});
}

TEST(Session, AConfigurationMustNameANativeOptimizerAndSchedule) {
  expect_value_error(R"({"train_batch_size": 1, "optimizer": {"type": "Nothing"}})",
                     "names no optimizer that runs in C++");
  expect_value_error(R"({"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    "scheduler": {"type": "LambdaLR"}})",
                     "LambdaLR");
}

TEST(Session, Bf16ConvertsParametersAndKeepsBuffersUnlessTheyAreAskedFor) {
  for (const auto& [keys, dtype] :
       {std::pair("", at::kFloat),
        {R"(, "data_types": {"buffer_dtype": "bf16"})", at::kBFloat16},
        {R"(, "data_types": {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["run*mean", "var"]})", at::kFloat}}) {
    torch::nn::BatchNorm1d net(3);
    Session s(net.ptr(),
              Config::from_json(std::string(R"({"train_batch_size": 1, "bf16": {"enabled": true},
      "optimizer": {"type": "Adam"})") +
                                keys + "}"),
              comm::Mesh());
    EXPECT_EQ(net->weight.scalar_type(), at::kBFloat16);
    EXPECT_EQ(net->running_mean.scalar_type(), dtype) << "as in Python";
    EXPECT_EQ(net->running_var.scalar_type(), dtype);
    EXPECT_EQ(net->num_batches_tracked.scalar_type(), at::kLong);
  }
}

TEST(Session, CheckpointsAreAsTheConfigurationSays) {
  const io::TempFolder folder;
  const auto of = [](const std::string& more, comm::Mesh mesh = {}) {
    return Session(torch::nn::Linear(2, 2).ptr(),
                   Config::from_json(R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},
      "optimizer": {"type": "SGD"}, )" +
                                     more + "}"),
                   std::move(mesh));
  };
  auto saved = of(R"("steps_per_print": null)");
  saved.core().states().set_full(0, shard::Quantity::Master, at::full({2, 2}, 1.001F));
  saved.save_checkpoint(folder.path(), engine::SaveOptions{.tag = "here"});
  const auto master = [&](const char* more) {
    auto s = of(more);
    EXPECT_TRUE(s.load_checkpoint(folder.path()));
    return s.core().states().get_full(0, shard::Quantity::Master)[0][0].item<float>();
  };
  EXPECT_EQ(master(R"("zero_optimization": {"stage": 1})"), 1.001F);
  EXPECT_EQ(master(R"("zero_optimization": {"stage": 1, "load_from_fp32_weights": false})"), 1.0F);

  auto universal = of(R"("checkpoint": {"load_universal": true})");
  EXPECT_HAS(testing::error_of([&] { static_cast<void>(universal.load_checkpoint(folder.path())); }),
             "'latest_universal'");

  for (const bool fails : {true, false})
    testing::run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
      auto s =
          of(fails ? R"("checkpoint": {"tag_validation": "fail"})" : R"("checkpoint": {"tag_validation": "ignore"})",
             comm::Mesh(group));
      const std::string text = testing::error_of(
          [&] { s.save_checkpoint(folder / "two", engine::SaveOptions{.tag = "tag" + std::to_string(rank)}); });
      EXPECT_EQ(text.find("different tags") != std::string::npos, fails) << text;
    });
}

TEST(Session, ErrorsNameTheCallsOfThisFrontEnd) {
  auto s = session(R"({"train_batch_size": 1, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 1}})");
  const auto error = [](const auto& call) { return testing::error_of(call); };
  {
    auto held = s.no_sync();
    EXPECT_HAS(error([&] { auto again = s.no_sync(); }), "[engine.no_sync] no_sync() inside itself");
    EXPECT_HAS(error([&] { auto again = s.coalesce(); }), "[engine] coalesce: inside no_sync(); end that first");
    EXPECT_HAS(error([&] { s.step(); }), "inside no_sync(); end that first");
  }
  {
    auto held = s.coalesce();
    EXPECT_HAS(error([&] { auto again = s.no_sync(); }), "no_sync() inside coalesce(): it is local there already");
    EXPECT_HAS(error([&] { auto again = s.coalesce(); }), "[engine] coalesce: inside itself");
    EXPECT_HAS(error([&] { s.step(); }), "Engine.step() inside coalesce(); end that first");
  }
  EXPECT_HAS(error([&] { s.clip_grad_norm(-1); }), "[engine.clip_grad_norm] max_norm must be a number >= 0, got -1");
  s.destroy();
  const std::vector<std::pair<const char*, std::function<void()>>> calls{
      {"lr", [&] { s.lr(); }},
      {"groups", [&] { s.groups(); }},
      {"coalesce", [&] { auto held = s.coalesce(); }},
      {"no_sync", [&] { auto held = s.no_sync(); }},
      {"clip_grad_norm", [&] { s.clip_grad_norm(1); }},
      {"grad_norm", [&] { s.grad_norm(); }},
      {"step", [&] { s.step(); }},
      {"backward", [&] { s.backward(at::ones({})); }},
      {"zero_grad", [&] { s.zero_grad(); }},
      {"phases", [&] { s.phases(); }},
      {"offload_states", [&] { s.offload_states(); }},
      {"add_param_group", [&] { s.add_param_group({at::ones({1})}, {}); }},
      {"save_checkpoint", [&] { s.save_checkpoint("nowhere"); }},
      {"load_checkpoint", [&] { std::ignore = s.load_checkpoint("nowhere"); }},
      {"module_state_dict", [&] { std::ignore = s.module_state_dict(); }},
      {"set_gradient_accumulation_steps", [&] { s.set_gradient_accumulation_steps(2); }}};
  for (const auto& [name, call] : calls)
    EXPECT_HAS(error(call), c10::str("[engine] ", name, ": the engine was destroyed; build a new one"));
}

TEST(Session, AllClientValuesThatCannotBeSavedAreNamed) {
  const io::TempFolder folder;
  auto s = session(R"({"train_batch_size": 1, "optimizer": {"type": "SGD"}})");
  c10::impl::GenericDict inner(c10::StringType::get(), c10::AnyType::get());
  inner.insert("deep", at::Tensor());
  inner.insert("fine", at::ones({1}));
  const ClientValues client{{"epoch", int64_t{7}},
                            {"gone", at::Tensor()},
                            {"inner", inner},
                            {"list", std::vector<at::Tensor>{at::ones({1}), at::Tensor()}}};
  const std::string text = testing::error_of<c10::ValueError>([&] { s.save_checkpoint(folder.path(), {}, client); });
  EXPECT_HAS(text,
             "client_state holds what a file of torch.save() cannot: 'gone': an undefined tensor; "
             "'inner'['deep']: an undefined tensor; 'list'[1]: an undefined tensor");
  EXPECT_HAS(
      testing::error_of<c10::ValueError>(
          [&] { s.save_checkpoint(folder.path(), {}, {{"empty", at::empty({2}, at::kMeta)}, {"good", 1}}); }),
      "client_state holds what a file of torch.save() cannot: 'empty': [checkpoint] a tensor on the meta device");
  EXPECT_HAS(testing::error_of<c10::ValueError>(
                 [&] { s.save_checkpoint(folder.path(), {}, {{"checkpoint_parallel_dimensions", 1}}); }),
             "have keys that are DeepSpeed's own: checkpoint_parallel_dimensions");
  EXPECT_EQ(text.find("epoch"), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(folder / "latest"));
}

// An option that is given changes that one alone.
TEST(Session, OptionsOfASaveAreTakenOneByOne) {
  using Save = engine::SaveOptions;
  const io::TempFolder folder;
  const auto kept = [&](const Save& more) {
    const std::string dir = folder / std::to_string(std::rand());
    Session s(torch::nn::Linear(2, 2).ptr(), Config::from_json(R"({"train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD"}, "checkpoint": {"keep_last": 1, "asynchronous": true}})"),
              comm::Mesh());
    for (const char* tag : {"a", "b", "c"}) {
      Save options = more;
      options.tag = tag;
      s.save_checkpoint(dir, options);
    }
    s.wait_for_checkpoint();
    size_t found = 0;
    for (const auto& entry : std::filesystem::directory_iterator(dir))
      found += entry.is_directory() ? 1 : 0;
    return found;
  };
  EXPECT_EQ(kept({}), 1U);
  EXPECT_EQ(kept({.keep_last = 2}), 2U);
  EXPECT_EQ(kept({.asynchronous = false}), 1U);
  testing::run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
    Session s(torch::nn::Linear(2, 2).ptr(), Config::from_json(R"({"train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD"}, "checkpoint": {"tag_validation": "fail"}})"),
              comm::Mesh(group));
    s.save_checkpoint(folder / "tags", Save{.tag = "tag" + std::to_string(rank), .tags = Save::Tags::Ignore});
    EXPECT_HAS(testing::error_of([&] { s.save_checkpoint(folder / "tags", Save{.tag = std::to_string(rank)}); }),
               "different tags");
  });
}

// A teacher, a reward model.
TEST(Session, WithoutAnOptimizerAnEngineEvaluates) {
  for (int stage = 0; stage <= 3; ++stage)
    testing::run_ranks(2, [&](int, const comm::GroupPtr& group) {
      const auto config = Config::from_json(
          c10::str(R"({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": )", stage, "}}"));
      torch::nn::Linear layer(2, 2);
      torch::nn::init::constant_(layer->weight, 2);
      torch::nn::init::constant_(layer->bias, 1);
      const testing::KeptWarnings kept;
      if (stage == 1 || stage == 2) {
        EXPECT_HAS(testing::error_of<c10::ValueError>([&] { initialize(layer, config, comm::Mesh(group)); }),
                   c10::str("[initialize] zero_optimization.stage ", stage, " requires an optimizer; pass one or use"));
        return;
      }
      Recipe grouped;
      grouped.groups = {{.params = layer->parameters()}};
      EXPECT_HAS(testing::error_of<c10::ValueError>([&] { initialize(layer, config, comm::Mesh(group), grouped); }),
                 "Recipe::groups has groups, and there is no optimizer for them");
      auto engine = initialize(layer, config, comm::Mesh(group));
      {
        const at::NoGradGuard no_grad;
        EXPECT_TRUE(engine.forward(at::ones({1, 2})).equal(at::full({1, 2}, 5.0F)));
      }
      EXPECT_TRUE(kept.lines.empty()) << kept.lines;
      for (const auto& [name, call] : std::map<std::string, std::function<void()>>{
               {"step", [&] { engine.step(); }},
               {"backward", [&] { engine.backward(at::ones({})); }},
               {"scale", [&] { engine.scale(at::ones({})); }},
               {"grad_norm", [&] { engine.grad_norm(); }},
               {"clip_grad_norm", [&] { engine.clip_grad_norm(1); }},
               {"add_param_group", [&] { engine.add_param_group(layer->parameters(), {}); }}})
        EXPECT_EQ(testing::error_of<UsageError>(call),
                  "[engine." + name + "] there is no optimizer; set optimizer.type, or give Recipe::optimizer");
      EXPECT_EQ(engine.module_state_dict().size(), 2U);
    });
}

// An engine's buffers are those of the checkpoint, or the names say which are not.
TEST(Session, BuffersOfACheckpointAreTheModels) {
  const io::TempFolder folder;
  const auto with = [&](const std::vector<std::string>& names) {
    auto module = std::make_shared<torch::nn::LinearImpl>(2, 2);
    for (const std::string& name : names)
      module->register_buffer(name, at::zeros({2}));
    return Session(module, Config::from_json(R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}})"),
                   comm::Mesh());
  };
  with({"a", "b"}).save_checkpoint(folder.path());
  auto other = with({"b", "c"});
  EXPECT_HAS(testing::error_of<c10::ValueError>([&] { static_cast<void>(other.load_checkpoint(folder.path())); }),
             "[engine.load_checkpoint] buffers of '" + (folder / "global_step0") +
                 "' do not fit this model:\n  not in the checkpoint: 'c'\n  not in the model: 'a'");
  const Loaded loaded = other.load_checkpoint(folder.path(), "", {.strict = false});
  EXPECT_EQ(loaded.missing, std::vector<std::string>{"c"});
  EXPECT_EQ(loaded.unexpected, std::vector<std::string>{"a"});
}

// A missing folder is a new run; what is there and no folder of saves is a mistake.
TEST(Session, WhatIsNoFolderOfSavesIsNoNewRun) {
  const io::TempFolder folder;
  auto s = session(R"({"train_batch_size": 1, "optimizer": {"type": "SGD"}})");
  const auto error = [&](const std::string& dir) {
    return testing::error_of([&] { EXPECT_FALSE(s.load_checkpoint(dir)); });
  };
  EXPECT_EQ(error(folder / "none"), "");
  EXPECT_EQ(error(folder.path()), "");
  s.save_checkpoint(folder / "run");
  std::ofstream(folder / "model.pt") << "x";
  EXPECT_HAS(error(folder / "model.pt"), "model.pt' is a file; give the folder that save_checkpoint() was called with");
  EXPECT_HAS(error(folder / "run/global_step0"), "is one checkpoint; give the folder around it");
  EXPECT_HAS(error(""), "[engine.load_checkpoint] the folder has no name");
  for (const int64_t bytes : {0, -5})
    EXPECT_HAS(testing::error_of<c10::ValueError>([&] {
                 static_cast<void>(s.save_16bit_model(folder.path(), "w.safetensors", {.max_shard_bytes = bytes}));
               }),
               c10::str("max_shard_bytes must be > 0, got ", bytes));
}

// `engine = initialize(...)` inside a hold of the engine before.
TEST(Session, WhatHoldsAnEngineMayOutliveIt) {
  const auto make = [] {
    return initialize(torch::nn::Linear(2, 2),
                      Config::from_json(R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"},
        "zero_optimization": {"stage": 3}})"));
  };
  std::optional first(make());
  {
    const auto held = first->no_sync();
    const GatheredParameters whole(*first, first->module().parameters());
    first.emplace(make());
  }
  first->backward(first->forward(at::ones({1, 2})).sum());
  EXPECT_TRUE(first->step());
}

// Takes no state of a save but its own on one rank: all ranks are as they were.
TEST(Session, AScheduleThatDoesNotTakeItsStateIsAnErrorOnAll) {
  struct Choosy : Schedule {
    explicit Choosy(bool refuses) : refuses(refuses) {}
    std::vector<double> rates(int64_t, const std::vector<double>& initial) override { return initial; }
    std::string state() const override { return std::to_string(kept); }
    void load_state(const std::string& state) override {
      if (refuses && state != this->state()) throw std::runtime_error("no such state");
      kept = std::stoi(state);
    }
    int kept = 0;
    bool refuses;
  };
  const io::TempFolder folder;
  testing::run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
    const auto schedule = std::make_shared<Choosy>(rank == 1);
    Session s(torch::nn::Linear(2, 2).ptr(),
              Config::from_json(R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}})"),
              comm::Mesh(group), nullptr, Recipe{.schedule = schedule});
    schedule->kept = 4;
    s.save_checkpoint(folder.path());
    schedule->kept = 5;
    train_step(s);
    const at::Tensor weight = s.core().params()[0].tensor, before = weight.clone();
    EXPECT_HAS(testing::error_of([&] { static_cast<void>(s.load_checkpoint(folder.path())); }), "no such state");
    EXPECT_TRUE(weight.equal(before));
    EXPECT_EQ(schedule->kept, 5);
    EXPECT_EQ(s.global_steps(), 1);
  });
}

// What a rank finds wrong alone: the others do not wait for it.
TEST(Session, WhatOneRankCannotLoadIsAnErrorOnAll) {
  const io::TempFolder folder;
  testing::run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
    const auto session_with = [&](int64_t size) {
      auto module = std::make_shared<torch::nn::LinearImpl>(2, 2);
      Session s(module, Config::from_json(R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}})"),
                comm::Mesh(group));
      module->register_buffer("counts", at::zeros({size}));
      return s;
    };
    session_with(2).save_checkpoint(folder.path());
    auto other = session_with(2 + rank);
    const at::Tensor weight = other.core().params()[0].tensor, before = weight.clone();
    EXPECT_HAS(testing::error_of<c10::ValueError>([&] { static_cast<void>(other.load_checkpoint(folder.path())); }),
               "do not fit this model:\n  'counts' has shape [2] there and [3] here");
    EXPECT_TRUE(weight.equal(before));
    train_step(other);
  });
}

// Two engines on two ranks each, where one rank of the first does what the other does not: an error on all four.
TEST(Session, RanksThatDifferInOneEngineAreAnErrorOfAllEngines) {
  comm::MeshShape pair;
  pair.sizes[static_cast<size_t>(comm::Axis::DpShard)] = 2;
  for (const std::string call : {"step", "save", "load", "rate", "no_sync"}) {
    const io::TempFolder folder;
    testing::run_parts({pair, pair}, [&](const comm::Parts& parts) {
      auto module = std::make_shared<torch::nn::Module>();
      module->register_module(parts.part == 0 ? "first" : "second", torch::nn::Linear(2, 2));
      const at::Tensor bias = module->parameters()[1].set_requires_grad(false);
      Session s(module, Config::from_json(R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}})"),
                parts.mesh);
      s.core().checkpoints().span(parts.everyone, {});
      s.save_checkpoint(folder.path());
      const auto begin = [&](bool thawed) {
        bias.requires_grad_(thawed);
        s.core().pre_forward();
        const at::Tensor loss = module->parameters()[0].sum() + bias.sum();
        s.core().post_forward({loss});
        loss.backward();
      };
      const bool odd = parts.part == 0 && parts.mesh.rank(comm::kBatchAxes) == 1;
      const bool thaws = call != "rate" && call != "no_sync";
      begin(!thaws || parts.part == 1 || odd);
      if (odd && call == "rate") s.core().groups()[0].lr = 0.5;
      if (odd && call == "no_sync") s.core().begin_no_sync();
      const std::string text = testing::error_of([&] {
        if (call == "save")
          s.save_checkpoint(folder.path());
        else if (call == "load")
          EXPECT_TRUE(s.load_checkpoint(folder.path()));
        else
          step_together(s, parts);
      });
      if (call == "save" || call == "load") {
        EXPECT_HAS(text, "do not train the same parameters");
      } else if (call == "no_sync") {
        EXPECT_HAS(text, odd ? "inside no_sync" : "no engine was stepped: rank 1 cannot step");
      } else if (parts.part == 1) {
        EXPECT_HAS(text, "no engine was stepped: the norm failed on rank 0");
      } else {
        EXPECT_HAS(text, call == "rate" ? ", rank 1 has lr 0.5" : "rank 1 has parameter 'first.bias'");
      }
      EXPECT_EQ(s.core().global_steps() + s.core().micro_steps(), 0);
      s.core().end_no_sync();
      s.core().groups()[0].lr = 0.25;
      s.core().zero_grad();
      begin(true);
      EXPECT_TRUE(step_together(s, parts)) << "the engines go on";
    });
  }
}

TEST(Session, WeightsForOtherTools) {
  struct Tied : torch::nn::Module {
    Tied() {
      const at::Tensor weight = register_parameter("first", torch::randn({3, 3}));
      register_parameter("bias", torch::randn({3}));
      register_parameter("second", weight);
      register_buffer("count", torch::tensor(5));
    }
  };
  const io::TempFolder folder;
  for (const bool gather : {true, false}) {
    const auto net = std::make_shared<Tied>();
    Session s(net,
              Config::from_json(c10::str(R"({"train_batch_size": 1, "bf16": {"enabled": true},
        "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 3,
        "stage3_gather_16bit_weights_on_model_save": )",
                                         gather ? "true" : "false", "}}")),
              comm::Mesh());
    EXPECT_EQ(s.save_16bit_model(folder.path()), gather);
    EXPECT_EQ(s.save_16bit_model(folder / "other", "model.safetensors", {.max_shard_bytes = 20}), gather);
    if (!gather) continue;
    const std::string bytes = io::read_text(folder / "pytorch_model.bin", 1 << 20);
    const auto state = torch::jit::pickle_load({bytes.begin(), bytes.end()}).toGenericDict();
    EXPECT_EQ(state.size(), 4u);
    const auto value = [&](const char* name) { return state.at(std::string(name)).toTensor(); };
    EXPECT_EQ(value("first").scalar_type(), at::kBFloat16);
    EXPECT_TRUE(value("first").is_alias_of(value("second")));
    EXPECT_EQ(value("count").item<int>(), 5);
    EXPECT_TRUE(std::filesystem::exists(folder / "other/model.safetensors.index.json"));
    std::filesystem::remove_all(folder / "other");
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "other")) << "nothing is written";
}

}  // namespace
}  // namespace tessera::nn
