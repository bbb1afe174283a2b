// Trains a small Sequential on the ranks of the environment; exit status 0 when the loss fell on every rank. A program, and a
// plugin, whose train() a program calls that knows nothing of it (plugin_host.cpp).
#include <torch/nn.h>

#include <cstdio>
#include <cstring>

#include "tessera/engine.h"
#include "tessera/version.h"

extern "C" int train() {
  try {
    torch::manual_seed(0);
    torch::nn::Sequential net(torch::nn::Linear(4, 16), torch::nn::Tanh(), torch::nn::Linear(16, 1));
    auto engine = tessera::initialize(net, tessera::Config::from_json(R"({
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "zero_optimization": {"stage": 2}})"));
    torch::manual_seed(engine.rank());
    const auto x = torch::randn({8, 4});
    const auto y = x.sum(1, true);
    double first = 0, last = 0;
    for (int step = 0; step < 50; ++step) {
      const auto loss = torch::mse_loss(engine.forward(x), y);
      loss.backward();
      engine.step();
      last = loss.item<double>();
      first = step == 0 ? last : first;
    }
    std::printf("rank %d of %d: loss %.4f -> %.4f\n", engine.rank(), engine.size(), first, last);
    return last < 0.5 * first ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}

int main() {
  if (std::strcmp(tessera::version(), TESSERA_VERSION) != 0) {
    std::fprintf(stderr, "the library is %s, its headers are %s\n", tessera::version(), TESSERA_VERSION);
    return 3;
  }
  return train();
}
