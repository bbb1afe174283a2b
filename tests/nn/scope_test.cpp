// Partitioned parameters in C++: Hooked modules, parameters below none, regions.
#include "tessera/nn/scope.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/nn.h>

#include <algorithm>
#include <functional>
#include <set>
#include <tuple>

#include "tessera/nn/engine.h"
#include "tessera/nn/hooked.h"
#include "tessera/nn/recompute.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera::nn {
namespace {

using testing::error_of;

struct BlockImpl : Hooked<BlockImpl, at::Tensor(at::Tensor)> {
  BlockImpl() { linear = register_module("linear", torch::nn::Linear(6, 6)); }
  at::Tensor forward_impl(at::Tensor x) {
    if (fail) throw std::runtime_error("no luck");
    return x + torch::tanh(linear(x));
  }
  torch::nn::Linear linear{nullptr};
  bool fail = false;
};
TORCH_MODULE(Block);

struct BlockNet : torch::nn::Module {
  BlockNet() {
    blocks = register_module("blocks", torch::nn::Sequential(Block(), Block(), Block()));
    head = register_module("head", torch::nn::Linear(6, 2));
    // Of its own: ranks that are threads share the default generator.
    auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
    const torch::NoGradGuard no_grad;
    for (at::Tensor& p : parameters())
      p.uniform_(-0.4, 0.4, generator);
  }
  at::Tensor forward(const at::Tensor& x) { return head(blocks->forward(x)).square().mean(); }
  torch::nn::Sequential blocks{nullptr};
  torch::nn::Linear head{nullptr};
};

Config config(int ranks) {
  return Config::from_json(R"({"gradient_clipping": 0, "train_micro_batch_size_per_gpu": 4, "train_batch_size": )" +
                           std::to_string(4 * ranks) + R"(, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "tessera": {"min_unit_elements": 1},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}})");
}

int gathered(engine::Engine& engine) {
  int count = 0;
  for (size_t i = 0; i < engine.params().size(); ++i)
    count += engine.regions().is_gathered(static_cast<int>(i)) ? 1 : 0;
  return count;
}

// As engines do beside it.
template <class Net>
void train_plain(Net& plain, const at::Tensor& x) {
  for (int step = 0; step < 3; ++step) {
    plain.zero_grad();
    plain.forward(x).backward();
    const torch::NoGradGuard no_grad;
    std::set<const void*> seen;  // a tied one is there twice
    for (at::Tensor& p : plain.parameters())
      if (seen.insert(p.unsafeGetTensorImpl()).second) p.sub_(p.grad(), 0.1);
  }
}

TEST(Scope, HookedBlocksAreGatheredOneAtATimeAndTrainAsPlainPyTorch) {
  const at::Tensor x = torch::randn({4, 6});
  BlockNet plain;
  train_plain(plain, x);
  testing::run_ranks(2, [&](int, const comm::GroupPtr& group) {
    auto net = std::make_shared<BlockNet>();
    auto engine = initialize(net, config(2), comm::Mesh(group));
    EXPECT_EQ(gathered(engine.core()), 0);
    group->reset_stats();
    for (int step = 0; step < 3; ++step) {
      engine.forward(x).backward();
      EXPECT_EQ(gathered(engine.core()), 0);
      EXPECT_TRUE(engine.step());
    }
    EXPECT_GE(group->stats().all_gather.calls, 3 * 4);
    GatheredParameters region(engine.core(), net->parameters());
    const auto mine = net->parameters(), expected = plain.parameters();
    for (size_t i = 0; i < mine.size(); ++i)
      EXPECT_TRUE(at::allclose(mine[i], expected[i], 1e-5, 1e-6)) << i;
    region.close();
    EXPECT_EQ(gathered(engine.core()), 0);
  });
}

// Knows nothing of Tessera.
struct PlainBlockImpl : torch::nn::Module {
  PlainBlockImpl() { linear = register_module("linear", torch::nn::Linear(6, 6)); }
  at::Tensor forward(const at::Tensor& x) {
    if (seen) seen();
    return x + torch::tanh(linear(x));
  }
  torch::nn::Linear linear{nullptr};
  std::function<void()> seen;
};
TORCH_MODULE(PlainBlock);

torch::nn::Sequential two_layers() {
  return torch::nn::Sequential(torch::nn::Linear(6, 6), torch::nn::Tanh());
}
void fill(torch::nn::Module& module) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  const torch::NoGradGuard no_grad;
  for (at::Tensor& p : module.parameters())
    p.uniform_(-0.4, 0.4, generator);
}

// Units in every container of torch, and as members, beside a layer that is none.
struct UnitNet : torch::nn::Module {
  UnitNet() {
    blocks = register_module("blocks", torch::nn::Sequential(unit(PlainBlock()), unit(PlainBlock())));
    list = register_module("list", torch::nn::ModuleList(unit(PlainBlock())));
    any = torch::nn::AnyModule(unit(torch::nn::Linear(6, 6)));
    register_module("any", any.ptr());
    up = register_module("up", unit(torch::nn::Linear(6, 6)));
    pair = register_module("pair", unit_as<at::Tensor(at::Tensor)>(two_layers()));
    head = register_module("head", torch::nn::Linear(6, 2));
    fill(*this);
  }
  at::Tensor forward(at::Tensor x) {
    x = any.forward(blocks->forward(x));
    return head(pair(up(list->ptr<Unit<PlainBlockImpl>>(0)->forward(x)))).square().mean();
  }
  torch::nn::Sequential blocks{nullptr};
  torch::nn::ModuleList list{nullptr};
  torch::nn::AnyModule any;
  UnitOf<torch::nn::Linear> up{nullptr};
  torch::nn::ModuleHolder<Unit<torch::nn::SequentialImpl, at::Tensor(at::Tensor)>> pair{nullptr};
  torch::nn::Linear head{nullptr};
};

// The same of torch alone.
struct NoUnitNet : torch::nn::Module {
  NoUnitNet() {
    blocks = register_module("blocks", torch::nn::Sequential(PlainBlock(), PlainBlock()));
    list = register_module("list", torch::nn::ModuleList(PlainBlock()));
    any = register_module("any", torch::nn::Linear(6, 6));
    up = register_module("up", torch::nn::Linear(6, 6));
    pair = register_module("pair", two_layers());
    head = register_module("head", torch::nn::Linear(6, 2));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = list->ptr<PlainBlockImpl>(0)->forward(any(blocks->forward(x)));
    return head(pair->forward(up(y))).square().mean();
  }
  torch::nn::Sequential blocks{nullptr}, pair{nullptr};
  torch::nn::ModuleList list{nullptr};
  torch::nn::Linear any{nullptr}, up{nullptr}, head{nullptr};
};

TEST(Scope, UnitsOfPlainModulesAreGatheredOneAtATime) {
  const at::Tensor x = torch::randn({4, 6});
  NoUnitNet plain;
  train_plain(plain, x);
  const auto check = [&](int ranks, int stage, const comm::GroupPtr& group) {
    auto net = std::make_shared<UnitNet>();
    Config cfg = config(ranks);
    cfg.zero_optimization.stage = stage;
    auto engine = initialize(net, cfg, comm::Mesh(group));
    const auto names = net->named_parameters(), others = plain.named_parameters();
    EXPECT_EQ(names.keys(), others.keys());
    EXPECT_EQ(net->blocks->ptr(0)->name(), plain.blocks->ptr(0)->name());
    int calls = 0;
    net->blocks->ptr<Unit<PlainBlockImpl>>(1)->seen = [&] {
      ++calls;
      const int whole = gathered(engine.core());  // its own, and the head's
      EXPECT_TRUE(stage < 3 || ranks == 1 || whole == 2 + 2) << whole;
    };
    for (int step = 0; step < 3; ++step) {
      engine.forward(x).backward();
      EXPECT_TRUE(engine.step());
    }
    EXPECT_EQ(calls, 3);
    GatheredParameters region(engine.core(), net->parameters());
    for (const auto& item : others)
      EXPECT_TRUE(at::allclose(names[item.key()], item.value(), 1e-5, 1e-6)) << item.key();
    region.close();
    const std::string text = engine.units_text();
    if (stage < 3) {
      EXPECT_EQ(text,
                c10::str("every rank has all parameters whole: zero_optimization.stage ", stage, " partitions none\n"));
      return;
    }
    EXPECT_HAS(text,
               "blocks.0.linear (torch::nn::LinearImpl), 42 elements: while blocks.0 runs, which it is a part of");
    EXPECT_HAS(text, "any (torch::nn::LinearImpl), 42 elements: while it runs\n");
    EXPECT_HAS(text, "up (torch::nn::LinearImpl), 42 elements: while it runs\n");
    EXPECT_HAS(text, "pair.0 (torch::nn::LinearImpl), 42 elements: while pair runs, which it is a part of\n");
    EXPECT_HAS(text, "head (torch::nn::LinearImpl), 14 elements: for the whole forward");
  };
  for (const int ranks : {1, 2})
    for (int stage = 0; stage < 4; ++stage)
      testing::run_ranks(ranks, [&](int, const comm::GroupPtr& group) { check(ranks, stage, group); });
}

struct ExpertsImpl : Hooked<ExpertsImpl, at::Tensor(at::Tensor, int)> {
  ExpertsImpl() { all = register_module("all", torch::nn::Sequential(Block(), Block())); }
  at::Tensor forward_impl(at::Tensor x, int chosen) {
    return std::dynamic_pointer_cast<BlockImpl>(all->ptr(chosen))->forward(x);
  }
  torch::nn::Sequential all{nullptr};
};
TORCH_MODULE(Experts);

struct Mixture : torch::nn::Module {
  Mixture() {
    layers = register_module("layers", torch::nn::ModuleList(Experts(), Experts()));
    auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
    const torch::NoGradGuard no_grad;
    for (at::Tensor& p : parameters())
      p.uniform_(-0.4, 0.4, generator);
  }
  at::Tensor forward(at::Tensor x, int rank) {
    for (int i = 0; i < 2; ++i)
      x = std::dynamic_pointer_cast<ExpertsImpl>(layers->ptr(i))->forward(x, (i + rank) % 2);
    return x.square().mean();
  }
  torch::nn::ModuleList layers{nullptr};
};

TEST(Scope, ALeafModuleIsOneUnitAndOneScope) {
  const at::Tensor x = torch::randn({4, 6});
  Mixture plain;
  ((plain.forward(x, 0) + plain.forward(x, 1)) / 2).backward();
  const auto train = [&](int rank, const comm::GroupPtr& group, bool by_rule) {
    auto net = std::make_shared<Mixture>();
    Config leaves = config(2);
    Recipe recipe;
    if (by_rule)
      recipe.leaf = [](const std::string& path, const torch::nn::Module& module) {
        return path != "layers.1" && module.as<ExpertsImpl>() != nullptr;
      };
    leaves.zero_optimization.leaf_module.classes = {by_rule ? "nowhere" : "Experts"};
    leaves.zero_optimization.leaf_module.names = {"layers.1"};
    auto engine = initialize(net, leaves, comm::Mesh(group), recipe);
    for (const auto& spec : engine.core().params())
      EXPECT_EQ(spec.unit, spec.name.substr(0, std::string("layers.0").size()));
    auto first = std::dynamic_pointer_cast<ExpertsImpl>(net->layers->ptr(0));
    EXPECT_GE(first->scope().module, 0);
    EXPECT_EQ(std::dynamic_pointer_cast<BlockImpl>(first->all->ptr(0))->scope().module, -1);
    engine.forward(x, rank).backward();
    EXPECT_EQ(gathered(engine.core()), 0);
    const auto expected = plain.parameters();
    for (size_t i = 0; i < expected.size(); ++i) {
      const at::Tensor grad = engine.core().states().get_full(static_cast<int>(i), engine::Quantity::Gradient);
      EXPECT_TRUE(at::allclose(grad, expected[i].grad(), 1e-5, 1e-6)) << i;
    }
  };
  for (const bool by_rule : {false, true})
    testing::run_ranks(2, [&](int rank, const comm::GroupPtr& group) { train(rank, group, by_rule); });
}

TEST(Scope, AForwardThatThrowsLeavesNothingGathered) {
  testing::run_ranks(2, [](int, const comm::GroupPtr& group) {
    auto net = std::make_shared<BlockNet>();
    auto engine = initialize(net, config(2), comm::Mesh(group));
    auto last = std::dynamic_pointer_cast<BlockImpl>(net->blocks->ptr(2));
    last->fail = true;
    EXPECT_THROW(engine.forward(torch::ones({4, 6})), std::runtime_error);
    EXPECT_EQ(gathered(engine.core()), 0);
    last->fail = false;
    engine.forward(torch::ones({4, 6})).backward();
    EXPECT_TRUE(engine.step());
  });
}

// A block that reads the weight of another module, which is not gathered then unless it is registered.
struct ReaderImpl : Hooked<ReaderImpl, at::Tensor(at::Tensor)> {
  explicit ReaderImpl(at::Tensor of_other) : other(std::move(of_other)) {
    linear = register_module("linear", torch::nn::Linear(6, 6));
  }
  at::Tensor forward_impl(const at::Tensor& x) { return linear(x) + torch::matmul(x, other); }
  at::Tensor other;
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Reader);

struct ReadingNet : torch::nn::Module {
  ReadingNet() {
    first = register_module("first", unit(torch::nn::Linear(6, 6)));
    reader = register_module("reader", Reader(first->weight));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return reader(first->forward(x)).square().mean(); }
  UnitOf<torch::nn::Linear> first{nullptr};
  Reader reader{nullptr};
};

TEST(Scope, ExternalParametersAreGatheredWithTheirReader) {
  const at::Tensor x = torch::randn({4, 6});
  ReadingNet plain;
  train_plain(plain, x);
  for (const int ranks : {1, 2, 3})
    for (const bool by_name : {true, false})
      testing::run_ranks(ranks, [&](int, const comm::GroupPtr& group) {
        auto net = std::make_shared<ReadingNet>();
        auto engine = initialize(net, config(ranks), comm::Mesh(group));
        if (ranks > 1) {
          EXPECT_HAS(error_of([&] { engine.forward(x); }), "parameter 'first.weight' is partitioned");
        }
        engine.register_external_parameter(
            by_name ? *net->reader->linear : static_cast<torch::nn::Module&>(*net->reader),
            by_name ? ParamKey("first.weight") : ParamKey(net->first->weight));
        for (int step = 0; step < 3; ++step) {
          engine.forward(x).backward();
          EXPECT_EQ(gathered(engine.core()), ranks == 1 ? 4 : 0);
          EXPECT_TRUE(engine.step());
        }
        const GatheredParameters region(engine, net->parameters());
        for (size_t i = 0; i < 4; ++i)
          EXPECT_TRUE(at::allclose(net->parameters()[i], plain.parameters()[i], 1e-5, 1e-6)) << i;
        EXPECT_HAS(error_of<c10::ValueError>([&] { engine.register_external_parameter(plain, "first.weight"); }),
                   "is no module of this engine's model");
        EXPECT_HAS(error_of<c10::ValueError>([&] { engine.register_external_parameter(*net->reader, at::ones({2})); }),
                   "is not a parameter of the engine");
      });
}

TEST(Scope, RegionsTakeTheWritersValues) {
  testing::run_ranks(2, [](int rank, const comm::GroupPtr& group) {
    auto net = std::make_shared<BlockNet>();
    auto engine = initialize(net, config(2), comm::Mesh(group));
    const at::Tensor weight = net->head->weight;
    {
      GatheredParameters region(engine.core(), {weight}, /*modifier_rank=*/1);
      const torch::NoGradGuard no_grad;
      at::Tensor(weight).fill_(rank);
    }
    EXPECT_THROW((void)weight.sum(), c10::Error);
    GatheredParameters region(engine.core(), {weight});
    EXPECT_TRUE(weight.equal(torch::ones({2, 6})));
    EXPECT_THROW(GatheredParameters(engine.core(), {weight}), c10::Error);
  });
}

// body(engine, net, stage, ranks, rank), of one to three ranks.
void in_every_stage(const std::function<void(Engine<BlockNet>&, BlockNet&, int, int, int)>& body,
                    const std::string& precision = "") {
  for (const int ranks : {1, 2, 3})
    for (int stage = 0; stage < 4; ++stage)
      testing::run_ranks(ranks, [&](int rank, const comm::GroupPtr& group) {
        const auto net = std::make_shared<BlockNet>();
        Config cfg = config(ranks);
        cfg.zero_optimization.stage = stage;
        cfg.bf16.enabled = precision == "bf16";
        auto engine = initialize(net, cfg, comm::Mesh(group));
        SCOPED_TRACE(c10::str("stage ", stage, ", ", ranks, " ranks, ", precision));
        body(engine, *net, stage, ranks, rank);
      });
}

// As of plain PyTorch: an exception does not undo what was written before it, on any rank or stage.
TEST(Scope, WhatWasWrittenBeforeAnExceptionLeftARegionHolds) {
  for (const bool all_throw : {true, false})
    for (const std::string precision : {"", "bf16"})
      in_every_stage(
          [&](Engine<BlockNet>& engine, BlockNet& net, int stage, int ranks, int rank) {
            const at::Tensor weight = net.head->weight;
            const int writer = ranks - 1;
            const auto write = [&] {
              const GatheredParameters region(engine, {weight}, writer);
              const torch::NoGradGuard no_grad;
              at::Tensor(weight).fill_(rank + 3);
              if (all_throw || rank == writer) throw std::runtime_error("half way");
            };
            try {
              write();
            } catch (const std::runtime_error& error) {
              EXPECT_STREQ(error.what(), "half way");
            }
            EXPECT_EQ(gathered(engine.core()), stage == 3 && ranks > 1 ? 0 : 8);
            const at::Tensor want = at::full({2, 6}, writer + 3.0);
            EXPECT_TRUE(engine.states().full_param("head.weight").equal(want));
            const GatheredParameters region(engine, {weight});
            EXPECT_TRUE(weight.to(at::kFloat).equal(want));
          },
          precision);
}

TEST(Scope, AWriterThatIsNoRankOpensNothing) {
  in_every_stage([](Engine<BlockNet>& engine, BlockNet& net, int, int ranks, int) {
    for (const int wrong : {-2, ranks, 100})
      EXPECT_HAS(error_of<c10::ValueError>([&] { const GatheredParameters region(engine, net.parameters(), wrong); }),
                 c10::str("modifier_rank ", wrong, " is no rank of a group of ", ranks));
    engine.forward(torch::ones({4, 6}).to(net.head->weight.scalar_type())).backward();
    EXPECT_TRUE(engine.step());
  });
}

TEST(Scope, AnEngineThatEndsInARegionLeavesItsParametersWhole) {
  for (const int modifier : {-1, 0})
    in_every_stage([&](Engine<BlockNet>& engine, BlockNet& net, int stage, int ranks, int) {
      BlockNet want;
      {
        const GatheredParameters region(engine, {net.head->weight, net.head->bias}, modifier);
        engine.destroy();
      }
      EXPECT_TRUE(net.head->weight.equal(want.head->weight));
      net.head->forward(at::ones({1, 6})).sum().backward();
      EXPECT_TRUE(net.head->bias.grad().equal(at::ones({2})));
      const at::Tensor other = net.parameters()[0];
      if (stage == 3 && ranks > 1)
        EXPECT_HAS(error_of([&] { (void)other.sum(); }), "its engine was destroyed");
      else
        EXPECT_TRUE(other.equal(want.parameters()[0]));
    });
}

int64_t gathered_bytes(engine::Engine& engine) {
  int64_t bytes = 0;
  for (size_t i = 0; i < engine.params().size(); ++i)
    if (engine.regions().is_gathered(static_cast<int>(i))) bytes += engine.params()[i].tensor.nbytes();
  return bytes;
}

struct SequenceNet : torch::nn::Module {
  SequenceNet() {
    blocks = register_module("blocks", torch::nn::Sequential());
    for (int i = 0; i < 4; ++i)
      blocks->push_back(PlainBlock());
    head = register_module("head", torch::nn::Linear(6, 2));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return head(blocks->forward(x)).square().mean(); }
  torch::nn::Sequential blocks{nullptr};
  torch::nn::Linear head{nullptr};
};

// Each layer around its own call; a leaf module is one.
TEST(Scope, LayersOfAPlainSequentialAreGatheredOneAtATime) {
  const at::Tensor x = torch::randn({4, 6});
  SequenceNet plain;
  train_plain(plain, x);
  const auto peak = [&](const comm::GroupPtr& group, bool leaf) {
    auto net = std::make_shared<SequenceNet>();
    Config cfg = config(2);
    if (leaf) cfg.zero_optimization.leaf_module.names = {"blocks"};
    auto engine = initialize(net, cfg, comm::Mesh(group));
    int64_t most = 0;
    for (int i = 0; i < 4; ++i)
      net->blocks->ptr(i)->as<PlainBlock>()->seen = [&] { most = std::max(most, gathered_bytes(engine.core())); };
    EXPECT_EQ(net->named_parameters().keys(), plain.named_parameters().keys());
    for (int step = 0; step < 3; ++step) {
      engine.forward(x).backward();
      EXPECT_EQ(gathered(engine.core()), 0);
      EXPECT_TRUE(engine.step());
    }
    EXPECT_HAS(
        engine.units_text(),
        leaf ? "blocks.1.linear (torch::nn::LinearImpl), 42 elements: for the whole forward"
             : "blocks.1.linear (torch::nn::LinearImpl), 42 elements: while blocks.1 runs, which it is a part of");
    {
      const GatheredParameters region(engine, net->parameters());
      const auto mine = net->named_parameters(), expected = plain.named_parameters();
      for (const auto& item : expected)
        EXPECT_TRUE(at::allclose(mine[item.key()], item.value(), 1e-5, 1e-6)) << item.key();
    }
    engine.destroy();
    EXPECT_EQ(net->blocks->at<PlainBlockImpl>(1).name(), plain.blocks->at<PlainBlockImpl>(1).name()) << "as it was";
    return most;
  };
  testing::run_ranks(2, [&](int, const comm::GroupPtr& group) {
    const int64_t block = 42 * 4, head = 14 * 4;
    EXPECT_EQ(peak(group, /*leaf=*/true), 4 * block + head);
    EXPECT_EQ(peak(group, /*leaf=*/false), block + head);
  });
}

struct Own {  // a type that nobody knows
  at::Tensor value;
};
struct WrapImpl : torch::nn::Module {
  WrapImpl() { linear = register_module("linear", torch::nn::Linear(6, 6)); }
  Own forward(std::tuple<at::Tensor, std::tuple<at::Tensor, at::Tensor>> x) {
    return {linear(std::get<0>(x)) + std::get<0>(std::get<1>(x))};
  }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Wrap);
struct UnwrapImpl : torch::nn::Module {
  UnwrapImpl() { linear = register_module("linear", torch::nn::Linear(6, 6)); }
  at::Tensor forward(const Own& x) { return torch::tanh(linear(x.value)); }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Unwrap);
// Its weight is another layer's, too.
struct TiedImpl : torch::nn::Module {
  explicit TiedImpl(const at::Tensor& weight) : weight(register_parameter("weight", weight)) {}
  at::Tensor forward(const at::Tensor& x) { return torch::matmul(x, weight); }
  at::Tensor weight;
};
TORCH_MODULE(Tied);

// Layers of several arguments, of tuples and of types of their own; inside a unit, by AnyModules, computed again.
struct SignaturesNet : torch::nn::Module {
  SignaturesNet() {
    layers = register_module(
        "layers", torch::nn::Sequential(torch::nn::Bilinear(6, 6, 6), torch::nn::LSTM(torch::nn::LSTMOptions(6, 6)),
                                        Wrap(), Unwrap(), torch::nn::Tanh(), unit(PlainBlock())));
    again = register_module("again", torch::nn::Sequential(PlainBlock(), PlainBlock()));
    tied = register_module("tied", Tied(again->ptr(0)->as<PlainBlock>()->linear->weight));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x, bool checkpointed) {
    at::Tensor y = layers->forward(x.unsqueeze(1), x.unsqueeze(1) * 2);
    if (checkpointed)
      y = recompute([this](const auto& z) { return std::vector<at::Tensor>{again->forward(z[0])}; }, {y})[0];
    else
      for (torch::nn::AnyModule& layer : *again)
        y = layer.forward(y);
    return tied(y).square().mean();
  }
  torch::nn::Sequential layers{nullptr}, again{nullptr};
  Tied tied{nullptr};
};

TEST(Scope, LayersOfASequentialMayHaveAnySignature) {
  const at::Tensor x = torch::randn({4, 6});
  struct Plain : SignaturesNet {
    at::Tensor forward(const at::Tensor& input) { return SignaturesNet::forward(input, false); }
  } plain;
  train_plain(plain, x);
  for (const bool checkpointed : {false, true})
    for (const int ranks : {1, 2})
      testing::run_ranks(ranks, [&](int, const comm::GroupPtr& group) {
        auto net = std::make_shared<SignaturesNet>();
        auto engine = initialize(net, config(ranks), comm::Mesh(group));
        for (int step = 0; step < 3; ++step) {
          engine.forward(x, checkpointed).backward();
          EXPECT_TRUE(engine.step());
        }
        const std::string text = engine.units_text();
        if (ranks > 1) {
          EXPECT_HAS(text, "layers.0 (torch::nn::BilinearImpl), 222 elements: while it runs");
          EXPECT_HAS(text,
                     "again.0.linear (torch::nn::LinearImpl), 42 elements: while again.0 runs, which it is a part "
                     "of; 36 of them for the whole forward, as another module has them, too");
          EXPECT_HAS(text,
                     "again.1.linear (torch::nn::LinearImpl), 42 elements: while again.1 runs, which it is a part "
                     "of\n");
        }
        const GatheredParameters region(engine, net->parameters());
        const auto mine = net->named_parameters();
        for (const auto& item : plain.named_parameters())
          EXPECT_TRUE(at::allclose(mine[item.key()], item.value(), 1e-4, 1e-5)) << item.key();
      });
}

TEST(Scope, ALayerThatThrowsLeavesNothingGathered) {
  testing::run_ranks(2, [](int, const comm::GroupPtr& group) {
    auto net = std::make_shared<SequenceNet>();
    auto engine = initialize(net, config(2), comm::Mesh(group));
    auto& seen = net->blocks->ptr(2)->as<PlainBlock>()->seen;
    seen = [] { throw std::runtime_error("no luck"); };
    EXPECT_THROW(engine.forward(torch::ones({4, 6})), std::runtime_error);
    EXPECT_EQ(gathered(engine.core()), 0);
    seen = {};
    engine.forward(torch::ones({4, 6})).backward();
    EXPECT_TRUE(engine.step());
    EXPECT_HAS(error_of([&] { net->blocks->at<PlainBlockImpl>(0); }), "tessera::nn::GatheredLayer");
    EXPECT_NE(net->blocks->ptr(0)->as<PlainBlock>(), nullptr);
  });
}

TEST(Scope, HookedModulesWorkWithoutAnEngine) {
  Block block;
  EXPECT_EQ(block(torch::ones({2, 6})).size(0), 2);
  torch::nn::Sequential both(Block(), torch::nn::Linear(6, 1));
  EXPECT_EQ(both->forward(torch::ones({2, 6})).size(1), 1);
}

}  // namespace
}  // namespace tessera::nn
