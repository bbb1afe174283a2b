#include "tessera/nn/layers.h"

#include <gtest/gtest.h>
#include <torch/nn.h>

#include "tests/support/errors.h"

namespace tessera::nn {
namespace {

using testing::error_of;
using Ints = std::vector<int>;

struct ForkImpl : torch::nn::Module {
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) { return {x + 1, x * 2}; }
};
TORCH_MODULE(Fork);
struct JoinImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& a, at::Tensor b) { return a + b; }
};
TORCH_MODULE(Join);
struct CountImpl : torch::nn::Module {
  Tensors forward(const Tensors& x) { return {at::scalar_tensor(static_cast<int64_t>(x.size()))}; }
};
TORCH_MODULE(Count);

StageLayers whole(const Layers& layers) {
  return {layers, {0, layers.size()}, 1, 0, std::nullopt};
}

TEST(Layers, TakeWhatTheOneBeforeReturned) {
  const at::Tensor x = at::ones({2});
  const auto twice = [](const at::Tensor& a) { return a * 2; };
  Layers chain;
  chain.add(Fork())
      .add(Join())
      .add(std::make_shared<ForkImpl>())
      .add([](const Tensors& all) { return all[1]; })
      .add(twice);
  EXPECT_TRUE(at::equal(whole(chain).run(0, {x})[0], at::full({2}, 16)));
  Layers any;
  any.add(torch::nn::AnyModule(Fork())).add(torch::nn::AnyModule(Join()));
  EXPECT_TRUE(at::equal(whole(any).run(0, {x})[0], at::full({2}, 4)));
  Layers counts;
  counts.add(Fork()).add(Count());
  EXPECT_EQ(whole(counts).run(0, {x})[0].item<int>(), 2);
  Layers wrong;
  wrong.add(Fork()).add(twice);
  EXPECT_HAS(error_of([&] { whole(wrong).run(0, {x}); }), "layer of a function cannot take the 2 tensors");
}

TEST(Layers, ModulesOfASequential) {
  torch::nn::Sequential sequential(torch::nn::Linear(2, 3), torch::nn::Tanh(), torch::nn::Linear(3, 1));
  const Layers layers(sequential);
  ASSERT_EQ(layers.size(), 3);
  EXPECT_EQ(layers[2].name, "Linear");
  const at::Tensor x = at::randn({4, 2});
  EXPECT_TRUE(at::equal(whole(layers).run(0, {x})[0], sequential->forward(x)));
  Layers one;
  one.add(sequential);
  EXPECT_TRUE(at::equal(whole(one).run(0, {x})[0], sequential->forward(x)));
}

TEST(Layers, AStageHasItsOwnByTheNamesOfTheList) {
  int built = 0;
  Layers layers;
  for (int i = 0; i < 4; ++i) {
    layers.build([&built] {
      ++built;
      return torch::nn::Linear(2, 2);
    });
  }
  const auto names = [&](int stages, int stage, const Ints& bounds) {
    const StageLayers made(layers, bounds, stages, stage, 5);
    return made.named_parameters().keys();
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(names(2, 1, {0, 3, 4}), (Names{"layers.3.weight", "layers.3.bias"}));
  EXPECT_EQ(built, 1);
  EXPECT_EQ(names(2, 0, {0, 1, 2, 3, 4}),
            (Names{"layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"}))
      << "two chunks";
  const StageLayers all(layers, {0, 4}, 1, 0, 5), last(layers, {0, 3, 4}, 2, 1, 5);
  EXPECT_TRUE(at::equal(all.named_parameters()["layers.3.weight"], last.named_parameters()["layers.3.weight"]));
  EXPECT_EQ(units_of_layers(last).at("layers.3.bias"), "layers.3");
}

TEST(Layers, Partition) {
  Layers layers;
  layers.add(torch::nn::Linear(10, 10)).add(torch::nn::Tanh()).build([] { return torch::nn::Linear(2, 2); });
  layers.add(torch::nn::Linear(10, 9));
  EXPECT_EQ(bounds_of("uniform", 2, layers), (Ints{0, 2, 4}));
  EXPECT_EQ(bounds_of("parameters", 2, layers), (Ints{0, 1, 4}));
  EXPECT_EQ(bounds_of("parameters", 1, layers), (Ints{0, 4}));
  EXPECT_EQ(bounds_of("type:linear", 3, layers).size(), 4U);
  EXPECT_EQ(bounds_of("type:LINEAR|none", 2, layers)[1], 2);
  EXPECT_EQ(bounds_of("type:^Tanh$", 1, layers), (Ints{0, 4}));
  EXPECT_HAS(error_of([&] { bounds_of("type:tanh", 2, layers); }),
             "partition method 'type:tanh' finds 1 layers for 2 parts; the layers are Linear, Tanh");
  EXPECT_HAS(error_of([&] { bounds_of("type:(", 2, layers); }), "'(' of a partition method is no regular expression");
  EXPECT_HAS(error_of([&] { bounds_of("profile", 2, layers); }), "no partition method 'profile'");
  EXPECT_HAS(error_of([&] { bounds_of("uniform", 5, layers); }), "4 layers cannot be cut into 5 parts");
}

TEST(Layers, TiesOverStagesAreNamed) {
  torch::nn::Linear first(2, 2), second(2, 2);
  second->weight = second->register_parameter("tied", first->weight);
  Layers layers;
  layers.add(first).add(second);
  EXPECT_NO_THROW(StageLayers(layers, {0, 2}, 1, 0, std::nullopt));
  EXPECT_THROW(StageLayers(layers, {0, 1, 2}, 2, 0, std::nullopt), c10::NotImplementedError);
  EXPECT_HAS(error_of([&] { StageLayers(layers, {0, 1, 2}, 2, 0, std::nullopt); }),
             "'tied' is in layers 0 (Linear) and 1 (Linear)");
}

TEST(Layers, AModuleThatIsListedTwiceIsNamed) {
  const torch::nn::Linear linear(2, 2);
  Layers layers;
  layers.add(linear).add(torch::nn::Tanh()).add(linear);
  const auto error = [&] { return error_of<c10::ValueError>([&] { whole(layers); }); };
  EXPECT_HAS(error(),
             "[pipeline] layer 2 (Linear) is in the list twice; use Layers::tied() with one key in each place");
  layers = Layers(torch::nn::Sequential(torch::nn::AnyModule(linear), torch::nn::AnyModule(linear)));
  EXPECT_HAS(error(), "layer 1 (Linear) is in the list twice");
}

TEST(Layers, AHolderWithoutAModuleIsNamed) {
  const torch::nn::Linear none(nullptr);
  const auto make = [none] { return none; };
  for (const auto& add : std::vector<std::function<void(Layers&)>>{
           [&](Layers& layers) { layers.add(none); }, [&](Layers& layers) { layers.add(torch::nn::AnyModule()); },
           [&](Layers& layers) { layers.build(make); }, [&](Layers& layers) { layers.tied("key", make); }})
    EXPECT_HAS(error_of<c10::ValueError>([&] {
                 Layers layers;
                 add(layers);
                 whole(layers);
               }),
               "is a null module");
}

TEST(Layers, TiedOnesAreOneModuleOfAStage) {
  const auto make = [] { return torch::nn::Linear(torch::nn::LinearOptions(2, 3).bias(false)); };
  Layers layers;
  layers.tied("key", make).add(torch::nn::Tanh());
  layers.tied("key", make, [](torch::nn::Linear& own, const at::Tensor& x) { return at::matmul(x, own->weight); });
  StageLayers one(layers, {0, 3}, 1, 0, 5), first(layers, {0, 2, 3}, 2, 0, 5), last(layers, {0, 2, 3}, 2, 1, 5);
  using Names = std::vector<std::string>;
  for (const StageLayers* stage : {&one, &first, &last})
    EXPECT_EQ(stage->named_parameters().keys(), (Names{"tied_modules.key.weight"}));
  EXPECT_TRUE(at::equal(first.parameters()[0], last.parameters()[0])) << "the seed of the first place";
  EXPECT_TRUE(one.ties().empty());
  EXPECT_EQ(last.ties().at("key"), (Ints{0, 1}));
  const at::Tensor x = at::randn({4, 2}), w = one.parameters()[0];
  EXPECT_TRUE(at::equal(one.run(0, {x})[0], at::matmul(at::tanh(at::linear(x, w)), w)));
  layers.tied("key", [] { return torch::nn::Embedding(2, 3); });
  EXPECT_HAS(error_of([&] { whole(layers); }), "tied layers 'key' are modules of two classes, one of them Linear");
}

TEST(Layers, SayWhereTheyAreAndWhichAreComputedAgain) {
  Layers layers;
  int calls = 0;
  layers.add(torch::nn::Linear(2, 2)).add([&calls](const at::Tensor& x) { return ++calls, x; });
  layers.add(torch::nn::Tanh()).add(torch::nn::Linear(2, 2));
  const StageLayers stage(layers, {0, 1, 2, 3, 4}, 2, 1, std::nullopt);
  EXPECT_EQ(stage.describe(),
            "stage 0 chunk 0: 0\nstage 1 chunk 0: 1: function\nstage 0 chunk 1: 2\nstage 1 chunk 1: 3: Linear");
  StageLayers all = whole(layers);
  EXPECT_EQ(all.describe(), "stage 0: 0: Linear, 1: function, 2: Tanh, 3: Linear");
  using Classes = std::vector<std::string>;
  const std::vector<std::pair<std::optional<Classes>, int>> rows{
      {std::nullopt, 2}, {Classes{"Linear"}, 1}, {Classes{"Linear", "function"}, 2}, {Classes{}, 1}};
  for (const auto& [classes, expected] : rows) {
    calls = 0;
    all.run(0, {at::ones({1, 2}, at::requires_grad())}, 2, {}, classes)[0].sum().backward();
    EXPECT_EQ(calls, expected);
  }
}

}  // namespace
}  // namespace tessera::nn
