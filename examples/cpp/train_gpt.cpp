// Trains the byte-level GPT of gpt.h with Tessera. One process a rank:
//   torchrun --no-python --nproc-per-node 2 train_gpt --config config.json --data text.txt
// or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set by hand; without them on one rank. --tp: ranks that share every
// layer, --sp: ranks that share every sequence; the others have batches of their own.
#include <torch/serialize.h>

#include <cstdio>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpt.h"
#include "tessera/nn/engine.h"
#include "text.h"

namespace {

using Arguments = std::map<std::string, std::string>;

Arguments parse(int argc, char** argv) {
  Arguments arguments{{"--config", ""},     {"--data", ""},  {"--weights", ""}, {"--save", ""},     {"--resume", ""},
                      {"--steps", "100"},   {"--rows", "4"}, {"--layers", "6"}, {"--width", "384"}, {"--heads", "6"},
                      {"--context", "128"}, {"--tp", "1"},   {"--sp", "1"}};
  for (int i = 1; i < argc; i += 2) {
    const auto found = arguments.find(argv[i]);
    if (found == arguments.end() || i + 1 == argc) {
      throw std::runtime_error(std::string("unknown or incomplete option ") + argv[i]);
    }
    found->second = argv[i + 1];
  }
  return arguments;
}

// Copies a dict that Python wrote with torch.save({name: tensor}) into the parameters.
void load_weights(torch::nn::Module& model, const std::string& path) {
  const std::string bytes = example::read_file(path);
  const auto weights = torch::pickle_load(std::vector<char>(bytes.begin(), bytes.end())).toGenericDict();
  for (auto& item : model.named_parameters()) {
    tessera::nn::set_whole(model, item.key(), weights.at(item.key()).toTensor());
  }
}

void train(const Arguments& arguments) {
  const auto number = [&](const char* name) { return std::stoll(arguments.at(name)); };
  torch::manual_seed(0);
  using tessera::comm::Axis;
  const auto mesh = tessera::comm::environment_mesh(
      {{Axis::Sp, static_cast<int>(number("--sp"))}, {Axis::Tp, static_cast<int>(number("--tp"))}});
  const bool prints = mesh.rank(tessera::comm::kBatchAxes) + mesh.rank(Axis::Sp) + mesh.rank(Axis::Tp) == 0;
  example::GptOptions options;
  options.tp = mesh.group(Axis::Tp);
  options.sp = mesh.group(Axis::Sp);
  options.layers = number("--layers");
  options.width = number("--width");
  options.heads = number("--heads");
  options.context = number("--context");
  const example::Text text(example::read_file(arguments.at("--data")), options.context, options.sp->rank(),
                           options.sp->size());
  auto model = std::make_shared<example::Gpt>(options);
  if (!arguments.at("--weights").empty()) {
    load_weights(*model, arguments.at("--weights"));
  }
  const int64_t steps = number("--steps"), rows = number("--rows");
  const std::string &save = arguments.at("--save"), &resume = arguments.at("--resume");
  const auto config = tessera::Config::from_file(arguments.at("--config"));

  // README begin
  auto engine = tessera::initialize(model, config, mesh);  // model: std::shared_ptr to any torch::nn::Module
  if (!resume.empty()) engine.load_checkpoint(resume);
  for (int64_t step = engine.core().global_steps(); step < steps; ++step) {
    const auto [x, y] = text.batch(step, engine.rank(), engine.size(), rows);
    const at::Tensor loss = engine.forward(x, y);
    loss.backward();
    engine.step();
    if (prints) {
      std::printf("step %ld loss %.6f\n", static_cast<long>(step), loss.item<double>());
    }
  }
  if (!save.empty()) engine.save_checkpoint(save);
  // README end

  const torch::NoGradGuard no_grad;
  double held_out = 0;
  for (int i = 0; i < 4; ++i) {
    const auto batch = text.held_out(8, 4, i);
    held_out += model->forward(batch.x, batch.y).item<double>() / 4;
  }
  if (prints) {
    std::printf("held-out loss %.6f\n", held_out);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    train(parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_gpt: %s\n", error.what());
    return 1;
  }
}
