#include "tessera/nn/construction.h"

#include <gtest/gtest.h>
#include <torch/nn.h>

#include "tessera/nn/engine.h"
#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"
#include "tests/support/open_files.h"
#include "tests/support/ranks.h"

namespace tessera::nn {
namespace {

// `disk`: a folder where parameters live; empty: they live on the device.
Config config(int ranks, int stage, const std::string& disk = "") {
  const std::string away = R"(, "offload_param": {"device": "nvme", "max_in_cpu": 0, "nvme_path": ")" + disk + "\"}";

  return Config::from_json(R"({"gradient_clipping": 0, "train_micro_batch_size_per_gpu": 4, "train_batch_size": )" +
                           std::to_string(4 * ranks) + R"(, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": )" +
                           std::to_string(stage) + R"(, "stage3_param_persistence_threshold": 0)" +
                           (disk.empty() ? "" : away) + "}}");
}

// Values that a rank could not make alone: those of rank 0 must hold.
torch::nn::Linear layer(int rank, int number) {
  torch::nn::Linear linear(6, 6);
  const torch::NoGradGuard no_grad;
  linear->weight.copy_(at::arange(36).view({6, 6}).mul(0.001 * (number + 1)).add(0.1 * rank));
  linear->bias.fill_(0.1 * number + rank);
  return linear;
}

std::vector<at::Tensor> train(Engine<torch::nn::SequentialImpl> engine) {
  for (int step = 0; step < 3; ++step) {
    engine.forward(at::linspace(-1, 1, 24).view({4, 6}) + engine.rank()).square().mean().backward();
    engine.step();
  }
  std::vector<at::Tensor> weights;
  for (size_t i = 0; i < engine.core().params().size(); ++i)
    weights.push_back(engine.core().states().get_full(static_cast<int>(i), engine::Quantity::Master));
  return weights;
}

// With parameters on a disk one rank partitions, too, and nothing is left on the device.
TEST(Construction, AnEngineTrainsWhatWasBuiltInPartitions) {
  struct Row {
    int ranks, stage;
    bool on_disk;
  };
  for (const auto [ranks, stage, on_disk] :
       {Row{3, 0, false}, Row{3, 2, false}, Row{3, 3, false}, Row{1, 3, true}, Row{2, 3, true}}) {
    const std::string what = c10::str(ranks, " ranks, stage ", stage, on_disk ? ", on a disk" : "");
    testing::run_ranks(ranks, [&, ranks = ranks, stage = stage, on_disk = on_disk](int rank, const auto& group) {
      const io::TempFolder disk;
      const Config built = config(ranks, stage, on_disk ? disk.path() : "");
      Construction building(built, comm::Mesh(group));
      torch::nn::Sequential early, plain;
      for (int i = 0; i < 4; ++i) {
        early->push_back(building.partition(layer(rank, i)));
        plain->push_back(layer(0, i));
      }
      EXPECT_HAS(testing::error_of([&] { (void)early->parameters()[0].sum(); }), "parameter 'weight' is partitioned");
      EXPECT_EQ(building.bytes() > 0, !on_disk) << what;
      EXPECT_EQ(testing::files_in(disk.path()).empty(), !on_disk) << what;
      const auto got = train(initialize(early, built, building));
      const auto want = train(initialize(plain, config(ranks, stage), comm::Mesh(group)));
      EXPECT_EQ(building.bytes(), 0) << what;
      for (size_t i = 0; i < want.size(); ++i)
        EXPECT_TRUE(got[i].equal(want[i])) << what << ", " << i;
    });
  }
}

TEST(Construction, RegionsReadAndWriteBeforeThereIsAnEngine) {
  testing::run_ranks(2, [](int rank, const comm::GroupPtr& group) {
    Construction building(config(2, 3), comm::Mesh(group));
    const auto linear = building.partition(layer(rank, 1));
    const at::Tensor other = at::ones({2});
    building.gather({linear->weight, linear->bias, other});
    EXPECT_TRUE(linear->bias.equal(at::full({6}, 0.1)));
    linear->bias.detach().fill_(rank);
    building.release({linear->weight, linear->bias, other}, 1);
    building.gather({linear->bias});
    EXPECT_TRUE(linear->bias.equal(at::ones({6})));
    building.release({linear->bias});
    const auto write_and_throw = [&] {
      const GatheredParameters region(building, {linear->bias}, 1);
      linear->bias.detach().fill_(rank + 4);
      throw std::runtime_error("half way");
    };
    EXPECT_THROW(write_and_throw(), std::runtime_error);
    EXPECT_HAS(testing::error_of<c10::ValueError>([&] { GatheredParameters(building, {linear->bias}, 2); }),
               "modifier_rank 2 is no rank of a group of 2");
    const GatheredParameters region(building, {linear->bias});
    EXPECT_TRUE(linear->bias.equal(at::full({6}, 5)));
  });
}

}  // namespace
}  // namespace tessera::nn
