// C++ programs on a device: ranks that are processes, with the groups of the environment, train as on the CPU, bit for bit.
#include "tessera/comm/c10d/devices.h"

#include <gtest/gtest.h>
#include <torch/nn.h>

#include "tessera/comm/parts.h"
#include "tessera/nn/engine.h"
#include "tessera/nn/hooked.h"
#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"

namespace tessera::testing {
namespace {

// With parameters on a device: LibTorch moves modules to its own types of devices only.
struct LineImpl : nn::Hooked<LineImpl, at::Tensor(at::Tensor)> {
  LineImpl(int64_t in, int64_t out, c10::Device device)
      : weight(register_parameter("weight", at::linspace(-0.3, 0.5, in * out).view({out, in}).to(device))) {}
  at::Tensor forward_impl(const at::Tensor& x) { return at::linear(x, weight); }
  at::Tensor weight;
};

struct Net : torch::nn::Module {
  explicit Net(c10::Device device) {
    first = register_module("first", std::make_shared<LineImpl>(8, 16, device));
    second = register_module("second", std::make_shared<LineImpl>(16, 4, device));
  }
  at::Tensor forward(const at::Tensor& x) { return second->forward(at::tanh(first->forward(x))).square().mean(); }
  std::shared_ptr<LineImpl> first, second;
};

Config config_of(int stage, bool bf16) {
  return Config::from_json(
      c10::str(R"({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
      "bf16": {"enabled": )",
               bf16 ? "true" : "false", R"(}, "zero_optimization": {"stage": )", stage,
               R"(, "stage3_param_persistence_threshold": 0}, "tessera": {"min_unit_elements": 1}})"));
}

nn::NamedTensors trained(int stage, bool bf16, c10::Device device, const std::string& folder) {
  auto engine = initialize(std::make_shared<Net>(device), config_of(stage, bf16));
  EXPECT_EQ(engine.device(), device);
  const auto dtype = bf16 ? at::kBFloat16 : at::kFloat;
  for (int step = 0; step < 4; ++step) {
    if (step == 2) {
      engine.save_checkpoint(folder);
      EXPECT_TRUE(engine.load_checkpoint(folder));
    }
    const at::Tensor x = at::linspace(step - engine.rank(), 1, 32).view({4, 8}).to(device, dtype);
    engine.forward(x).backward();
    engine.step();
    EXPECT_TRUE(std::isfinite(engine.mean(engine.forward(x)).item<double>()));
  }
  nn::NamedTensors state;
  for (const auto& item : engine.module_state_dict())
    state.insert(item.key(), item.value().cpu().clone());
  return state;
}

}  // namespace

TEST(Programs, TrainOnADeviceAsOnTheCpu) {
  if (!is_rank()) {
    for (const char* transport : {"auto", "gloo"}) {
      const io::TempFolder folder;
      for (const auto& result :
           run_processes(2, {{"TESSERA_TRANSPORT", transport}, {"TESSERA_TEST_FOLDER", folder.path()}}))
        EXPECT_EQ(result.exit_code, 0) << transport << "\n" << result.output;
    }
    return;
  }
  const c10::Device device = comm::environment_device();
  EXPECT_EQ(device, c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(comm::environment_local_rank())));
  const std::string folder = std::getenv("TESSERA_TEST_FOLDER");
  for (int stage = 0; stage <= 3; ++stage)
    for (const bool bf16 : {false, true}) {
      const auto name = [&](const char* kind) { return c10::str(folder, "/", kind, stage, bf16); };
      const nn::NamedTensors here = trained(stage, bf16, device, name("device")),
                             there = trained(stage, bf16, c10::kCPU, name("cpu"));
      for (const auto& item : there)
        EXPECT_TRUE(here[item.key()].equal(item.value())) << item.key() << ", stage " << stage << ", bf16 " << bf16;
    }
}

// Two ranks that have one device: its tensors would go over Gloo, and the CPU's go as ever.
TEST(Programs, RanksThatShareADeviceAreNamed) {
  if (!is_rank()) {
    const auto results = run_processes(2, {{"TESSERA_TEST_ONE_DEVICE", "1"}});
    for (const auto& result : results)
      EXPECT_EQ(result.exit_code, 0) << result.output;
    EXPECT_HAS(results[0].output,
               "[comm] tensors of privateuseone go over Gloo, by way of host memory: ranks 0 and 1 have one device");
    EXPECT_EQ(results[1].output.find("[comm]"), std::string::npos) << results[1].output;
    return;
  }
  const auto group = comm::environment_group();
  const at::Tensor sum = at::ones({3});
  group->all_reduce(sum, comm::ReduceOp::Sum).wait();
  EXPECT_TRUE(sum.equal(at::full({3}, 2.0)));
}

}  // namespace tessera::testing
