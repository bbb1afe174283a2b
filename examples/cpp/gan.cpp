// Two engines in one program that train against each other: a generator and a discriminator, each with an optimizer of its own. Losses go
// through both; each engine takes the gradients of its parameters.
//   tessera-run -n 2 gan
#include "small.h"

namespace {

using namespace small;

constexpr int64_t kNoise = 8, kPoint = 2;

torch::nn::Sequential generator() {
  return torch::nn::Sequential(torch::nn::Linear(kNoise, kWidth), torch::nn::Tanh(), torch::nn::Linear(kWidth, kPoint));
}
torch::nn::Sequential discriminator() {
  return torch::nn::Sequential(torch::nn::Linear(kPoint, kWidth), torch::nn::LeakyReLU(), torch::nn::Linear(kWidth, 1));
}

// Points of a circle, and noise.
at::Tensor circle(int64_t step, int rank, int ranks) {
  const at::Tensor angle =
      at::arange(kRows, at::kFloat).narrow(0, kRows / ranks * rank, kRows / ranks) + 0.3 * static_cast<double>(step);
  return at::stack({angle.cos(), angle.sin()}, 1);
}
at::Tensor noise(int64_t step, int rank, int ranks) {
  const at::Tensor all =
      (at::arange(kRows * kNoise, at::kFloat) * 1.7 + static_cast<double>(step)).sin().view({kRows, kNoise});
  return all.narrow(0, kRows / ranks * rank, kRows / ranks);
}
at::Tensor judged(const at::Tensor& score, bool real) {
  return at::binary_cross_entropy_with_logits(score, at::full_like(score, real ? 1.0 : 0.0));
}

void train() {
  const auto config = small::config(R"(, "zero_optimization": {"stage": 1})");
  auto draws = tessera::initialize(generator(), config);
  auto judges = tessera::initialize(discriminator(), config);
  const int rank = draws.rank(), ranks = draws.size();
  for (int64_t step = 0; step < kSteps; ++step) {
    const at::Tensor drawn = draws.forward(noise(step, rank, ranks));
    const at::Tensor found =
        judged(judges.forward(circle(step, rank, ranks)), true) + judged(judges.forward(drawn.detach()), false);
    found.backward();
    judges.step();
    const at::Tensor fooled = judged(judges.forward(drawn), true);
    fooled.backward();
    draws.step();
    judges.zero_grad();  // of the generator's loss
    const double shown = draws.mean(fooled).item<double>() + judges.mean(found).item<double>();
    if (rank == 0) print("step", step, shown);
  }
}

void plain() {
  auto draws = generator();
  auto judges = discriminator();
  const auto options = torch::optim::AdamWOptions(kRate).weight_decay(kDecay);
  torch::optim::AdamW of_draws(draws->parameters(), options), of_judges(judges->parameters(), options);
  const auto step_of = [](torch::optim::AdamW& optimizer, torch::nn::Sequential& model, const at::Tensor& loss) {
    optimizer.zero_grad();
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
  };
  for (int64_t step = 0; step < kSteps; ++step) {
    const at::Tensor drawn = draws->forward(noise(step, 0, 1));
    const at::Tensor found =
        judged(judges->forward(circle(step, 0, 1)), true) + judged(judges->forward(drawn.detach()), false);
    step_of(of_judges, judges, found);
    const at::Tensor fooled = judged(judges->forward(drawn), true);
    step_of(of_draws, draws, fooled);
    print("step", step, fooled.item<double>() + found.item<double>());
  }
}

}  // namespace

int main(int argc, char** argv) {
  return small::run(argc, argv, train, plain);
}
