// Errors of one stage that end the construction, or the batch, on all; what a pipeline is not built of.
#include <gtest/gtest.h>

#include <chrono>
#include <tuple>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/nn/pipeline.h"
#include "tests/nn/stages.h"
#include "tests/support/errors.h"

namespace tessera::nn {

using testing::Case;
using testing::data_of;
using testing::error_of;
using testing::layers;

namespace {

// The errors of all ranks, in rank order, of body(parts).
std::vector<std::string> errors_of(const Case& c, const std::function<void(const comm::Parts&)>& body) {
  std::vector<std::string> errors(static_cast<size_t>(c.stages) * c.ranks);
  testing::run_stages(
      c, [&](const comm::Parts& parts) { errors[parts.everyone->rank()] = error_of([&] { body(parts); }); },
      std::chrono::minutes(2));
  return errors;
}

}  // namespace

// On a stage in the middle, in its second forward; data-parallel ranks beside it are inside a reduction.
TEST(Pipeline, AnErrorOfOneStageEndsTheBatchOnAll) {
  const auto start = std::chrono::steady_clock::now();
  for (const Case& c : {Case{.stages = 4}, Case{.stages = 2, .ranks = 2, .zero = 2}}) {
    const int bad = c.ranks;  // the first rank of stage 1
    const auto errors = errors_of(c, [&](const comm::Parts& parts) {
      Layers list = layers();
      if (parts.everyone->rank() == bad) {
        auto& call = list[c.stages == 4 ? 3 : 7].call;
        call = [call, calls = 0](const Tensors& x) mutable {
          TESSERA_CHECK_VALUE(++calls < 2, "layer", "no luck");
          return call(x);
        };
      }
      Pipeline engine(list, c.config(), parts, c.options());
      std::string first;
      EXPECT_HAS(first = error_of([&] { engine.train_batch(data_of(c, parts, 0)); }), "no luck");
      EXPECT_HAS(error_of([&] { engine.train_batch(data_of(c, parts, 1)); }), "a batch has failed before");
      EXPECT_HAS(error_of([&] { engine.save_checkpoint("nowhere"); }), "save_checkpoint: a batch has failed before");
      EXPECT_HAS(error_of([&] { std::ignore = engine.load_checkpoint("nowhere"); }),
                 "load_checkpoint: a batch has failed before");
      TESSERA_CHECK(false, "test", first);
    });
    for (int rank = 0; rank < static_cast<int>(errors.size()); ++rank) {
      const std::string named = c10::str("stage 1 (rank ", bad, ") failed in this batch: [layer] no luck");
      EXPECT_EQ(errors[rank].find(named) != std::string::npos, rank != bad) << rank << ": " << errors[rank];
    }
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

// Messages of a batch that has failed are still under way between the same parts, where others are alive, too.
TEST(Pipeline, AnEngineTrainsOverThePartsOfOneThatFailedAndOfOneThatLives) {
  const std::vector<Case> cases{
      {.stages = 2},
      {.stages = 4, .schedule = "gpipe"},
      {.stages = 2, .chunks = 2, .schedule = "interleaved"},
      {.stages = 3, .list = [](const comm::Mesh&) { return testing::tied_layers(); }},
  };
  for (const Case& c : cases) {
    const auto errors = errors_of(c, [&](const comm::Parts& parts) {
      const auto layers_of = [&] { return c.list(parts.mesh); };
      PipelineOptions bad = c.options();
      bad.loss = [calls = 0](const Tensors& outputs, const Tensors& labels) mutable {
        if (++calls == 2) throw std::runtime_error("no luck");
        return testing::loss_of(outputs, labels);
      };
      Pipeline before(layers_of(), c.config(), parts, c.options());
      const double expected = before.train_batch(data_of(c, parts, 0));
      before.train_batch(data_of(c, parts, 1));
      Pipeline failed(layers_of(), c.config(), parts, bad);
      EXPECT_HAS(error_of([&] { failed.train_batch(data_of(c, parts, 0)); }), "no luck");
      Pipeline after(layers_of(), c.config(), parts, c.options());
      EXPECT_EQ(after.train_batch(data_of(c, parts, 0)), expected);
      EXPECT_GT(before.train_batch(data_of(c, parts, 2)), 0);
      after.train_batch(data_of(c, parts, 1));
      after.train_batch(data_of(c, parts, 2));
      EXPECT_EQ(after.core().global_grad_norm(), before.core().global_grad_norm());
    });
    for (const std::string& error : errors)
      EXPECT_EQ(error, "") << c.name();
  }
}

// The ranks of a stage may have waited for each other: their groups have ended with the batch.
TEST(Pipeline, AnEngineOverThePartsOfAFailedOneWithSeveralRanksAStageSaysWhatToDo) {
  const Case c{.stages = 2, .ranks = 2, .zero = 2};
  const auto errors = errors_of(c, [&](const comm::Parts& parts) {
    PipelineOptions bad = c.options();
    bad.loss = [](const Tensors&, const Tensors&) -> at::Tensor { throw std::runtime_error("no luck"); };
    Pipeline failed(layers(), c.config(), parts, bad);
    EXPECT_HAS(error_of([&] { failed.train_batch(data_of(c, parts, 0)); }), "no luck");
    Pipeline after(layers(), c.config(), parts, c.options());
  });
  for (const std::string& error : errors) {
    EXPECT_HAS(error, "the groups of this stage's ranks have ended (");
    EXPECT_HAS(error, "a stage of several ranks needs them made anew, as nn::environment_stages() gives them");
    EXPECT_HAS(error, "failed in this batch: no luck");
  }
}

TEST(Pipeline, WhatOneStageCannotBuildIsAnErrorOnAll) {
  struct Row {
    const char* words;
    std::function<void(Case&, Layers&)> spoil;
    std::string more = "";  // of the configuration
  };
  const std::vector<Row> rows{
      {"[pipeline] managed_gradient_accumulation must be true", {}, R"("managed_gradient_accumulation": false,)"},
      {"[pipeline] zero_optimization.stage 3 is not served", [](Case& c, Layers&) { c.zero = 3; }},
      {"several only beside another stage; got 0 chunks with 2 stages", [](Case& c, Layers&) { c.chunks = 0; }},
      {"[layer] no memory",
       [](Case&, Layers& list) {
         for (int number = 0; number < list.size(); ++number)
           list[number].build = [](nn::Layer&) { TESSERA_CHECK_VALUE(false, "layer", "no memory"); };
       }},
      {"(LambdaLR does in Python only)", {}, R"("scheduler": {"type": "LambdaLR"},)"},
  };
  for (const Row& row : rows) {
    const auto start = std::chrono::steady_clock::now();
    const Case c;
    const auto errors = errors_of(c, [&](const comm::Parts& parts) {
      Case mine = c;
      Layers list = layers();
      if (parts.part == 1) {
        mine.more = row.more;
        if (row.spoil) row.spoil(mine, list);
      }
      Pipeline(list, mine.config(), parts, mine.options());
    });
    EXPECT_HAS(errors[1], row.words);
    EXPECT_HAS(errors[0], "[pipeline] stage 1 (rank 1) failed while it was built: ");
    EXPECT_HAS(errors[0], row.words);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20)) << row.words;
  }
}

// While copies of tied weights are compared, and between a batch and its step: a stage whose messages cannot leave, each in turn.
TEST(Pipeline, AnErrorAboutTiedWeightsIsOneOfAllStages) {
  struct Row {
    int stages = 3, ranks = 1, bad = 0;  // which rank fails
    bool lost = false, built = false;    // it has lost its connections; in the batch, not in the construction
  };
  std::vector<Row> rows;
  for (const bool lost : {false, true}) {
    for (const bool built : {false, true}) {
      for (const int bad : {0, 2})
        rows.push_back({3, 1, bad, lost, built});
      rows.push_back({2, 2, 3, lost, built});
    }
  }
  for (const Row& row : rows) {
    const std::string where = c10::str("rank ", row.bad, row.lost ? ", lost" : "", row.built ? ", built" : "");
    const auto start = std::chrono::steady_clock::now();
    const Case c{.stages = row.stages, .ranks = row.ranks, .zero = row.ranks};
    const auto errors = errors_of(c, [&](comm::Parts parts) {
      bool armed = !row.built;
      parts.p2p = std::make_shared<testing::Watched>(
          parts.p2p, [&, mine = parts.everyone->rank() == row.bad](const at::Tensor&, int tag) {
            if (!mine || tag < 1 << 15 || !std::exchange(armed, false)) return;
            TESSERA_CHECK_DIST(!row.lost, "test", "no luck");
            TESSERA_CHECK_VALUE(false, "test", "no luck");
          });
      Pipeline engine(testing::tied_layers(), c.config(), parts, c.options());
      armed = true;
      const std::string first = error_of([&] { engine.train_batch(data_of(c, parts, 0)); });
      EXPECT_HAS(error_of([&] { engine.train_batch(data_of(c, parts, 1)); }), "a batch has failed before");
      TESSERA_CHECK(false, "test", first);
    });
    for (int rank = 0; rank < static_cast<int>(errors.size()); ++rank) {
      EXPECT_HAS(errors[rank], "no luck") << where;
      const std::string named = c10::str(" (rank ", row.bad, row.built ? ") failed in this batch: " : ") failed while");
      EXPECT_TRUE(rank == row.bad || row.lost || errors[rank].find(named) != std::string::npos)
          << where << ": " << errors[rank];
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20)) << where;
  }
}

// The ranks of one stage lose each other while they build their engine; the other stage waits for word of it.
TEST(Pipeline, AConnectionThatOneStageLosesWhileItIsBuiltIsAnErrorOnAll) {
  const auto start = std::chrono::steady_clock::now();
  const Case c{.ranks = 2, .zero = 1};
  const auto errors = errors_of(c, [&](const comm::Parts& parts) {
    if (parts.part == 1) parts.mesh.group(comm::kBatchAxes)->abort("a cable is cut");
    Pipeline(layers(), c.config(), parts, c.options());
  });
  for (int rank = 0; rank < 4; ++rank)
    EXPECT_HAS(errors[rank], "a cable is cut");
  for (const int rank : {0, 1})
    EXPECT_HAS(errors[rank], "failed while it was built");
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

TEST(Pipeline, AGraphThatIsFreedTooEarlyIsNamed) {
  const Case c;
  const auto errors = errors_of(c, [&](const comm::Parts& parts) {
    Layers list = layers();
    auto& call = list[7].call;
    call = [call, calls = 0](const Tensors& x) mutable {
      Tensors made = call(x);
      if (++calls == 2) made[0].sum().backward();
      return made;
    };
    Pipeline(list, c.config(), parts, c.options()).train_batch(data_of(c, parts, 0));
  });
  for (const std::string& error : errors)
    EXPECT_HAS(error, "stage 1: the graph of micro-batch 1 was freed before its backward");
}

TEST(Pipeline, DataThatCannotBeReadEndsTheBatchBeforeAnythingIsComputed) {
  const Case c{.stages = 3};
  testing::run_stages(c, [&](const comm::Parts& parts) {
    Pipeline engine(layers(), c.config(), parts, c.options());
    const auto text = error_of([&] {
      engine.train_batch([&](int64_t micro) {
        TESSERA_CHECK_VALUE(micro < 2 || !engine.is_first_stage(), "data", "the end");
        return testing::batch_of(0, 0, micro);
      });
    });
    EXPECT_HAS(text,
               engine.is_first_stage() ? "[data] the end" : "stage 0 (rank 0) could not read its data: [data] the end");
    EXPECT_HAS(error_of([&] { engine.eval_batch(data_of(c, parts, 0), engine.is_last_stage() ? 3 : 2); }),
               "micro-batches for this batch");
    EXPECT_GT(engine.train_batch(data_of(c, parts, 0)), 0) << "the engine goes on";
  });
}

TEST(Pipeline, AParameterThatIsReplacedOnOneStageIsRefusedOnAll) {
  const Case c{.stages = 3};
  testing::run_stages(c, [&](const comm::Parts& parts) {
    Pipeline engine(layers(), c.config(), parts, c.options());
    torch::nn::LinearImpl* linear = nullptr;
    for (const auto& module : engine.module().modules(/*include_self=*/false))
      if (auto* found = module->as<torch::nn::LinearImpl>()) linear = found;
    const at::Tensor old = linear->bias;
    if (engine.is_last_stage()) linear->bias = at::zeros_like(old).requires_grad_();
    EXPECT_HAS(error_of([&] { engine.train_batch(data_of(c, parts, 0)); }),
               engine.is_last_stage() ? "bias: the layer's member" : "cannot step, see the error there");
    linear->bias = old;
    EXPECT_GT(engine.train_batch(data_of(c, parts, 1)), 0) << "the engine goes on";
    Pipeline fresh(layers(), c.config(), parts, c.options());
    fresh.train_batch(data_of(c, parts, 1));
    EXPECT_EQ(engine.core().global_grad_norm(), fresh.core().global_grad_norm()) << "without what came before";
  });
}

TEST(Pipeline, NamesWhatItCannotDo) {
  const auto expect = [](Case c, const std::string& text, const std::function<void(int, Case&, Layers&)>& change) {
    for (const std::string& error : errors_of(c, [&](const comm::Parts& parts) {
           Layers list = layers();
           Case mine = c;
           change(parts.part, mine, list);
           Pipeline(list, mine.config(), parts, mine.options()).train_batch(data_of(c, parts, 0));
         }))
      EXPECT_HAS(error, text);
  };
  expect({.zero = 3}, "stage 3 is not served inside pipeline stages", [](int, Case&, Layers&) {});
  expect({}, "gradient_accumulation_steps is", [](int part, Case& c, Layers&) { c.micro_batches += part; });
  expect({}, "the number of layers is", [](int part, Case&, Layers& list) {
    if (part == 1) list.add([](const at::Tensor& x) { return x; });
  });
  expect({.chunks = 2, .micro_batches = 3}, "must be a multiple of 2", [](int, Case&, Layers&) {});
  expect({.schedule = "interleaved"}, "num_chunks", [](int, Case&, Layers&) {});
  expect({.stages = 1, .chunks = 2}, "several only beside another stage; got 2 chunks with 1 stages",
         [](int, Case&, Layers&) {});
  // Copies of a tied layer with another number, other shapes or dtypes of parameters.
  using Make = std::function<torch::nn::Linear()>;
  const std::vector<std::pair<Make, std::string>> others{
      {[] { return torch::nn::Linear(torch::nn::LinearOptions(6, 8).bias(false)); }, "has weight [8, 6] Float"},
      {[] { return torch::nn::Linear(1, 8); }, "has weight [8, 1] Float, bias [8] Float"},
      {[] {
         torch::nn::Linear made(6, 8);
         made->to(at::kDouble);
         return made;
       },
       "has weight [8, 6] Double, bias [8] Double"}};
  for (const auto& [make, said] : others) {
    expect({.stages = 3},
           "tied layers 'ends' must have the same parameters on all stages: stage 0 (rank 0) has weight [8, 6] Float, "
           "bias [8] Float; stage 2 (rank 2) " +
               said,
           [make](int, Case&, Layers& list) {
             list = Layers();
             list.tied("ends", [] { return torch::nn::Linear(6, 8); });
             list.add(testing::Block(testing::kWidth)).add(testing::Block(testing::kWidth));
             list.tied("ends", make, [](torch::nn::Linear&, const at::Tensor& x) { return x.narrow(-1, 0, 3); });
           });
  }
  const std::string low = R"("bf16": {"enabled": true, "bf16_master_weights_and_grads": true,
                                      "bf16_optimizer_states": true},)";
  expect({.zero = 1, .more = low}, "updates round at random",
         [](int, Case&, Layers& list) { list = testing::tied_layers(); });
  expect({}, "tied layers 'ends' have 2 and 0 trained parameters on two stages", [](int part, Case&, Layers& list) {
    const auto make = [part] {
      torch::nn::Linear made(6, testing::kWidth);
      for (at::Tensor& param : made->parameters())
        param.requires_grad_(part == 0);
      return made;
    };
    list = Layers();
    list.tied("ends", make).add(testing::Block(testing::kWidth)).add(testing::Block(testing::kWidth));
    list.tied("ends", make, [](torch::nn::Linear&, const at::Tensor& x) { return x.narrow(-1, 0, 3); });
  });
}

TEST(Pipeline, GroupsAreThoseOfAllStages) {
  const auto vectors = [](const std::string&, const at::Tensor& param) { return param.dim() < 2; };
  const auto nothing = [](const std::string&, const at::Tensor&) { return false; };
  const auto here = [](const std::string& name, const at::Tensor&) { return name.starts_with("layers.0."); };
  struct Row {
    const char* text;
    std::function<void(int part, PipelineOptions&)> change;
    const char* optimizer = "AdamW";
  };
  const auto groups = [](std::function<bool(const std::string&, const at::Tensor&)> takes, double decay) {
    return std::vector<ParamGroup>{
        {.takes = std::move(takes), .set = [decay](optim::GroupOptions& group) { group.weight_decay = decay; }}};
  };
  const auto own = [](double momentum) {
    return [momentum](const StageLayers& stage) {
      return std::make_shared<torch::optim::SGD>(stage.parameters(), torch::optim::SGDOptions(0.05).momentum(momentum));
    };
  };
  const std::vector<Row> rows{
      {"", [&](int, PipelineOptions& options) { options.groups = groups(here, 0); }},
      {"param group 0 has weight_decay 0 on stage 0 (rank 0) and 0.5 on stage 1 (rank 1)",
       [&](int part, PipelineOptions& options) { options.groups = groups(vectors, 0.5 * part); }},
      {"the optimizer has 2 param groups on stage 0 (rank 0) and 1 on stage 1 (rank 1)",
       [&](int part, PipelineOptions& options) {
         if (part == 0) options.groups = groups(vectors, 0);
       }},
      {"param group 0 takes no parameter of any stage",
       [&](int, PipelineOptions& options) { options.groups = groups(nothing, 0); }},
      {"param group 0 takes no parameter of any stage",
       [&](int, PipelineOptions& options) { options.groups = groups(nothing, 0); }, "Muon"},
      {"momentum 0.5", [&](int part, PipelineOptions& options) { options.optimizer = own(part == 0 ? 0.5 : 0.75); }}};
  for (const Row& row : rows) {
    const Case c{.optimizer = row.optimizer};
    for (const std::string& error : errors_of(c, [&](const comm::Parts& parts) {
           PipelineOptions options = c.options();
           row.change(parts.part, options);
           Pipeline(layers(), c.config(), parts, options).train_batch(data_of(c, parts, 0));
         })) {
      EXPECT_HAS(error, row.text);
      EXPECT_EQ(error.empty(), *row.text == 0) << error;
    }
  }
}

}  // namespace tessera::nn
