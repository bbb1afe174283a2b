// Weights that several stages of a pipeline hold (Layers::tied): equal at the start, their gradients summed before every step,
// counted once. Each place of a stage talks to the same place of the others.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/parts.h"
#include "tessera/engine/engine.h"
#include "tessera/nn/layers.h"
#include "tessera/pipeline/wire.h"

namespace tessera::nn {

class Ties {
 public:
  // The first stage's values become those of all copies in `module`. Collective over all stages.
  Ties(const comm::Parts& parts, const StageLayers& module);

  // From here on the parameters of this engine. Collective.
  void attach(engine::Engine& engine);
  // Before a batch: what was frozen or thawed since takes part, or does not. Value error, on all ranks, where a copy is
  // trained and another one is not. Collective.
  void follow();
  // Numbers of the engine's parameters that an earlier stage has, too.
  const std::vector<int>& copies() const { return copies_; }
  // Every copy's gradient becomes the sum of all copies', where a place has one. Collective.
  void sum_gradients();
  // Who may wait for this stage hears of it.
  std::vector<pipeline::Wire*> outgoing() const;

 private:
  // A module that this stage has.
  struct Tie {
    std::string name;    // "tied_modules.KEY."
    int key = 0;         // its number among all
    bool first = false;  // of the stages that have it
    std::vector<std::unique_ptr<pipeline::Wire>> there,
        back;  // from the first stage: to each other one; else to the first
    std::vector<std::pair<std::string, at::Tensor>> params = {};  // of the module
    std::vector<int> numbers = {};                                // of the engine's that are trained: trained()
    int64_t messages = 0;
  };
  // The engine's, that are trained now.
  std::vector<int> trained(const Tie& tie) const;
  void compare();
  // By key and parameter: whether any rank of a stage that has it has a gradient. Collective.
  std::vector<std::vector<bool>> used() const;
  // The first stage gets those of all others and returns what `join` makes of them, on all stages.
  template <class F>
  Tensors meet(Tie& tie, const Tensors& own, const F& join);

  const comm::Parts parts_;
  std::vector<std::string> keys_;
  std::vector<int> counts_;  // by key: trained parameters
  std::vector<Tie> ties_;
  std::vector<bool> in_place_;  // by key: all copies of a rank's place are the same elements
  std::vector<int> copies_;
  engine::Engine* engine_ = nullptr;
};

}  // namespace tessera::nn
