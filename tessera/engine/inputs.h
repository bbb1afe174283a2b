// Inputs of a forward that are not what its engine has.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <vector>

namespace tessera::engine {

struct Input {
  std::string place;  // "[0]"
  at::ScalarType dtype;
  at::Device device;
};

// What a front end calls things.
struct InputWords {
  const char* dtypes = "";  // before the name of a dtype
  const char* cast = "pass inputs through engine.cast_inputs(), or call engine.cast_forward_inputs(true)";
  const char* device = "engine.device()";
};

// What an engine has, and its inputs should.
struct InputTerms {
  std::optional<at::ScalarType> dtype;  // of its parameters, where it has any
  at::Device device;
  bool autocasts;  // floating-point inputs of any dtype are taken
};

// The line to add to `error`, which a module threw in a forward with such inputs; empty where the error is none of dtypes or devices,
// or no input is another one. Pure.
std::string explain_inputs(const std::string& error, const InputTerms& engine, const std::vector<Input>& inputs,
                           const InputWords& words = {});

}  // namespace tessera::engine
