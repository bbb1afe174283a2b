// The interpreter: one batch of a stage, action by action.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/pipeline/ranks.h"
#include "tessera/pipeline/schedule.h"
#include "tessera/pipeline/stage.h"
#include "tessera/pipeline/wire.h"

namespace tessera::pipeline {

// The wires of a stage, by chunk; null where a chunk has no neighbour.
struct Wires {
  std::vector<std::unique_ptr<Wire>> before, behind;  // to the part before, and to the one behind, where activations go

  // Tags 2b and 2b + 1 are of the boundary b between two parts of the model.
  Wires(const Ranks& ranks, int chunks, at::Device device);
  std::vector<Wire*> all() const;
};

class Run {
 public:
  // `trains`: graphs of forwards are kept and every backward counts.
  Run(Stage& stage, Wires& wires, const Shape& shape, int number, bool trains);
  void execute(const Table& table);

  Tensors losses;              // by micro-batch, on the last stage
  int most_live = 0;           // micro-batches (times chunks) whose activations were held at one time
  int64_t most_under_way = 0;  // messages of one wire that the other side had not acknowledged

 private:
  using Cell = std::pair<int, int>;  // chunk, micro-batch
  // What a forward leaves for its backward.
  struct Live {
    Tensors inputs, outputs;
  };

  void act(const Action& action);
  void receive_activations(Cell cell);
  void send(Wire& wire, const Message& message, int part, int micro);
  void forward(Cell cell);
  void backward(Cell cell);
  void backward_of(const Tensors& outputs, const Tensors& gradients);
  // The number of a message over the boundary behind `part`.
  int64_t number(int part, int micro) const { return int64_t{part} * shape_.micro_batches + micro; }

  Stage& stage_;
  Wires& wires_;
  const Shape shape_;
  const int number_;  // this stage's
  const bool trains_;
  int backwards_left_;
  std::map<Cell, Message> inputs_, made_, gradients_;
  std::map<Cell, Live> live_;
};

}  // namespace tessera::pipeline
