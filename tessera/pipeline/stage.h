// Stage: the calls by which the interpreter of schedules and the order of a batch use a stage, of either front end.
#pragma once

#include <cstdint>
#include <exception>
#include <vector>

#include "tessera/amp/grad_scaler.h"
#include "tessera/pipeline/failure.h"
#include "tessera/pipeline/wire.h"
#include "tessera/zero/param_spec.h"
#include "tessera/zero/state_access.h"

namespace tessera::pipeline {

// One batch of a stage: its computations, and its engine. The thread that runs the batch makes all calls.
class Stage {
 public:
  virtual ~Stage() = default;

  struct Made {
    Message message;       // for the next part of the model
    at::Tensor loss = {};  // of the last part: one element; undefined where an evaluation has none
  };
  // Runs the layers of a chunk. `inputs`: the message of the part before; nothing for the first part of the model, which takes the
  // micro-batch's own.
  virtual Made forward(int chunk, int micro, Message inputs) = 0;
  // Calls loss.backward(), with the loss scale where the engine has one.
  virtual void backward(const at::Tensor& loss) = 0;
  // Calls torch::autograd::backward(outputs, gradients).
  virtual void backward(const Tensors& outputs, const Tensors& gradients) = 0;
  // Counts a micro-batch that has gone forward and back, and is not the last one of its step.
  virtual void count_micro_batch() = 0;
  // Trains what was thawed, from here on. Collective in the stage.
  virtual void join() = 0;
  // Returns what this rank announces of the error.
  virtual Failure explain(const std::exception_ptr& error) const { return failure_of(error); }

  // ---- of the engine
  virtual void set_boundary(bool boundary) = 0;  // whether the backward that follows is the last one of the step
  virtual const amp::GradScaler& scaler() const = 0;
  virtual at::Tensor scale(const at::Tensor& output) = 0;
  virtual const std::vector<zero::ParamSpec>& params() const = 0;
  virtual zero::StateAccess& states() = 0;

  // ---- of the batch, around what the interpreter does: Runner::train_batch(), eval_batch()
  // Reads the micro-batches that this stage needs. Returns how many of them it has, -1 where it needs none. Local.
  virtual int64_t read(int64_t wanted) = 0;
  // Throws that the data has ended, as it has on all ranks that read.
  virtual void end_of_data() = 0;
  // Takes the mean loss of all micro-batches and ranks, for logs.
  virtual void set_loss(double loss) = 0;
  // Makes the step of all stages. `copies`: numbers of the parameters that an earlier stage has, too. Collective.
  virtual void step(const std::vector<int>& copies) = 0;
  // Drops the gradients of a batch that is not stepped: the next batch is not added to them.
  virtual void forget_gradients() = 0;
};

// A stage over any engine: engine::Engine of either front end.
template <class Engine>
class EngineStage : public Stage {
 public:
  explicit EngineStage(Engine& engine) : engine_(engine) {}
  void set_boundary(bool boundary) override { engine_.set_gradient_accumulation_boundary(boundary); }
  const amp::GradScaler& scaler() const override { return engine_.scaling().scaler(); }
  at::Tensor scale(const at::Tensor& output) override { return engine_.scaling().scale(output); }
  const std::vector<zero::ParamSpec>& params() const override { return engine_.params(); }
  zero::StateAccess& states() override { return engine_.states(); }
  void set_loss(double loss) override { engine_.set_loss(loss); }

 protected:
  Engine& engine_;
};

}  // namespace tessera::pipeline
