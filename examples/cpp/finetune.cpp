// Fine-tuning from safetensors and back: weights in several files are read into a ZeRO-3 engine whose embeddings and first block are
// frozen, norms and biases of the rest decay by nothing; what it saves is read into another engine, which evaluates it.
//   tessera-run -n 2 finetune
#include "small.h"
#include "tessera/safetensors.h"

namespace {

using namespace small;

constexpr const char *kGiven = "finetune_given", *kMade = "finetune_made";
constexpr int64_t kFileBytes = 40'000;

bool is_frozen(const std::string& name) {
  return name.starts_with("token.") || name.starts_with("position.") || name.starts_with("blocks.0.");
}
bool no_decay(const std::string&, const at::Tensor& param) {
  return param.dim() < 2;
}

// What somebody else has trained, in files as Transformers writes them.
void write_given() {
  torch::manual_seed(0);
  tessera::checkpoint::write_weights(kGiven, "model.safetensors", Gpt()->named_parameters(),
                                     {.max_shard_bytes = kFileBytes});
}

auto engine_from(const std::string& folder) {
  torch::manual_seed(1);  // its values are those of the files
  tessera::nn::Recipe recipe;
  recipe.groups = {
      {.takes = [](const std::string& name, const at::Tensor&) { return is_frozen(name); }, .frozen = true},
      {.takes = no_decay, .set = [](tessera::optim::GroupOptions& group) { group.weight_decay = 0; }}};
  const auto chosen = config(R"(, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0,
                                  "stage3_gather_16bit_weights_on_model_save": true})");
  auto engine = tessera::initialize(Gpt(causal, /*units=*/true), chosen, recipe);
  if (folder == kGiven && engine.rank() == 0) write_given();
  engine.barrier();
  engine.load_module_state_dict(tessera::checkpoint::WeightReader(folder));
  return engine;
}

void train() {
  auto engine = engine_from(kGiven);
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto [ids, labels] = batch(step, engine.rank(), engine.size());
    const at::Tensor loss = engine.forward(ids, labels);
    loss.backward();
    engine.step();
    const double shown = engine.mean(loss).item<double>();
    if (engine.rank() == 0) print("step", step, shown);
  }
  if (!engine.save_16bit_model(kMade, "model.safetensors", {.max_shard_bytes = kFileBytes}))
    throw std::runtime_error("not saved");

  auto again = engine_from(kMade);
  const at::NoGradGuard no_grad;
  const auto [ids, labels] = batch(kSteps, again.rank(), again.size());
  const double shown = again.mean(again.forward(ids, labels)).item<double>();
  if (again.rank() == 0) print("read again", kSteps, shown);
}

void plain() {
  Gpt model;
  std::vector<at::Tensor> decayed, others, trained;
  for (const auto& item : model->named_parameters()) {
    item.value().requires_grad_(!is_frozen(item.key()));
    if (is_frozen(item.key())) continue;
    (no_decay(item.key(), item.value()) ? others : decayed).push_back(item.value());
    trained.push_back(item.value());
  }
  const auto options = [](double decay) {
    return std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(kRate).weight_decay(decay));
  };
  const auto loss = [&](int64_t step) { return model->forward(batch(step).ids, batch(step).labels); };
  train_plain({{others, options(0)}, {decayed, options(kDecay)}}, trained, loss);
  print("read again", kSteps, loss(kSteps).item<double>());
}

}  // namespace

int main(int argc, char** argv) {
  return small::run(argc, argv, train, plain);
}
