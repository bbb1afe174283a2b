// A GPT that knows nothing of tensor parallelism, cut over two ranks by the configuration, its states shared by two such pairs.
//   tessera-run -n 4 tensor_parallel
#include "small.h"

namespace {

using namespace small;

void train() {
  Gpt model;
  const auto config = small::config(R"(, "zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2})");
  const tessera::comm::Mesh mesh = tessera::nn::environment_mesh(config);
  tessera::nn::Recipe recipe;  // what the model's classes do not say
  recipe.facts = {.heads = kHeads, .kv_heads = kHeads, .head_dim = kHead};
  auto engine = tessera::initialize(model, config, mesh, recipe);
  const bool first = engine.rank() + mesh.rank(tessera::comm::Axis::Tp) == 0;
  // Which layers are cut, how, and why.
  if (first) std::fprintf(stderr, "%s", engine.parallel_plan()->text().c_str());
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto [ids, labels] = batch(step, engine.rank(), engine.size());  // ranks that share layers have one batch
    const at::Tensor loss = engine.forward(ids, labels);
    loss.backward();
    engine.step();
    const double shown = engine.mean(loss).item<double>();
    if (first) print("step", step, shown);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return small::run(argc, argv, train, small::train_plain_gpt);
}
