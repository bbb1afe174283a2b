// A PTX file as nvcc writes it, decoded: entries of instructions over a thread's register file. What the decoder does not
// know (directives, instructions, modifiers, operands) is an error that names file, line and text.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tests/kernels/ptx/ptx_instructions.h"

namespace tessera::kernels::ptx {

// The first slots of every register file; the declared registers and the constants follow.
enum Special : uint16_t { kTid, kNtid, kCtaid, kNctaid, kSpecials };  // of dimension x, the only one known
constexpr uint16_t kNoGuard = 0xffff;

struct Instruction {
  const Operation* operation = nullptr;
  uint16_t slots[kMostOperands] = {};  // as Operation::bits; an address last for loads and first for stores
  uint16_t guard = kNoGuard;           // the instruction runs where this predicate is not `unless`
  bool unless = false;
  uint32_t target = 0;  // of a branch
  int64_t offset = 0;   // of an address
  int line = 0;
};

struct Parameter {
  size_t offset, bytes;  // in the space of parameters
};

struct Entry {
  std::vector<Parameter> parameters;
  size_t parameter_bytes = 0;
  int64_t most_threads = 0;  // of a block; 0 where not said
  std::vector<Instruction> code;
  std::vector<uint64_t> registers;  // as a thread starts: the constants
};

struct Program {
  std::string file;
  std::vector<std::string> lines;
  std::map<std::string, Entry> entries;

  std::string at(int line) const;  // "file:line: 'text': "
};

// std::runtime_error where something is not known or not right; `file` is for messages.
Program parse(const std::string& text, const std::string& file);
Program parse_file(const std::string& file);

}  // namespace tessera::kernels::ptx
