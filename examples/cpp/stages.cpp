// One model over two ranks in two ways: as a pipeline of two stages with four micro-batches a step, and as two engines that a link
// joins, each with a program of its own.
//   tessera-run -n 2 stages
#include "small.h"
#include "tessera/pipeline.h"

namespace {

using namespace small;

constexpr int64_t kMicro = 4, kMicroRows = kRows / kMicro;

// The modules of a GPT in two halves, as lists.
struct Start : torch::nn::Module {
  explicit Start(Gpt model)
      : token(register_module("token", model->token)), position(register_module("position", model->position)) {}
  at::Tensor forward(const at::Tensor& ids) { return token(ids) + position(at::arange(ids.size(1), ids.options())); }
  torch::nn::Embedding token, position;
};

Batch micro_batch(int64_t step, int64_t micro) {
  const auto [ids, labels] = batch(step);
  return {ids.narrow(0, kMicroRows * micro, kMicroRows), labels.narrow(0, kMicroRows * micro, kMicroRows)};
}

tessera::Config config_of(int64_t micro_batches) {
  return config(c10::str(R"(, "zero_optimization": {"stage": 1}, "gradient_accumulation_steps": )", micro_batches,
                         R"(, "train_micro_batch_size_per_gpu": )", kMicroRows));
}

void as_pipeline() {
  torch::manual_seed(0);
  Gpt model;
  tessera::nn::Layers layers;
  layers.add(std::make_shared<Start>(model));
  for (const auto& block : model->blocks->children())
    layers.add(std::dynamic_pointer_cast<BlockImpl>(block));
  layers.add(model->norm).add(model->head);
  const auto config = config_of(kMicro);
  const auto parts = tessera::nn::environment_stages(config, 2);
  const auto loss = [](const tessera::nn::Tensors& out, const tessera::nn::Tensors& labels) {
    return loss_of(out[0], labels[0]);
  };
  tessera::nn::Pipeline engine(layers, config, parts, {.loss = loss});
  for (int64_t step = 0; step < kSteps; ++step) {
    const double shown = engine.train_batch([&](int64_t micro) -> tessera::nn::MicroBatch {
      const auto [ids, labels] = micro_batch(step, micro);
      return {{ids}, {labels}};
    });
    if (parts.everyone->rank() == 0) print("step", step, shown);
  }
}

std::shared_ptr<BlockImpl> block_of(const Gpt& model, size_t number) {
  return std::dynamic_pointer_cast<BlockImpl>(model->blocks->ptr(number));
}

struct Tower : torch::nn::Module {
  explicit Tower(Gpt model)
      : start(register_module("start", std::make_shared<Start>(model))),
        block(register_module("block", block_of(model, 0))) {}
  at::Tensor forward(const at::Tensor& ids) { return block->forward(start->forward(ids)); }
  std::shared_ptr<Start> start;
  std::shared_ptr<BlockImpl> block;
};
struct Reader : torch::nn::Module {
  explicit Reader(Gpt model)
      : block(register_module("block", block_of(model, 1))),
        norm(register_module("norm", model->norm)),
        head(register_module("head", model->head)) {}
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& labels) {
    return loss_of(head(norm(block->forward(tokens))), labels);
  }
  std::shared_ptr<BlockImpl> block;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
};

void sending(const Gpt& model, const tessera::nn::Link& link, const tessera::comm::Parts& parts) {
  auto engine = tessera::initialize(std::make_shared<Tower>(model), config_of(kMicro), parts.mesh);
  tessera::nn::LinkSender sender(link, parts, engine);
  for (int64_t step = 0; step < kSteps; ++step) {
    for (int64_t micro = 0; micro < kMicro; ++micro)
      sender.send({engine.forward(micro_batch(step, micro).ids)}, micro);
    for (int64_t micro = 0; micro < kMicro; ++micro) {
      sender.backward(micro);
      tessera::nn::step_together(engine, parts);  // one norm, of both
    }
    sender.step();
  }
}

void receiving(const Gpt& model, const tessera::nn::Link& link, const tessera::comm::Parts& parts) {
  auto engine = tessera::initialize(std::make_shared<Reader>(model), config_of(kMicro), parts.mesh);
  tessera::nn::LinkReceiver receiver(link, parts, engine);
  for (int64_t step = 0; step < kSteps; ++step) {
    double shown = 0;
    for (int64_t micro = 0; micro < kMicro; ++micro) {
      const auto tokens = receiver.receive(micro);
      const at::Tensor loss = engine.forward(tokens[0], micro_batch(step, micro).labels);
      loss.backward();
      receiver.give_back(micro);
      tessera::nn::step_together(engine, parts);
      shown += loss.item<double>() / kMicro;
    }
    receiver.step();
    print("linked", step, shown);
  }
}

void as_linked_engines() {
  torch::manual_seed(0);
  const Gpt model;
  const auto parts = tessera::comm::environment_parts({tessera::comm::mesh_shape(1), tessera::comm::mesh_shape(1)});
  const tessera::nn::Link link{.source = 0, .target = 1, .sides = {"tower", "reader"}};
  parts.part == 0 ? sending(model, link, parts) : receiving(model, link, parts);
}

void train() {
  as_pipeline();
  as_linked_engines();
}

}  // namespace

int main(int argc, char** argv) {
  return small::run(argc, argv, train, small::train_plain_gpt);
}
