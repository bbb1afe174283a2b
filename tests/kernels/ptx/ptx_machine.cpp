#include "tests/kernels/ptx/ptx_machine.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

namespace tessera::kernels::ptx {
namespace {

constexpr size_t kGap = 256;  // and the alignment that cudaMalloc promises

class Thread {
 public:
  Thread(const Program& program, const Entry& entry, std::vector<std::byte>& parameters, const Memory& memory)
      : program_(program), entry_(entry), parameters_(parameters), memory_(memory), registers_(entry.registers) {}

  void run(uint64_t thread, uint64_t block, Grid grid) {
    std::copy(entry_.registers.begin(), entry_.registers.end(), registers_.begin());
    registers_[kTid] = thread;
    registers_[kNtid] = static_cast<uint64_t>(grid.threads);
    registers_[kCtaid] = block;
    registers_[kNctaid] = static_cast<uint64_t>(grid.blocks);
    const Instruction* at = entry_.code.data();
    try {
      while (at != nullptr)
        at = step(*at);
    } catch (const std::exception& error) {
      throw std::runtime_error(program_.at(at->line) + error.what() + " (thread " + std::to_string(thread) +
                               " of block " + std::to_string(block) + ")");
    }
  }

 private:
  // Runs one instruction; the next one, or null at the end.
  const Instruction* step(const Instruction& instruction) {
    const Instruction* next = &instruction + 1;
    if (instruction.guard != kNoGuard && (registers_[instruction.guard] != 0) == instruction.unless) return next;
    const Operation& operation = *instruction.operation;
    switch (operation.kind) {
      case Kind::Compute:
        operation.compute(registers_.data(), instruction.slots);
        return next;
      case Kind::Load:
        load(instruction);
        return next;
      case Kind::Store:
        store(instruction);
        return next;
      case Kind::Branch:
        return entry_.code.data() + instruction.target;
      case Kind::Return:
        return nullptr;
    }
    return nullptr;
  }

  std::byte* address(const Instruction& instruction, int operand) {
    const Operation& operation = *instruction.operation;
    const uint64_t at = registers_[instruction.slots[operand]] + static_cast<uint64_t>(instruction.offset);
    const size_t bytes = size_t{operation.bytes} * operation.parts;
    if (at % bytes != 0) throw std::runtime_error("is not aligned to " + std::to_string(bytes) + " bytes");
    if (operation.space == Space::Param) {
      if (at > parameters_.size() || bytes > parameters_.size() - at)
        throw std::runtime_error("outside of the parameters");
      return parameters_.data() + at;
    }
    auto* pointer = reinterpret_cast<std::byte*>(at);
    if (!memory_.holds(pointer, bytes)) throw std::runtime_error("outside of the memory that was allocated");
    return pointer;
  }

  void load(const Instruction& instruction) {
    const Operation& operation = *instruction.operation;
    const std::byte* from = address(instruction, operation.parts);
    for (int k = 0; k < operation.parts; ++k) {
      uint64_t value = 0;  // little endian, and zeros above
      std::memcpy(&value, from + k * operation.bytes, operation.bytes);
      registers_[instruction.slots[k]] = value;
    }
  }

  void store(const Instruction& instruction) {
    const Operation& operation = *instruction.operation;
    std::byte* to = address(instruction, 0);
    for (int k = 0; k < operation.parts; ++k)
      std::memcpy(to + k * operation.bytes, &registers_[instruction.slots[k + 1]], operation.bytes);
  }

  const Program& program_;
  const Entry& entry_;
  std::vector<std::byte>& parameters_;
  const Memory& memory_;
  std::vector<uint64_t> registers_;
};

}  // namespace

Memory::~Memory() {
  while (!blocks_.empty())
    release(reinterpret_cast<void*>(blocks_.begin()->first));
}

void* Memory::allocate(size_t bytes) {
  auto* whole = static_cast<std::byte*>(::operator new(bytes + 2 * kGap, std::align_val_t{kGap}));
  std::memset(whole, 0xcd, bytes + 2 * kGap);
  blocks_.emplace(reinterpret_cast<uintptr_t>(whole + kGap), bytes);
  return whole + kGap;
}

bool Memory::release(void* block) {
  if (blocks_.erase(reinterpret_cast<uintptr_t>(block)) == 0) return false;
  ::operator delete(static_cast<std::byte*>(block) - kGap, std::align_val_t{kGap});
  return true;
}

bool Memory::holds(const void* at, size_t bytes) const {
  const auto address = reinterpret_cast<uintptr_t>(at);
  auto block = blocks_.upper_bound(address);
  if (block == blocks_.begin()) return false;
  --block;
  const size_t offset = address - block->first;
  return offset <= block->second && bytes <= block->second - offset;
}

void run(const Program& program, const Entry& entry, Grid grid, const void* const* arguments, const Memory& memory) {
  std::vector<std::byte> parameters(entry.parameter_bytes);
  for (size_t k = 0; k < entry.parameters.size(); ++k)
    std::memcpy(parameters.data() + entry.parameters[k].offset, arguments[k], entry.parameters[k].bytes);
  Thread thread(program, entry, parameters, memory);
  for (int64_t block = 0; block < grid.blocks; ++block) {
    for (int64_t k = 0; k < grid.threads; ++k)
      thread.run(static_cast<uint64_t>(k), static_cast<uint64_t>(block), grid);
  }
}

}  // namespace tessera::kernels::ptx
