#include "tessera/nn/units.h"

#include <gtest/gtest.h>
#include <torch/nn.h>

#include <string>
#include <vector>

namespace tessera::nn {
namespace {

using Strings = std::vector<std::string>;

Strings names(const std::vector<engine::ParamSpec>& specs) {
  Strings out;
  for (const auto& spec : specs) {
    out.push_back(spec.name);
  }
  return out;
}

Strings units(const std::vector<engine::ParamSpec>& specs) {
  Strings out;
  for (const auto& spec : specs) {
    out.push_back(spec.unit);
  }
  return out;
}

std::vector<engine::ParamSpec> param_specs(const torch::nn::Module& net) {
  return nn::param_specs(net, default_unit_policy(net));
}

struct NetOfBlocks : torch::nn::Module {
  NetOfBlocks() {
    first = register_module("first", torch::nn::Linear(2, 3));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < 2; ++i) {
      blocks->push_back(torch::nn::Sequential(torch::nn::Linear(3, 3), torch::nn::ReLU()));
    }
  }
  torch::nn::Linear first{nullptr};
  torch::nn::ModuleList blocks{nullptr};
};

TEST(Units, BlocksOfTheOutermostContainerThatRepeatsAreUnits) {
  NetOfBlocks net;
  const auto specs = param_specs(net);
  EXPECT_EQ(names(specs), (Strings{"first.weight", "first.bias", "blocks.0.0.weight", "blocks.0.0.bias",
                                   "blocks.1.0.weight", "blocks.1.0.bias"}));
  EXPECT_EQ(units(specs), (Strings{"root", "root", "blocks.0", "blocks.0", "blocks.1", "blocks.1"}));
}

TEST(Units, ASequentialAtTheTop) {
  torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::Linear(2, 1));
  EXPECT_EQ(units(param_specs(*net)), (Strings{"0", "0", "1", "1"}));
  torch::nn::Sequential once(torch::nn::Linear(2, 2), torch::nn::LayerNorm(torch::nn::LayerNormOptions({2})));
  EXPECT_EQ(units(param_specs(*once)), Strings(4, "root")) << "as in Python: nothing is repeated";
}

TEST(Units, AUserNamesThem) {
  NetOfBlocks net;
  const auto specs = nn::param_specs(net, {{"first.bias", "mine"}, {"blocks.1.0.bias", "mine"}});
  EXPECT_EQ(units(specs), (Strings{"root", "mine", "root", "root", "root", "mine"}));
}

TEST(Units, AnOutlineHasModulesOnceAndParametersUnderAllNames) {
  NetOfBlocks net;
  net.blocks->push_back(net.blocks->ptr(0));
  const engine::Outline found = outline(net);
  Strings modules, params;
  for (const auto& module : found.modules)
    modules.push_back(module.path + (module.repeats ? " repeats" : "") + (module.runs ? "" : " rests"));
  for (const auto& param : found.params)
    params.push_back(param.path);
  EXPECT_EQ(modules, (Strings{"", "first", "blocks repeats rests", "blocks.0 repeats", "blocks.0.0", "blocks.0.1",
                              "blocks.1 repeats", "blocks.1.0", "blocks.1.1"}));
  EXPECT_EQ(params.back(), "blocks.2.0.bias");
  EXPECT_EQ(found.params.back().identity, found.params[3].identity);
  EXPECT_EQ(found.params[0].elements, 6);
  EXPECT_EQ(found.modules[1].classes, (Strings{"torch::nn::LinearImpl", "LinearImpl", "Linear", "torch::nn::Linear"}));
}

TEST(Units, NamesAndOrderAreThoseOfNamedParameters) {
  NetOfBlocks net;
  Strings expected;
  for (const auto& item : net.named_parameters()) {
    expected.push_back(item.key());
  }
  EXPECT_EQ(names(param_specs(net)), expected);
}

TEST(Units, ATiedParameterIsListedOnce) {
  struct Tied : torch::nn::Module {
    Tied() {
      const auto weight = register_parameter("in", torch::ones({2, 2}));
      register_parameter("out", weight);
    }
  };
  Tied net;
  EXPECT_EQ(names(param_specs(net)), (Strings{"in"}));
}

TEST(Units, FrozenParametersHaveNoGroup) {
  torch::nn::Linear net(2, 2);
  net->bias.requires_grad_(false);
  const auto specs = param_specs(*net);
  EXPECT_EQ(specs[0].group, 0);
  EXPECT_EQ(specs[1].group, -1);
}

struct Wide : torch::nn::LinearImpl {
  using LinearImpl::LinearImpl;
};

struct Kinds : torch::nn::Module {
  Kinds() {
    gain = register_parameter("gain", torch::ones({1}));
    conv = register_module("conv", torch::nn::Conv2d(1, 1, 3));
    linear = register_module("linear", torch::nn::Linear(2, 2));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({2})));
    wide = register_module("wide", std::make_shared<Wide>(2, 2));
  }
  at::Tensor gain;
  torch::nn::Conv2d conv{nullptr};
  torch::nn::Linear linear{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  std::shared_ptr<Wide> wide;
};

TEST(Units, AutocastMarksParametersOfExactClasses) {
  const Kinds net;
  const auto marked = [&](const Strings& classes) {
    auto specs = param_specs(net);
    mark_autocast(net, classes, at::kBFloat16, specs);
    Strings out;
    for (const auto& spec : specs) {
      if (!spec.comm) continue;
      EXPECT_EQ(*spec.comm, at::kBFloat16);
      out.push_back(spec.name);
    }
    return out;
  };
  EXPECT_EQ(marked(default_autocast_modules()), (Strings{"conv.weight", "conv.bias", "linear.weight", "linear.bias"}));
  EXPECT_EQ(marked({"torch.nn.modules.linear.Linear"}), (Strings{"linear.weight", "linear.bias"}));
  EXPECT_EQ(marked({"torch.nn.LayerNorm", net.wide->name()}),
            (Strings{"norm.weight", "norm.bias", "wide.weight", "wide.bias"}));
  EXPECT_EQ(marked({net.name()}), (Strings{"gain"}));
  EXPECT_EQ(marked({}), Strings{});
  EXPECT_EQ(marked({"torch.nn.GRU"}), Strings{}) << "a class of torch that this model has none of";
  for (const char* unknown : {"Linear", "torch.nn.Lineal", "my.Block", ""}) {
    try {
      marked({"torch.nn.Linear", unknown});
      FAIL() << "no error";
    } catch (const c10::ValueError& error) {
      EXPECT_NE(std::string(error.what()).find("Failed to import lower precision safe module '" + std::string(unknown)),
                std::string::npos)
          << error.what();
    }
  }
}

}  // namespace
}  // namespace tessera::nn
