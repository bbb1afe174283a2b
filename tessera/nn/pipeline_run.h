// The interpreter: one batch of a pipeline, action by action.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "tessera/nn/pipeline.h"

namespace tessera::nn {

class PipelineRun {
 public:
  // `batches`: of every micro-batch, on the first and the last stage. `trains`: graphs of forwards are kept and every backward
  // counts.
  PipelineRun(Pipeline& engine, const pipeline::Shape& shape, std::vector<MicroBatch> batches, bool trains);
  void execute(const pipeline::Table& table);

  std::vector<at::Tensor> losses;  // by micro-batch, on the last stage
  std::vector<Tensors> outputs;    // the same, of an evaluation
  int most_live = 0;

 private:
  using Place = std::pair<int, int>;  // chunk, micro-batch
  // What a forward leaves for its backward.
  struct Live {
    Tensors inputs, outputs;
  };

  void act(const pipeline::Action& action);
  void forward(Place place);
  at::Tensor loss_of(const Tensors& made, int micro);
  void backward(Place place);
  void backward_of(const Tensors& outputs, const Tensors& gradients);
  // Of a message over the boundary behind `part`.
  int64_t number(int part, int micro) const { return int64_t{part} * shape_.micro_batches + micro; }

  Pipeline& engine_;
  const pipeline::Shape shape_;
  const int stage_;
  const std::vector<MicroBatch> batches_;
  const bool trains_;
  int backwards_left_;
  std::map<Place, Tensors> inputs_, made_, gradients_;
  std::map<Place, Live> live_;
};

}  // namespace tessera::nn
