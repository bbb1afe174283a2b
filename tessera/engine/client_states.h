// States of an optimizer that updates the masters itself, by parameter and key, as OptimizerStates (logical.h) has the core's.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <map>
#include <string>

#include "tessera/engine/engine.h"

namespace tessera::engine {

// What such an optimizer keeps on this rank. Front ends have one each: parameters go by their number in Engine::params().
class KeptStates {
 public:
  using State =
      std::map<std::string, c10::IValue>;  // by key; what is neither a tensor nor a number is none of Tessera's
  virtual ~KeptStates() = default;
  virtual std::string name() const = 0;            // of the optimizer's class
  virtual bool has_states() const = 0;             // of any parameter
  virtual State state(int param) const = 0;        // empty before the first step, and where this rank has nothing of it
  virtual at::Tensor target(int param) const = 0;  // what the optimizer updates; asked for where there is a state
  virtual void write_state(int param, const std::string& key, const at::Tensor& part) = 0;  // of as many values
};

// Whether a state has a value for each element of `target`. A parameter without dims has one element, as a number has: numbers
// are known by their keys ("step" and others of torch's optimizers).
bool is_part(const std::string& key, const at::Tensor& state, const at::Tensor& target);
// A state that was saved as a number, as a value for each element of `target` where that has one element and `whole`, the sizes
// of its parameter, no dims; else the state itself.
c10::IValue part_of_number(const std::string& key, const c10::IValue& state, at::IntArrayRef whole,
                           const at::Tensor& target);

// Full values are fp32 in the shape of the parameter, a number ("step") a tensor without dimensions; undefined before the
// optimizer's first step. Value error for a missing key, and for a state that is neither a number nor a value for each element.
// Full values are collective: what a state is has to be agreed upon, as a rank without a part of the parameter has none.
class ClientStates {
 public:
  ClientStates(Engine& core, KeptStates& kept) : core_(core), kept_(kept) {}
  at::Tensor get_full(int param, const std::string& key) const;
  void set_full(int param, const std::string& key, const at::Tensor& full) const;
  at::Tensor get_local(int param, const std::string& key) const;
  void set_local(int param, const std::string& key, const at::Tensor& part) const;

 private:
  // Of a rank's value for a key; the largest of all ranks' kinds holds.
  enum class Kind : uint8_t {
    Nothing,  // no part of the parameter, or no step yet
    Number,   // one for the whole parameter, such as "step"
    Part,     // a value for each element of this rank's part
    Other,    // such as Adafactor's rows and columns
    Unknown   // the rank has states, and none of this name
  };
  using State = KeptStates::State;
  Kind kind_of(int param, const State& state, const std::string& key) const;
  Kind agreed(int param, const State& state, const std::string& key) const;
  void check(const std::string& key, const at::Tensor& value) const;
  void refuse(Kind kind, const std::string& key, const State& state) const;

  Engine& core_;
  KeptStates& kept_;
};

}  // namespace tessera::engine
