#include "tessera/nn/saved_values.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/checkpoint/reader.h"
#include "tessera/checkpoint/torch_file.h"

namespace tessera::nn {
namespace {

at::Generator generator_of(c10::Device device) {
  return at::globalContext().defaultGenerator(device);
}

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void put(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace

c10::impl::GenericDict dict_of(const ClientValues& values) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [name, value] : values)
    dict.insert(name, value);
  return dict;
}

c10::impl::GenericDict random_states(c10::Device device, const std::vector<at::Generator>& own) {
  c10::impl::GenericDict states(c10::StringType::get(), c10::AnyType::get());
  states.insert("torch", state_of(generator_of(at::kCPU)));
  if (!device.is_cpu()) states.insert("device", state_of(generator_of(device)));
  if (own.empty()) return states;
  c10::List<at::Tensor> of_program;
  for (const at::Generator& generator : own)
    of_program.push_back(state_of(generator));
  states.insert("own", of_program);
  return states;
}

at::Tensor SavedValues::random_of(const char* generator) const {
  const c10::IValue found = checkpoint::dict_of_blob(reader_, "random-" + std::to_string(place_));
  if (found.isNone() || !found.toGenericDict().contains(generator)) return {};
  const c10::IValue state = found.toGenericDict().at(generator);
  TESSERA_CHECK_IO(state.isTensor(), "checkpoint", "'random-", place_, "' is damaged: no state of the generators");
  return state.toTensor();
}

std::vector<at::Tensor> SavedValues::own_random() const {
  const c10::IValue found = checkpoint::dict_of_blob(reader_, "random-" + std::to_string(place_));
  if (found.isNone() || !found.toGenericDict().contains("own")) return {};
  const c10::IValue states = found.toGenericDict().at("own");
  TESSERA_CHECK_IO(states.isList(), "checkpoint", "'random-", place_, "' is damaged: no states of generators");
  std::vector<at::Tensor> own;
  for (const c10::IValue& state : states.toList().vec()) {
    TESSERA_CHECK_IO(state.isTensor(), "checkpoint", "'random-", place_, "' is damaged: no state of a generator");
    own.push_back(state.toTensor());
  }
  return own;
}

void SavedValues::try_random(c10::Device device, const std::vector<at::Generator>& own) const {
  const std::vector<at::Tensor> of_program = own_random();
  TESSERA_CHECK_VALUE(own.empty() || of_program.empty() || own.size() == of_program.size(), "engine.load_checkpoint",
                      "the checkpoint has the states of ", of_program.size(),
                      " generators of the program's own, and keep_generators() was given ", own.size(),
                      " here: give it those of that run, in their order");
  for (const auto& [name, where] : {std::pair{"torch", c10::Device(at::kCPU)}, std::pair{"device", device}}) {
    const at::Tensor state = random_of(name);
    if (state.defined() && !(where.is_cpu() && std::string(name) == "device")) try_state(generator_of(where), state);
  }
  for (size_t i = 0; i < std::min(own.size(), of_program.size()); ++i)
    try_state(own[i], of_program[i]);
}

void SavedValues::try_state(const at::Generator& generator, const at::Tensor& state) const {
  try {
    put(generator.clone(), state);
  } catch (const c10::Error& error) {
    TESSERA_FAIL(IoError, "[checkpoint] 'random-", place_,
                 "' is damaged: no state of the generators: ", error.what_without_backtrace());
  }
}

void SavedValues::put_random(c10::Device device, const std::vector<at::Generator>& own) const {
  const std::vector<at::Tensor> of_program = own_random();
  for (size_t i = 0; i < std::min(own.size(), of_program.size()); ++i)
    put(own[i], of_program[i]);
  if (const at::Tensor state = random_of("torch"); state.defined()) put(generator_of(at::kCPU), state);
  if (const at::Tensor state = random_of("device"); state.defined() && !device.is_cpu())
    put(generator_of(device), state);
}

}  // namespace tessera::nn
