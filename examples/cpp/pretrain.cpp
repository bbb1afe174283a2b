// A GPT with ZeRO-3, two groups of parameters (no weight decay on norms and biases) and a warm-up.
//   tessera-run -n 2 pretrain
#include "small.h"

namespace {

using namespace small;

double warm_up(int64_t updates) {
  return std::min(1.0, (1.0 + static_cast<double>(updates)) / 4);
}
bool no_decay(const at::Tensor& param) {
  return param.dim() < 2;
}

void train() {
  Gpt model(causal, /*units=*/true);
  tessera::nn::Recipe recipe;
  recipe.groups = {{.takes = [](const std::string&, const at::Tensor& param) { return no_decay(param); },
                    .set = [](tessera::optim::GroupOptions& group) { group.weight_decay = 0; }}};
  recipe.schedule = tessera::nn::scaled_by(warm_up);
  auto engine = tessera::initialize(
      model, config(R"(, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0})"), recipe);
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto [ids, labels] = batch(step, engine.rank(), engine.size());
    const at::Tensor loss = engine.forward(ids, labels);
    loss.backward();
    engine.step();
    const double shown = engine.mean(loss).item<double>();
    if (engine.rank() == 0) print("step", step, shown);
  }
}

void plain() {
  Gpt model;
  std::vector<at::Tensor> decayed, others;
  for (const at::Tensor& param : model->parameters())
    (no_decay(param) ? others : decayed).push_back(param);
  const auto options = [](double decay) {
    return std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(kRate).weight_decay(decay));
  };
  train_plain(
      {{others, options(0)}, {decayed, options(kDecay)}}, model->parameters(),
      [&](int64_t step) { return model->forward(batch(step).ids, batch(step).labels); }, warm_up);
}

}  // namespace

int main(int argc, char** argv) {
  return small::run(argc, argv, train, plain);
}
