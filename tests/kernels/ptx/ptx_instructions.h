// The instructions of PTX that the machine knows, by their whole names: one with another modifier is another one, so no
// modifier is ever ignored. What they do is what the PTX ISA says of them; among them are those that nvcc makes of the
// kernels for compute capability 8.0 to 12.0.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace tessera::kernels::ptx {

enum class Kind : uint8_t { Compute, Load, Store, Branch, Return };
enum class Space : uint8_t { Global, Param };
enum class Braces : uint8_t { None, Sources, Results };  // what a move takes or gives in parts, {low, high}

constexpr int kMostOperands = 5;  // of one instruction: a vector's parts count each

struct Operation {
  Kind kind = Kind::Compute;
  uint8_t operands = 0, results = 1;          // an address counts as one
  std::array<uint8_t, kMostOperands> bits{};  // of each operand of a computation, results first; predicates have 1
  void (*compute)(uint64_t* registers, const uint16_t* slots) = nullptr;  // slots: one an operand
  Space space = Space::Global;                                            // loads and stores: where
  uint8_t bytes = 0, parts = 0;                                           // and how many parts of how many bytes
};

// Null for an unknown one.
const Operation* find_operation(const std::string& name, Braces braces);

}  // namespace tessera::kernels::ptx
