// Weights that several stages of a pipeline hold: equal at the start, their gradients summed before every step, counted once.
// Each place of a stage talks to the same place of the others.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/pipeline/failure.h"
#include "tessera/pipeline/ranks.h"
#include "tessera/pipeline/stage.h"
#include "tessera/pipeline/wire.h"

namespace tessera::pipeline {

// A module in layers of several stages, which all of them know.
struct Tied {
  std::string key;
  std::vector<int> stages;  // that have a copy, ascending
  std::vector<std::pair<std::string, at::Tensor>> params =
      {};  // of this stage's copy, by the names that its engine gives them
};
// What the names of its parameters in an engine begin with.
std::string tied_prefix(const std::string& key);  // "tied_modules.KEY."

class Ties {
 public:
  // The first stage's values become those of all copies. Value error, on all ranks and before anything is sent, where copies
  // differ in number, names, shapes or dtypes of their parameters. An error of one rank amid messages ends the construction on all:
  // there it is thrown, for Building::fail() to announce, elsewhere as StageFailed. Collective over all stages, which pass the same
  // keys.
  Ties(const Ranks& ranks, const std::vector<Tied>& tied, const Building& building);

  // From here on the parameters of this stage's engine. UsageError, on all ranks, where a copy is trained and another one is
  // not. Collective.
  void attach(Stage& stage);
  // Before a batch: what was frozen or thawed since takes part, or does not. Errors as of attach(); an error of one rank is
  // StageFailed on the others. Collective.
  void follow(Stage& stage);
  bool empty() const { return keys_.empty(); }  // on all stages
  // By key and parameter: whether any rank of a stage that has it has a gradient. An error of one rank is one of all. Collective.
  using Used = std::vector<std::vector<bool>>;
  Used used(Stage& stage);
  // Every copy's gradient becomes the sum of all copies', where a place has one. An error is this rank's own, and others may wait
  // for it: Runner::sum_gradients(). Collective.
  void sum_gradients(Stage& stage, const Used& used);
  // Numbers of the engine's parameters that an earlier stage has, too. Local.
  std::vector<int> copies(const Stage& stage) const;
  // This stage announces its failures over these to those that may wait for it.
  std::vector<Wire*> outgoing() const;

 private:
  // A module that this stage has.
  struct Tie {
    std::string key;
    bool first = false;                        // of the stages that have it
    std::vector<std::unique_ptr<Wire>> wires;  // from the first stage to each other one; else to the first
    std::vector<int> trained = {};             // the engine's numbers of those that are
    int64_t messages = 0;
  };
  struct Key {
    std::string name;
    size_t trained = 0;  // parameters, on each stage that has it
    bool in_place =
        true;  // all copies of a rank's place are the same elements: units may lie otherwise on another stage
  };

  void check(const std::vector<Tied>& tied) const;
  void exchange_values(const std::vector<Tied>& tied);
  static std::vector<int> trained_of(const Stage& stage, const Tie& tie);
  // The first stage gets what all others pass and returns what `join` makes of it, on all stages.
  template <class F>
  static Tensors exchange(Tie& tie, const Tensors& own, const F& join);
  Key& key_of(const Tie& tie);

  const Ranks ranks_;
  std::vector<Key> keys_;
  std::vector<Tie> ties_;
};

}  // namespace tessera::pipeline
