// What one stage's engine does beside batches, and what a program calls between them.
#include <gtest/gtest.h>
#include <torch/data.h>

#include <filesystem>
#include <mutex>
#include <tuple>

#include "tessera/base/error.h"
#include "tessera/nn/data.h"
#include "tessera/nn/pipeline.h"
#include "tests/io/temp_folder.h"
#include "tests/nn/stages.h"
#include "tests/support/errors.h"

namespace tessera::nn {

using testing::Case;
using testing::data_of;
using testing::error_of;
using testing::layers;

namespace {

// Of elements above a bound, of which every rank has another number.
std::pair<at::Tensor, at::Tensor> masked(const Tensors& outputs, const Tensors& labels) {
  const at::Tensor mask = labels[0].gt(-0.3);
  return {((outputs[0] - labels[0]).square() * mask).sum(), mask.sum()};
}

// A layer that gets a second one later.
struct GraftedImpl : torch::nn::Module {
  explicit GraftedImpl(int number) : first(register_module("first", testing::fresh(number, torch::nn::Linear(6, 6)))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = at::tanh(first(x));
    return second ? y + second->forward(y) : y;
  }
  torch::nn::Linear first, second{nullptr};
};
TORCH_MODULE(Grafted);

// Four of which grow; the last two are on the second of two stages.
Layers grafted(std::vector<Grafted>& made) {
  Layers list;
  for (int number = 0; number < 4; ++number)
    list.build([number, &made] { return made.emplace_back(number); });
  list.add([](const at::Tensor& x) { return x.narrow(-1, 0, 3); });
  return list;
}

// Examples are their own numbers.
struct Numbers : torch::data::Dataset<Numbers, int64_t> {
  int64_t get(size_t index) override { return static_cast<int64_t>(index); }
  std::optional<size_t> size() const override { return 30; }
};

struct Fed {
  std::vector<double> losses;
  std::map<std::pair<int, int>, std::vector<int64_t>> given;  // by stage and data-parallel rank
};

// Trains until `steps`, from the folder `from` on, and saves after two steps.
Fed feed(const Case& c, int64_t steps, const std::string& from, const std::string& to) {
  Fed fed;
  std::mutex mutex;
  testing::run_stages(c, [&](const comm::Parts& parts) {
    Pipeline engine(c.list(parts.mesh), c.config(), parts, c.options());
    Loader loader(Numbers{}, engine, {.seed = 5});
    RepeatingLoader batches(loader);
    std::vector<int64_t> mine;
    std::vector<double> losses;
    if (!from.empty()) loader.load_state(engine.load_checkpoint(from).client.at("loader"));
    while (engine.global_steps() < steps) {
      losses.push_back(engine.train_batch([&](int64_t) -> MicroBatch {
        const std::vector<int64_t> batch = batches.next();
        mine.insert(mine.end(), batch.begin(), batch.end());
        const at::Tensor x = at::tensor(batch, at::kFloat).view({-1, 1}) / 30;
        return {{x.expand({-1, 6})}, {x.expand({-1, 3})}};
      }));
      if (engine.global_steps() == 2 && !to.empty()) engine.save_checkpoint(to, {}, {{"loader", loader.state()}});
    }
    const std::scoped_lock lock(mutex);
    fed.losses = losses;
    fed.given[{engine.stage(), engine.rank()}] = mine;
  });
  return fed;
}

}  // namespace

// Ranks of data parallel have other examples, the first and the last stage of one the same; a checkpoint has the position, also for
// other stages.
TEST(PipelineCalls, ALoaderFeedsAPipelineAndGoesOnWithItsCheckpoints) {
  const std::vector<Case> cases{{.stages = 2, .micro_batches = 2},
                                {.stages = 4, .micro_batches = 2},
                                {.stages = 2, .ranks = 2, .zero = 1, .micro_batches = 2}};
  for (const Case& c : cases) {
    const io::TempFolder folder;
    const Fed straight = feed(c, 5, "", folder.path());
    std::multiset<int64_t> pass;
    for (const auto& [of, mine] : straight.given) {
      EXPECT_EQ(mine,
                of.first == 0 || of.first == c.stages - 1 ? straight.given.at({0, of.second}) : std::vector<int64_t>());
      if (of.first == 0) pass.insert(mine.begin(), mine.begin() + 30 / c.ranks);
    }
    EXPECT_EQ(std::set<int64_t>(pass.begin(), pass.end()).size(), 30U) << c.name();
    for (const Case& other : cases) {
      if (other.ranks != c.ranks) continue;
      const Fed rest = feed(other, 5, folder.path(), "");
      EXPECT_EQ(rest.losses, (std::vector<double>(straight.losses.begin() + 2, straight.losses.end()))) << other.name();
      const std::vector<int64_t>& all = straight.given.at({0, 0});
      EXPECT_EQ(rest.given.at({0, 0}), (std::vector<int64_t>(all.begin() + 12, all.end())));
    }
  }
}

TEST(PipelineCalls, AMaskedLossIsOverTheTokensOfAllRanks) {
  const Case c{.ranks = 2, .zero = 1};
  testing::run_stages(c, [&](const comm::Parts& parts) {
    std::unique_ptr<Pipeline> engine;
    PipelineOptions options = c.options();
    options.loss = [&](const Tensors& outputs, const Tensors& labels) {
      const auto [sum, count] = masked(outputs, labels);
      return engine->token_mean(sum, count);
    };
    engine = std::make_unique<Pipeline>(c.list(parts.mesh), c.config(), parts, options);
    const BatchSource data = data_of(c, parts, 0);
    const Evaluation found = engine->eval_batch(data);
    if (engine->is_last_stage()) {
      double expected = 0;
      for (int64_t micro = 0; micro < c.micro_batches; ++micro) {
        const auto [sum, count] = masked(found.outputs[micro], data(micro).labels);
        expected += engine->sum(sum).item<double>() / engine->sum(count).item<double>() / c.micro_batches;
      }
      EXPECT_NEAR(found.loss, expected, 1e-6);
    }
    EXPECT_EQ(engine->train_batch(data), found.loss) << "the weights are those of the evaluation";
  });
}

TEST(PipelineCalls, ANumberOfMicroBatchesAndTheirSizeMayChange) {
  const Case c{.ranks = 2, .zero = 1};
  testing::run_stages(c, [&](const comm::Parts& parts) {
    Pipeline engine(c.list(parts.mesh), c.config(), parts, c.options());
    engine.set_gradient_accumulation_steps(2);
    engine.set_micro_batch_size(5);
    engine.train_batch(data_of(c, parts, 0));
    EXPECT_EQ(engine.micro_steps(), 2);
    EXPECT_EQ(engine.global_samples(), 2 * 5 * c.ranks);
  });
}

TEST(PipelineCalls, StatesAreAwayWhileAnObjectLives) {
  const Case c{.ranks = 2};
  const io::TempFolder disk;
  const auto config =
      Config::from_json(c10::str(R"({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4,
      "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none",
      "nvme_path": ")",
                                 disk.path(), R"("}}})"));
  testing::run_stages(c, [&](const comm::Parts& parts) {
    Pipeline away(c.list(parts.mesh), config, parts, c.options());
    Pipeline stays(c.list(parts.mesh), config, parts, c.options());
    for (int step = 0; step < 2; ++step) {
      EXPECT_EQ(away.train_batch(data_of(c, parts, step)), stays.train_batch(data_of(c, parts, step)));
      auto held = away.states_away(zero::all_state_kinds(), shard::Residence::Nvme);
      EXPECT_TRUE(away.states_are_away());
      held.end();
      EXPECT_FALSE(away.states_are_away());
    }
  });
}

TEST(PipelineCalls, TheWholeModelIsWrittenByTheStageThatHasIt) {
  const io::TempFolder folder;
  for (const int stages : {1, 2}) {
    const Case c{.stages = stages};
    testing::run_stages(c, [&](const comm::Parts& parts) {
      Pipeline engine(c.list(parts.mesh), c.config(), parts, c.options());
      if (stages == 1) {
        EXPECT_TRUE(engine.save_16bit_model(folder.path(), "one.safetensors"));
        EXPECT_EQ(checkpoint::WeightReader(folder / "one.safetensors").tensors().size(),
                  engine.module().named_parameters().size());
      } else {
        const auto text = error_of<c10::NotImplementedError>(
            [&] { static_cast<void>(engine.save_16bit_model(folder.path(), "none.safetensors")); });
        EXPECT_HAS(text, "[engine.save_16bit_model] is not served over several stages");
      }
    });
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "none.safetensors"));
}

// Of all stages: one of them may have no layer that is cut.
TEST(PipelineCalls, RanksOverWhichNothingIsCutAreWarnedOf) {
  const auto half = [](const comm::Mesh& mesh) {
    testing::Layers list;
    list.build([mesh] { return testing::Cut(1, mesh); });
    list.build([] { return torch::nn::Linear(testing::kWidth, 3); });
    return list;
  };
  const std::vector<std::tuple<Case, int>> cases{{Case{.tp = 2}, 1},
                                                 {Case{.stages = 1, .tp = 2}, 1},
                                                 {Case{.ranks = 2}, 0},
                                                 {Case{.tp = 2, .list = testing::cut_layers}, 0},
                                                 {Case{.tp = 2, .list = half}, 0}};
  for (const auto& [c, count] : cases) {
    std::mutex mutex;
    std::vector<std::string> lines;
    testing::run_stages(c, [&](const comm::Parts& parts) {
      const testing::KeptWarnings kept;
      const Pipeline engine(c.list(parts.mesh), c.config(), parts, c.options());
      const std::scoped_lock lock(mutex);
      lines.insert(lines.end(), kept.lines.begin(), kept.lines.end());
    });
    ASSERT_EQ(lines.size(), count) << c.name() << ::testing::PrintToString(lines);
    if (count == 1) {
      EXPECT_HAS(lines[0], "2 ranks along 'tp' (tensor_parallel.autotp_size), and no module of the model is cut");
    }
  }
}

TEST(PipelineCalls, FilesOfDeepSpeedAreOfOneStage) {
  const io::TempFolder folder;
  const Case plain{.zero = 1}, c{.zero = 1, .more = R"("checkpoint": {"format": "deepspeed"},)"};
  testing::run_stages(c, [&](const comm::Parts& parts) {
    Pipeline engine(c.list(parts.mesh), c.config(), parts, c.options());
    Pipeline ours(c.list(parts.mesh), plain.config(), parts, c.options());
    const std::string to = folder / "none";
    const engine::SaveOptions options{.deepspeed = checkpoint::DeepSpeedLayout{1, 1}};
    for (const auto& text : {error_of<c10::NotImplementedError>([&] { engine.save_checkpoint(to); }),
                             error_of<c10::NotImplementedError>([&] { ours.save_checkpoint(to, options); })})
      EXPECT_HAS(text, "save_checkpoint with checkpoint.format \"deepspeed\"] is not served over several stages");
  });
  EXPECT_FALSE(std::filesystem::exists(folder / "none"));
}

// Of both stages, or of the second alone, by the engine or by the program's optimizer; the numbers are those of the whole model.
void grows_a_group(const int from, const bool own, const std::string& optimizer) {
  constexpr int kSteps = 3;
  {
    std::vector<double> whole;
    for (const int stages : {1, 2}) {
      const Case c{.stages = stages, .zero = stages - 1, .optimizer = optimizer, .own = own};
      const io::TempFolder folder;
      testing::run_stages(c, [&](const comm::Parts& parts) {
        std::vector<Grafted> made;
        auto options = c.options();
        std::shared_ptr<torch::optim::Optimizer> mine;
        if (own) options.optimizer = [&](const StageLayers& stage) { return mine = c.optimizer_of(stage); };
        Pipeline engine(grafted(made), c.config(), parts, options);
        std::vector<double> losses;
        for (int step = 0; step < kSteps; ++step) {
          if (step == 1) {
            std::vector<at::Tensor> added;
            for (size_t i = 0; i < made.size(); ++i) {
              const auto number = static_cast<int>(i) + engine.stage() * 2;
              if (number < from) continue;
              made[i]->second = made[i]->register_module("second", testing::fresh(number + 9, torch::nn::Linear(6, 6)));
              for (const at::Tensor& param : made[i]->second->parameters())
                added.push_back(param);
            }
            optim::GroupOptions rates = engine.groups().front();
            rates.lr = 0.02;
            if (own)
              mine->add_param_group(torch::optim::OptimizerParamGroup(
                  added, std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(0.02).momentum(0.9))));
            else
              EXPECT_EQ(engine.add_param_group(added, rates), 1);
          }
          losses.push_back(engine.train_batch(data_of(c, parts, step)));
        }
        EXPECT_EQ(engine.lr().size(), 2U);
        EXPECT_EQ(engine.lr()[1], 0.02);
        engine.save_checkpoint(folder.path());
        if (stages == 1) {
          whole = losses;
        } else {
          EXPECT_EQ(losses, whole) << "from layer " << from << ", " << optimizer << ", own " << own;
        }
      });
    }
  }
}

TEST(PipelineCalls, LayersMayGrowAParamGroup) {
  for (const int from : {0, 2}) {
    grows_a_group(from, false, "AdamW");
    grows_a_group(from, true, "AdamW");
  }
}

}  // namespace tessera::nn
