// Trains the byte-level GPT of gpt.h with Tessera. One process a rank:
//   tessera-run -n 2 train_gpt --config config.json --data text.txt
// or by any other launcher (docs/launch.md); without one on one rank. --tp: ranks that share every
// layer, --sp: ranks that share every sequence; the others have batches of their own. --pp: stages of a pipeline (then no --sp, --tp).
#include <torch/serialize.h>

#include <cstdio>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpt.h"
#include "tessera/engine.h"
#include "tessera/pipeline.h"
#include "text.h"

namespace {

using Arguments = std::map<std::string, std::string>;

Arguments parse(int argc, char** argv) {
  Arguments arguments{{"--config", ""},     {"--data", ""},  {"--weights", ""}, {"--save", ""},     {"--resume", ""},
                      {"--steps", "100"},   {"--rows", "4"}, {"--layers", "6"}, {"--width", "384"}, {"--heads", "6"},
                      {"--context", "128"}, {"--tp", "1"},   {"--sp", "1"},     {"--pp", "1"}};
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

example::GptOptions sizes(const Arguments& arguments) {
  const auto number = [&](const char* name) { return std::stoll(arguments.at(name)); };
  example::GptOptions options;
  options.layers = number("--layers");
  options.width = number("--width");
  options.heads = number("--heads");
  options.context = number("--context");
  return options;
}

// The same on a pipeline: a step has as many micro-batches as gradient_accumulation_steps says.
void train_stages(const Arguments& arguments) {
  const auto number = [&](const char* name) { return std::stoll(arguments.at(name)); };
  torch::manual_seed(0);
  const auto config = tessera::Config::from_file(arguments.at("--config"));
  const auto parts = tessera::nn::environment_stages(config, static_cast<int>(number("--pp")));
  const example::GptOptions options = sizes(arguments);
  example::Gpt model(options);
  if (!arguments.at("--weights").empty()) load_weights(model, arguments.at("--weights"));
  const auto loss = [](const tessera::nn::Tensors& out, const tessera::nn::Tensors& labels) {
    return at::cross_entropy_loss(out[0].to(at::kFloat).flatten(0, 1), labels[0].flatten());
  };
  tessera::nn::Pipeline engine(model.layers(), config, parts, {.loss = loss});
  if (const std::string& from = arguments.at("--resume"); !from.empty() && !engine.load_checkpoint(from))
    throw std::runtime_error("no checkpoint in " + from);
  const example::Text text(example::read_file(arguments.at("--data")), options.context);
  const auto print = [&](const std::string& what, double value) {
    if (parts.everyone->rank() == 0) std::printf("%s loss %.6f\n", what.c_str(), value);
  };
  const int64_t micro_batches = engine.gradient_accumulation_steps();
  const auto pair = [](const example::Batch& batch) { return tessera::nn::MicroBatch{{batch.x}, {batch.y}}; };
  for (int64_t step = engine.global_steps(); step < number("--steps"); ++step) {
    print(c10::str("step ", step), engine.train_batch([&](int64_t micro) {
      return pair(text.batch(step * micro_batches + micro, engine.rank(), engine.size(), number("--rows")));
    }));
  }
  if (!arguments.at("--save").empty()) engine.save_checkpoint(arguments.at("--save"));
  print("held-out", engine.eval_batch([&](int64_t i) { return pair(text.held_out(8, 4, i)); }, 4).loss);
}

void train(const Arguments& arguments) {
  const auto number = [&](const char* name) { return std::stoll(arguments.at(name)); };
  torch::manual_seed(0);
  using tessera::comm::Axis;
  const auto mesh = tessera::comm::environment_mesh(
      {{Axis::Sp, static_cast<int>(number("--sp"))}, {Axis::Tp, static_cast<int>(number("--tp"))}});
  const bool prints = mesh.rank(tessera::comm::kBatchAxes) + mesh.rank(Axis::Sp) + mesh.rank(Axis::Tp) == 0;
  example::GptOptions options = sizes(arguments);
  options.tp = mesh.group(Axis::Tp);
  options.sp = mesh.group(Axis::Sp);
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
  if (!resume.empty() && !engine.load_checkpoint(resume)) throw std::runtime_error("no checkpoint in " + resume);
  for (int64_t step = engine.global_steps(); step < steps; ++step) {
    const auto [x, y] = text.batch(step, engine.rank(), engine.size(), rows).to(engine.device());
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
    const auto batch = text.held_out(8, 4, i).to(engine.device());
    held_out += model->forward(batch.x, batch.y).item<double>() / 4;
  }
  if (prints) {
    std::printf("held-out loss %.6f\n", held_out);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Arguments arguments = parse(argc, argv);
    arguments.at("--pp") == "1" ? train(arguments) : train_stages(arguments);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_gpt: %s\n", error.what());
    return 1;
  }
}
