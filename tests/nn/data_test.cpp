#include "tessera/nn/data.h"

#include <gtest/gtest.h>
#include <torch/data.h>
#include <torch/nn.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <type_traits>

#include "tessera/nn/engine.h"
#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera::nn {
namespace {

// Examples are their own numbers.
struct Numbers : torch::data::Dataset<Numbers, int64_t> {
  explicit Numbers(size_t size) : count(size) {}
  int64_t get(size_t index) override { return static_cast<int64_t>(index); }
  std::optional<size_t> size() const override { return count; }
  size_t count;
};

std::vector<int64_t> take(Loader<Numbers>& loader, int64_t batches) {
  std::vector<int64_t> taken;
  for (auto batch = loader.begin(); batches-- > 0 && !(batch == loader.end()); ++batch) {
    taken.insert(taken.end(), batch->begin(), batch->end());
    if (batches == 0) break;
  }
  return taken;
}

// As Python's DistributedSampler deals them out: torch.randperm(7) of a generator with seed 3 + 1, one more of the first.
TEST(RankSampler, HasTheOrderOfPython) {
  const LoaderOptions options{.seed = 3};
  const auto generator = at::detail::createCPUGenerator(4);
  const at::Tensor order = at::randperm(7, generator, at::kLong);
  for (int rank = 0; rank < 2; ++rank) {
    RankSampler sampler(7, rank, 2, options, {.epoch = 1});
    const auto mine = *sampler.next(9);
    ASSERT_EQ(mine.size(), 4U);
    for (int64_t i = 0; i < 4; ++i)
      EXPECT_EQ(static_cast<int64_t>(mine[static_cast<size_t>(i)]), order[(2 * i + rank) % 7].item<int64_t>());
    EXPECT_FALSE(sampler.next(1));
  }
  EXPECT_EQ(RankSampler(7, 1, 2, {.drop_last = true}, {}).size(), 3);
}

// A run that is saved after some batches goes on, with as many ranks or others, with what was not given yet: each once.
TEST(Loader, GoesOnWhereItWasWithAnyNumberOfRanks) {
  constexpr int64_t kSize = 24;
  for (const size_t workers : {0, 2})
    for (const int ranks : {1, 2, 3})
      for (const int later : {1, 2, 4}) {
        std::vector<int64_t> given;
        c10::IValue state;
        for (int rank = 0; rank < ranks; ++rank) {
          Loader<Numbers> loader(Numbers(kSize), rank, ranks, 2, {.workers = workers});
          EXPECT_EQ(static_cast<int64_t>(take(loader, 100).size()), kSize / ranks);  // a whole pass before it
          for (const int64_t each : take(loader, 2))
            given.push_back(each);
          EXPECT_EQ(loader.epoch(), 1);
          state = loader.state();
        }
        for (int rank = 0; rank < later; ++rank) {
          Loader<Numbers> loader(Numbers(kSize), rank, later, 2, {.workers = workers});
          loader.load_state(state);
          loader.load_state(loader.state());  // of a save before the pass goes on
          for (const int64_t each : take(loader, 100))
            given.push_back(each);
          EXPECT_EQ(loader.epoch(), 2);
        }
        std::sort(given.begin(), given.end());
        const auto last = std::unique(given.begin(), given.end());
        EXPECT_EQ(last - given.begin(), kSize);  // all of them
        EXPECT_LT(given.end() - last, later);    // but those that fill the last round
      }
}

// In the loop of a pass, and after a move, too.
TEST(Loader, AnotherPositionIsWhereTheLoopGoesOn) {
  for (const size_t workers : {0, 2}) {
    Loader<Numbers> made(Numbers(12), 0, 1, 2, {.workers = workers});
    Loader<Numbers> straight(Numbers(12), 0, 1, 2, {.workers = workers});
    const std::vector<int64_t> first = take(straight, 100), second = take(straight, 100);
    std::vector<int64_t> given;
    std::optional<c10::IValue> saved;
    std::optional<Loader<Numbers>> moved;
    int batches = 0;
    for (const auto& batch : made) {
      given.insert(given.end(), batch.begin(), batch.end());
      if (++batches == 2) saved = made.state();
      if (batches == 3) moved.emplace(std::move(made));
      if (batches == 4) moved->load_state(*saved);
    }
    std::vector<int64_t> expected(first.begin(), first.begin() + 8);
    expected.insert(expected.end(), first.begin() + 4, first.end());
    EXPECT_EQ(given, expected);
    EXPECT_EQ(take(*moved, 100), second);
    EXPECT_EQ(moved->state().toGenericDict().at("epoch").toInt(), 2);
    EXPECT_HAS(testing::error_of<UsageError>([&] { made.begin(); }), "[data] this loader was moved from");
    EXPECT_HAS(testing::error_of<UsageError>([&] { static_cast<void>(made.state()); }), "was moved from");
  }
}

// With dropout; in the same program, and as in a new one.
TEST(Loader, ARunGoesOnAmidAPassBitForBit) {
  const Config config = Config::from_json(R"({"train_micro_batch_size_per_gpu": 2,
      "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "checkpoint": {"random_state": true}})");
  for (const size_t workers : {0, 1, 3}) {
    const io::TempFolder folder;
    const auto start = [&](uint64_t seed) {
      torch::manual_seed(seed);
      auto model = torch::nn::Sequential(torch::nn::Linear(2, 8), torch::nn::Dropout(0.5), torch::nn::Linear(8, 1));
      return std::pair(initialize(model, config), Loader<Numbers>(Numbers(24), 0, 1, 2, {.workers = workers}));
    };
    const auto train = [&](auto& engine, Loader<Numbers>& loader, int64_t until) {
      std::vector<double> losses;
      while (engine.global_steps() < until)
        for (const auto& batch : loader) {
          const at::Tensor loss = engine.forward(at::tensor(batch, at::kFloat).view({1, 2})).square().mean();
          engine.backward(loss);
          engine.step();
          losses.push_back(loss.item<double>());
          if (engine.global_steps() == 17) engine.save_checkpoint(folder.path(), {}, {{"loader", loader.state()}});
          if (engine.global_steps() == until) break;
        }
      return losses;
    };
    const auto go_on = [&](auto& engine, Loader<Numbers>& loader) {
      loader.load_state(engine.load_checkpoint(folder.path()).client.at("loader"));
      EXPECT_EQ(engine.global_steps(), 17);
      return train(engine, loader, 40);
    };
    auto [engine, loader] = start(1);
    std::vector<double> straight = train(engine, loader, 40);
    straight.erase(straight.begin(), straight.begin() + 17);
    EXPECT_EQ(go_on(engine, loader), straight) << workers;
    auto [other, others_loader] = start(2);
    EXPECT_EQ(go_on(other, others_loader), straight) << workers;
  }
}

// Examples are their numbers and what is drawn for each.
struct Noisy : torch::data::Dataset<Noisy, double> {
  enum class From { Default, Own, Batch };
  Noisy(From where, uint64_t seed) : from(where), own(at::detail::createCPUGenerator(seed)) {}
  double get(size_t index) override {
    const at::Generator generator = from == From::Batch ? batch_generator()
                                    : from == From::Own ? own
                                                        : at::detail::getDefaultCPUGenerator();
    return static_cast<double>(index) + at::rand({}, generator).item<double>();
  }
  std::optional<size_t> size() const override { return 24; }
  From from;
  at::Generator own;
};

// What a dataset draws, too: from torch's generator, from one of its own that the engine keeps, or for each batch, in workers as well.
TEST(Loader, WhatADatasetDrawsGoesOnAmidAPass) {
  using From = Noisy::From;
  struct Run {
    std::vector<std::vector<double>> batches;
    std::vector<double> losses;
    bool operator==(const Run&) const = default;
  };
  const Config config = Config::from_json(R"({"train_micro_batch_size_per_gpu": 2,
      "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "checkpoint": {"random_state": true}})");
  const auto run = [&](From from, size_t workers, uint64_t seed, const std::string& save, const std::string& load) {
    torch::manual_seed(seed);
    auto engine = initialize(
        torch::nn::Sequential(torch::nn::Linear(2, 8), torch::nn::Dropout(0.5), torch::nn::Linear(8, 1)), config);
    const Noisy dataset(from, seed);
    if (from == From::Own) engine.keep_generators({dataset.own});
    Loader<Noisy> loader(dataset, 0, 1, 2, {.workers = workers});
    if (!load.empty()) loader.load_state(engine.load_checkpoint(load).client.at("loader"));
    Run done;
    while (engine.global_steps() < 30)
      for (const std::vector<double>& batch : loader) {
        const at::Tensor loss = engine.forward(at::tensor(batch, at::kFloat).view({1, 2})).square().mean();
        engine.backward(loss);
        engine.step();
        if (engine.global_steps() > 17) {
          done.batches.push_back(batch);
          done.losses.push_back(loss.item<double>());
        }
        if (engine.global_steps() == 17 && !save.empty())
          engine.save_checkpoint(save, {}, {{"loader", loader.state()}});
        if (engine.global_steps() == 30) break;
      }
    return done;
  };
  std::optional<Run> of_batches;
  for (const From from : {From::Default, From::Own, From::Batch})
    for (const size_t workers : {0, 1, 3}) {
      if (workers > 0 && from != From::Batch) continue;
      const io::TempFolder folder;
      const Run straight = run(from, workers, 1, folder.path(), "");
      ASSERT_EQ(straight.batches.size(), 13U);
      EXPECT_EQ(run(from, workers, from == From::Batch ? 1 : 2, "", folder.path()), straight)
          << static_cast<int>(from) << ", " << workers << " workers";
      if (from != From::Batch) continue;
      EXPECT_EQ(of_batches.value_or(straight), straight) << "with other workers";
      of_batches = straight;
    }
}

TEST(Loader, GeneratorsThatDoNotFitAreRefused) {
  const Config config = Config::from_json(R"({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"},
      "checkpoint": {"random_state": true}})");
  const io::TempFolder folder;
  auto engine = initialize(torch::nn::Linear(2, 1), config);
  const auto generator = [] { return at::detail::createCPUGenerator(3); };
  engine.keep_generators({generator(), generator()});
  engine.save_checkpoint(folder.path());
  engine.keep_generators({generator()});
  EXPECT_HAS(testing::error_of<c10::ValueError>([&] { static_cast<void>(engine.load_checkpoint(folder.path())); }),
             "the states of 2 generators of the program's own, and keep_generators() was given 1 here");
  engine.keep_generators({});
  EXPECT_TRUE(engine.load_checkpoint(folder.path()));
  EXPECT_HAS(testing::error_of<c10::ValueError>([&] { engine.keep_generators({at::Generator()}); }), "no device");
  EXPECT_HAS(testing::error_of<UsageError>([] { batch_generator(); }), "whose batch an nn::Loader reads");
}

TEST(Loader, DropsTheLastBatchAsTheConfigurationSays) {
  for (const bool configured : {false, true})
    for (const std::optional<bool> given : {std::optional<bool>(), std::optional(false), std::optional(true)})
      testing::run_ranks(2, [&](int, const comm::GroupPtr& group) {
        Config config = Config::from_json(R"({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}})");
        config.dataloader_drop_last = configured;
        const auto engine = initialize(torch::nn::Linear(2, 1), config, comm::Mesh(group));
        Loader<Numbers> loader(Numbers(11), engine, {.drop_last = given});
        EXPECT_EQ(take(loader, 100).size(), given.value_or(configured) ? 4U : 6U);
      });
}

// Of an engine: ranks of one sequence or one cut model see the same; a checkpoint has the position, for other ranks too.
TEST(Loader, FollowsTheMeshOfAnEngineAndItsCheckpoints) {
  using Axes = testing::AxisSizes;
  constexpr int64_t kSize = 24;
  const auto config = Config::from_json(
      R"({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 1}})");
  const std::vector<Axes> meshes{{{comm::Axis::DpShard, 2}, {comm::Axis::Sp, 2}},
                                 {{comm::Axis::DpReplicate, 2}, {comm::Axis::DpShard, 2}, {comm::Axis::Tp, 2}},
                                 {{comm::Axis::DpShard, 3}}};
  for (const Axes& before : meshes)
    for (const Axes& after : meshes) {
      const io::TempFolder folder;
      std::mutex mutex;
      std::map<int, std::vector<int64_t>> first, second;  // by data-parallel rank
      const auto run = [&](const Axes& axes, auto& given, bool resumes) {
        testing::run_axes(axes, [&](int, const comm::Mesh& mesh) {
          auto engine = initialize(torch::nn::Linear(2, 2), config, mesh);
          Loader<Numbers> loader(Numbers(kSize), engine);
          if (resumes) loader.load_state(engine.load_checkpoint(folder.path()).client.at("loader"));
          const auto mine = take(loader, resumes ? 100 : 2);
          if (!resumes) engine.save_checkpoint(folder.path(), {}, {{"loader", loader.state()}});
          const std::scoped_lock lock(mutex);
          const auto [found, is_new] = given.try_emplace(engine.rank(), mine);
          EXPECT_EQ(found->second, mine) << "of the ranks that share a batch";
        });
      };
      run(before, first, false);
      run(after, second, true);
      std::multiset<int64_t> all;
      for (const auto* given : {&first, &second})
        for (const auto& [rank, mine] : *given)
          all.insert(mine.begin(), mine.end());
      EXPECT_EQ(std::set<int64_t>(all.begin(), all.end()).size(), static_cast<size_t>(kSize));
      EXPECT_LT(static_cast<int64_t>(all.size()) - kSize, static_cast<int64_t>(second.size()));
    }
}

TEST(Loader, RepeatsForAsLongAsItIsAsked) {
  Loader<Numbers> loader(Numbers(4), 0, 1, 2), again(Numbers(4), 0, 1, 2);
  RepeatingLoader<Numbers> endless(loader);
  for (int pass = 0; pass < 3; ++pass) {
    std::vector<int64_t> given;
    for (int batch = 0; batch < 2; ++batch) {
      const std::vector<int64_t> next = endless.next();
      given.insert(given.end(), next.begin(), next.end());
    }
    EXPECT_EQ(given, take(again, 100)) << pass;
    EXPECT_EQ(loader.epoch(), pass);
  }
  Loader<Numbers> ended(Numbers(4), 0, 1, 2);
  ended.load_state(to_value({0, 4, 4}));  // all of its pass was given
  RepeatingLoader<Numbers> on(ended);
  take(again = Loader<Numbers>(Numbers(4), 0, 1, 2), 100);
  EXPECT_EQ(on.next(), take(again, 1));
  Loader<Numbers> none(Numbers(1), 0, 1, 2, {.drop_last = true});
  EXPECT_HAS(testing::error_of([&] { RepeatingLoader<Numbers>(none).next(); }), "a pass gives no batch");
}

TEST(Loader, StatesThatAreNoneAreRefused) {
  Loader<Numbers> loader(Numbers(4), 0, 1, 2);
  EXPECT_HAS(testing::error_of<IoError>([&] { loader.load_state(c10::IValue("x")); }), "has no 'epoch' that can be");
  EXPECT_HAS(testing::error_of<c10::ValueError>([&] { Loader<Numbers>(Numbers(0), 0, 1, 2); }), "is empty");
  for (const int64_t batch : {0, -1})
    EXPECT_HAS(testing::error_of<c10::ValueError>([&] { Loader<Numbers>(Numbers(4), 0, 1, batch); }),
               c10::str("a batch must have 1 example at least, got ", batch));
  for (const int rank : {-1, 2})
    EXPECT_HAS(testing::error_of<c10::ValueError>([&] { Loader<Numbers>(Numbers(4), rank, 2, 1); }), "of 2 ranks");
  Loader<Numbers> larger(Numbers(9), 0, 1, 2);
  const auto ended = larger.state();
  loader.load_state(ended);
  EXPECT_EQ(take(loader, 100).size(), 4U);
  take(larger, 3);
  EXPECT_HAS(testing::error_of<c10::ValueError>([&] { loader.load_state(larger.state()); }),
             "a place in a dataset of 9 examples, and this one has 4");
  EXPECT_HAS(testing::error_of<c10::ValueError>([&] { loader.load_state(to_value({0, 6, 4})); }),
             "pass 0, example 6 of 4, which no loader has given");
  auto of_python = to_value({0, 2}).toGenericDict();  // of its loader of a stream
  of_python.insert("workers", int64_t{2});
  EXPECT_HAS(testing::error_of<c10::ValueError>([&] { loader.load_state(of_python); }),
             "a place in a stream (IterableDataset), and the dataset here is none");
  EXPECT_EQ(take(loader, 100).size(), 4U);
}

TEST(Loader, NoPlaceIsBehindTheEndOfADataset) {
  for (const int ranks : {1, 2, 5}) {
    Loader<Numbers> loader(Numbers(9), 0, ranks, 2), other(Numbers(9), 0, ranks, 2);
    for (const auto& batch : loader) {
      EXPECT_FALSE(batch.empty());
      EXPECT_LE(loader.state().toGenericDict().at("samples").toInt(), 9);
      other.load_state(loader.state());  // the last of them is in a round that is not full
    }
    EXPECT_TRUE(take(other, 100).empty());
  }
}

// An order of the program's own: from the last example of 20 to the first, over all ranks, then those of a larger pass.
at::Tensor backwards(int64_t epoch, at::Generator) {
  return at::arange(19 + 4 * epoch, -1, -1, at::kLong);
}

// Gone on with on other ranks, where it was in the order.
TEST(Loader, DealsAnOrderOfTheProgramsOwn) {
  for (const size_t workers : {0, 2})
    for (const int ranks : {1, 2, 3})
      for (const int later : {1, 2, 4}) {
        const LoaderOptions options{.workers = workers, .order = order_by(backwards)};
        std::map<int64_t, int64_t> given;  // of the second pass, by place: the example
        c10::IValue state;
        for (int rank = 0; rank < ranks; ++rank) {
          Loader<Numbers> loader(Numbers(24), rank, ranks, 2, options);
          EXPECT_EQ(static_cast<int64_t>(take(loader, 100).size()), (20 + ranks - 1) / ranks);
          int64_t place = rank;
          for (const int64_t each : take(loader, 2)) {
            given[place] = each;
            place += ranks;
          }
          state = loader.state();
        }
        EXPECT_EQ(state.toGenericDict().at("size").toInt(), 24);
        for (int rank = 0; rank < later; ++rank) {
          Loader<Numbers> loader(Numbers(24), rank, later, 2, options);
          loader.load_state(state);
          loader.load_state(loader.state());
          int64_t place = 4 * ranks + rank;
          for (const int64_t each : take(loader, 100)) {
            if (place < 24) given[place] = each;
            place += later;
          }
        }
        ASSERT_EQ(given.size(), 24U);
        for (const auto& [place, example] : given)
          EXPECT_EQ(example, 23 - place);
      }
}

// As many examples as a program asks for, some of them often: the same on all ranks, others in each pass.
TEST(Loader, AnOrderMayBeDrawn) {
  const at::Tensor weights = at::tensor({0.0, 1.0, 0.0, 8.0});
  const LoaderOptions options{
      .order = order_by([=](int64_t, at::Generator draws) { return at::multinomial(weights, 40, true, draws); }, 7)};
  std::vector<std::vector<int64_t>> of_ranks, again;
  for (int rank = 0; rank < 2; ++rank) {
    Loader<Numbers> loader(Numbers(4), rank, 2, 5, options);
    of_ranks.push_back(take(loader, 100));
    again.push_back(take(loader, 100));
    ASSERT_EQ(of_ranks[rank].size(), 20U);
  }
  std::vector<int64_t> all(40);
  for (size_t i = 0; i < 40; ++i)
    all[i] = of_ranks[i % 2][i / 2];
  const at::Tensor expected = at::multinomial(weights, 40, true, at::detail::createCPUGenerator(7));
  EXPECT_TRUE(at::equal(at::tensor(all, at::kLong), expected));
  EXPECT_GT(std::ranges::count(all, 3), std::ranges::count(all, 1));
  EXPECT_NE(again, of_ranks);
}

// Passes of an order that what the program does makes longer.
class Growing : public PassOrder {
 public:
  at::Tensor order(int64_t) override { return at::arange(length += 4, at::kLong); }
  c10::IValue state() const override { return length; }
  void load_state(const c10::IValue& state) override { length = state.toInt(); }
  int64_t length = 4;
};

TEST(Loader, TheStateOfAnOrderGoesOnWithItsPass) {
  const auto loader = [] { return Loader<Numbers>(Numbers(24), 0, 1, 2, {.order = std::make_shared<Growing>()}); };
  Loader<Numbers> straight = loader(), saved = loader(), resumed = loader(), between = loader();
  take(straight, 100);
  const std::vector<int64_t> second = take(straight, 100), third = take(straight, 100);
  EXPECT_EQ(second.size(), 12U);
  EXPECT_EQ(third.size(), 16U);
  take(saved, 100);
  take(saved, 2);
  resumed.load_state(saved.state());
  EXPECT_EQ(take(resumed, 100), std::vector<int64_t>(second.begin() + 4, second.end()));
  between.load_state(resumed.state());  // after a pass
  EXPECT_EQ(take(resumed, 100), third);
  EXPECT_EQ(take(between, 100), third);
}

TEST(Loader, OrdersThatAreNoneAreRefused) {
  const auto error = [](const OrderFunction& order) {
    return testing::error_of<c10::ValueError>(
        [&] { Loader<Numbers>(Numbers(4), 0, 1, 2, {.order = order_by(order)}).begin(); });
  };
  EXPECT_HAS(error([](int64_t, at::Generator) { return at::tensor({0, 4}, at::kLong); }),
             "the order of pass 0 has example 4, and the dataset has 4, numbered from 0");
  EXPECT_HAS(error([](int64_t, at::Generator) { return at::tensor({0, -1}, at::kInt); }), "has example -1");
  EXPECT_HAS(error([](int64_t, at::Generator) { return at::ones({2}); }),
             "one dim of whole numbers, got 1 dims of Float");
  EXPECT_HAS(error([](int64_t, at::Generator) { return at::Tensor(); }), "got none");
  EXPECT_HAS(error([](int64_t, at::Generator) { return at::empty({0}, at::kLong); }), "is empty");
  EXPECT_HAS(testing::error_of<c10::ValueError>([] { order_by({}); }), "the function is empty");
  Loader<Numbers> growing(Numbers(24), 0, 1, 2, {.order = std::make_shared<Growing>()});
  take(growing, 1);
  Loader<Numbers> without(Numbers(24), 0, 1, 2);
  EXPECT_HAS(testing::error_of<c10::ValueError>([&] { without.load_state(growing.state()); }),
             "with an order of the program's own: give this one LoaderOptions::order");
  Loader<Numbers> other(Numbers(24), 0, 1, 2, {.order = order_by(backwards)});
  other.load_state(growing.state());
  EXPECT_HAS(testing::error_of<c10::ValueError>([&] { other.begin(); }),
             "a place in a pass of 8 examples, and the order here gives 20 of pass 0");
}

// Of an engine: every rank would go its own way.
TEST(Loader, AnOrderIsTheSameOnAllRanks) {
  for (const bool alike : {true, false})
    testing::run_axes({{comm::Axis::DpShard, 2}, {comm::Axis::Sp, 2}}, [&](int rank, const comm::Mesh& mesh) {
      const auto config = Config::from_json(R"({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}})");
      const auto engine = initialize(torch::nn::Linear(2, 1), config, mesh);
      const uint64_t seed = alike || rank < 3 ? 1 : 2;
      Loader<Numbers> loader(
          Numbers(9), engine,
          {.order = order_by([](int64_t, at::Generator draws) { return at::randperm(9, draws, at::kLong); }, seed)});
      if (alike) {
        EXPECT_EQ(take(loader, 100).size(), 5U);
        return;
      }
      const std::string error = testing::error_of<c10::ValueError>([&] { loader.begin(); });
      EXPECT_HAS(error, "the order of the examples is not the same on all ranks: rank 0 has 9 examples from ");
      EXPECT_HAS(error, ", rank 3 has 9 examples from ");
    });
}

// ---- streams

// Numbers from `first` on, in steps.
struct Counting : torch::data::datasets::StreamDataset<Counting, std::vector<int64_t>> {
  Counting(std::optional<size_t> size, int64_t first = 0, int64_t step = 1) : count(size), next(first), step(step) {}
  std::vector<int64_t> get_batch(size_t size) override {
    std::vector<int64_t> batch;
    for (; batch.size() < size; next += step)
      batch.push_back(next);
    return batch;
  }
  std::optional<size_t> size() const override { return count; }
  std::optional<size_t> count;
  int64_t next, step;
};

// Ends by itself.
struct Ending : torch::data::datasets::StatefulDataset<Ending, std::vector<int64_t>, size_t> {
  std::optional<std::vector<int64_t>> get_batch(size_t size) override {
    if (next >= 9) return {};
    std::vector<int64_t> batch;
    for (; batch.size() < size && next < 9; ++next)
      batch.push_back(next);
    return batch;
  }
  void reset() override { next = 0; }
  std::optional<size_t> size() const override { return {}; }
  void save(torch::serialize::OutputArchive&) const override {}
  void load(torch::serialize::InputArchive&) override {}
  int64_t next = 5;
};

template <class Dataset>
std::vector<int64_t> taken(Loader<Dataset>& loader, int64_t batches) {
  std::vector<int64_t> all;
  for (auto batch = loader.begin(); batches-- > 0 && !(batch == loader.end()); ++batch) {
    all.insert(all.end(), batch->begin(), batch->end());
    if (batches == 0) break;
  }
  return all;
}

TEST(Loader, ReadsAStreamAndGoesOnInIt) {
  for (const size_t workers : {0, 1})
    for (int rank = 0; rank < 2; ++rank) {  // each its own part
      const auto loader = [&](std::optional<size_t> size) {
        return Loader<Counting>(Counting(size, rank, 2), rank, 2, 3, {.workers = workers});
      };
      auto straight = loader(10);
      const std::vector<int64_t> pass = taken(straight, 100);
      ASSERT_EQ(pass.size(), 10U);
      EXPECT_EQ(pass[9], rank + 18);
      EXPECT_EQ(taken(straight, 100), pass) << "a pass begins anew";
      auto saved = loader(10), resumed = loader(10), endless = loader({});
      EXPECT_EQ(taken(saved, 2).size(), 6U);
      EXPECT_EQ(saved.state().toGenericDict().at("samples").toInt(), 12);
      EXPECT_EQ(saved.state().toGenericDict().at("workers").toInt(), 0);
      resumed.load_state(saved.state());
      resumed.load_state(resumed.state());
      EXPECT_EQ(taken(resumed, 100), std::vector<int64_t>(pass.begin() + 6, pass.end()));
      EXPECT_EQ(resumed.epoch(), 1);
      EXPECT_EQ(taken(endless, 50).size(), 150U);
    }
}

TEST(Loader, AStreamEndsWhereItSaysSo) {
  for (const size_t workers : {0, 1}) {
    Loader<Ending> loader(Ending(), 0, 1, 4, {.workers = workers}), resumed(Ending(), 0, 1, 4, {.workers = workers});
    for (int pass = 0; pass < 2; ++pass)
      EXPECT_EQ(taken(loader, 100), (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8})) << "reset, too";
    taken(loader, 1);
    resumed.load_state(loader.state());
    EXPECT_EQ(taken(resumed, 100), (std::vector<int64_t>{4, 5, 6, 7, 8}));
    const auto shared = torch::data::datasets::make_shared_dataset<Ending>();
    Loader<std::decay_t<decltype(shared)>> of_shared(shared, 0, 1, 4, {.workers = workers});
    EXPECT_EQ(taken(of_shared, 100).size(), 9U);
  }
  RepeatingLoader endless = [] {
    static Loader<Ending> loader(Ending(), 0, 1, 9);
    return RepeatingLoader<Ending>(loader);
  }();
  EXPECT_EQ(endless.next(), endless.next());
}

// What is left out leaves torch's generator where it was, and draws of batch_generator() are those of the batch.
struct Drawing : torch::data::datasets::StreamDataset<Drawing, std::vector<double>> {
  std::vector<double> get_batch(size_t) override {
    at::rand({});
    return {at::rand({}, batch_generator()).item<double>()};
  }
  std::optional<size_t> size() const override { return 5; }
};

TEST(Loader, AStreamThatGoesOnDrawsForItsOwnBatches) {
  Loader<Drawing> straight(Drawing(), 0, 1, 1), resumed(Drawing(), 0, 1, 1);
  std::vector<double> all, rest;
  c10::IValue state;
  at::Tensor before;
  for (const auto& batch : straight) {
    all.push_back(batch[0]);
    if (all.size() != 3) continue;
    state = straight.state();
    before = at::detail::getDefaultCPUGenerator().get_state();
  }
  const at::Tensor after = at::detail::getDefaultCPUGenerator().get_state();
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  generator.set_state(before);
  resumed.load_state(state);
  for (const auto& batch : resumed)
    rest.push_back(batch[0]);
  EXPECT_EQ(rest, std::vector<double>(all.begin() + 3, all.end()));
  EXPECT_TRUE(at::equal(generator.get_state(), after));
}

TEST(Loader, StreamsThatCannotBeReadAreRefused) {
  const auto error = [](const LoaderOptions& options) {
    return testing::error_of<c10::ValueError>([&] { Loader<Counting>(Counting(4), 0, 1, 2, options); });
  };
  EXPECT_HAS(error({.order = order_by(backwards)}), "the examples of a stream have no numbers");
  EXPECT_HAS(error({.workers = 2}), "a stream is read by one worker at most, got 2");
  Loader<Counting> loader(Counting(8), 0, 1, 2);
  auto of_python = to_value({.epoch = 0, .samples = 2, .workers = 2});
  EXPECT_HAS(testing::error_of<c10::ValueError>([&] { loader.load_state(of_python); }),
             "a place in a stream that 2 workers shared, and here num_workers is 0");
  taken(loader, 1);
  Loader<Numbers> indexed(Numbers(8), 0, 1, 2);
  EXPECT_HAS(testing::error_of<c10::ValueError>([&] { indexed.load_state(loader.state()); }),
             "a place in a stream (IterableDataset), and the dataset here is none");
}

}  // namespace
}  // namespace tessera::nn
