#include "tests/kernels/ptx/ptx_program.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <fstream>
#include <optional>
#include <sstream>
#include <stdexcept>

namespace tessera::kernels::ptx {
namespace {

struct Token {
  std::string text;  // a word, a string or one other character
  int line;
};

struct Register {
  uint16_t slot;
  uint8_t bits;
};

// ".b32" -> 32, ".pred" -> 1; 0 for what is no type.
int type_bits(const std::string& type) {
  if (type == ".pred") return 1;
  if (type.size() < 3 || std::string("busf").find(type[1]) == std::string::npos) return 0;
  const std::string bits = type.substr(2);
  return bits == "8" || bits == "16" || bits == "32" || bits == "64" ? std::stoi(bits) : 0;
}

bool in_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '.' || c == '%';
}

std::vector<Token> tokens_of(const std::vector<std::string>& lines) {
  std::vector<Token> tokens;
  for (int line = 1; line <= static_cast<int>(lines.size()); ++line) {
    const std::string text = lines[line - 1].substr(0, lines[line - 1].find("//"));
    for (size_t i = 0; i < text.size();) {
      size_t end = i + 1;
      if (text[i] == '"') {
        end = std::min(text.find('"', end), text.size() - 1) + 1;
      } else if (in_word(text[i])) {
        while (end < text.size() && in_word(text[end]))
          ++end;
      }
      if (!std::isspace(static_cast<unsigned char>(text[i]))) tokens.push_back({text.substr(i, end - i), line});
      i = end;
    }
  }
  return tokens;
}

class Parser {
 public:
  explicit Parser(Program& program) : program_(program), tokens_(tokens_of(program.lines)) {}

  void run() {
    while (next_ < tokens_.size()) {
      const std::string word = take();
      if (word == ".version" || word == ".target" || word == ".address_size") {
        take();
      } else if (word == ".entry") {
        parse_entry();
      } else if (word != ".visible" && word != ".weak") {
        fail("unknown directive " + word);
      }
    }
  }

 private:
  [[noreturn]] void fail_at(int line, const std::string& why) const {
    throw std::runtime_error(program_.at(line) + why);
  }
  [[noreturn]] void fail(const std::string& why) const { fail_at(next_ > 0 ? tokens_[next_ - 1].line : 0, why); }
  bool sees(const std::string& text) const { return next_ < tokens_.size() && tokens_[next_].text == text; }
  bool skip(const std::string& text) {
    if (!sees(text)) return false;
    ++next_;
    return true;
  }
  std::string take() {
    if (next_ == tokens_.size()) fail("ends too early");
    return tokens_[next_++].text;
  }
  void expect(const std::string& text) {
    if (!skip(text)) {
      take();
      fail("expected " + text);
    }
  }

  // Decimal or hexadecimal, with a sign, or the bits of a float (0f3f800000) or of a double (0d, 16 digits); nothing
  // where no number stands.
  std::optional<uint64_t> number() {
    const bool negative = skip("-");
    const std::string word = take();
    if (!std::isdigit(static_cast<unsigned char>(word[0]))) {
      next_ -= negative ? 2 : 1;
      return std::nullopt;
    }
    const bool is_float = word.starts_with("0f") && word.size() == 10;
    const bool is_double = word.starts_with("0d") && word.size() == 18;
    const bool hexadecimal = word.starts_with("0x") || is_float || is_double;
    const char* end = word.data() + word.size();
    uint64_t value = 0;
    const auto read =
        hexadecimal ? std::from_chars(word.data() + 2, end, value, 16) : std::from_chars(word.data(), end, value);
    if (read.ec != std::errc() || read.ptr != end) fail("no number: " + word);
    return negative ? 0 - value : value;
  }
  uint64_t count() {
    const std::optional<uint64_t> value = number();
    if (!value) fail("expected a number");
    return *value;
  }

  void parse_entry() {
    const std::string name = take();
    entry_ = {};
    entry_.registers.resize(kSpecials);
    parameters_.clear();
    labels_.clear();
    branches_.clear();
    constants_.clear();
    scopes_.assign(
        1,
        {{"%tid.x", {kTid, 32}}, {"%ntid.x", {kNtid, 32}}, {"%ctaid.x", {kCtaid, 32}}, {"%nctaid.x", {kNctaid, 32}}});
    if (skip("(") && !skip(")")) {
      do {
        parse_parameter();
      } while (skip(","));
      expect(")");
    }
    if (skip(".maxntid")) {
      entry_.most_threads = 1;
      do {
        entry_.most_threads *= static_cast<int64_t>(count());
      } while (skip(","));
    }
    expect("{");
    parse_body();
    if (!program_.entries.emplace(name, std::move(entry_)).second) fail("a second " + name);
  }

  void parse_parameter() {
    expect(".param");
    size_t alignment = skip(".align") ? count() : 0;
    size_t bytes = type_bits(take()) / 8;
    if (bytes == 0) fail("expected a type");
    if (alignment == 0) alignment = bytes;
    const std::string name = take();
    if (skip("[")) {
      bytes *= count();
      expect("]");
    }
    const size_t offset = (entry_.parameter_bytes + alignment - 1) / alignment * alignment;
    parameters_[name] = offset;
    entry_.parameters.push_back({offset, bytes});
    entry_.parameter_bytes = offset + bytes;
  }

  void parse_body() {
    for (scopes_.emplace_back(); scopes_.size() > 1;) {
      if (skip("{")) {
        scopes_.emplace_back();
      } else if (skip("}")) {
        scopes_.pop_back();
      } else if (skip(".reg")) {
        parse_registers();
      } else if (skip(".pragma")) {
        take();
        expect(";");
      } else if (next_ + 1 < tokens_.size() && tokens_[next_ + 1].text == ":") {
        labels_[take()] = static_cast<uint32_t>(entry_.code.size());
        take();
      } else {
        parse_instruction();
      }
    }
    for (const auto& [instruction, label] : branches_) {
      const auto target = labels_.find(label);
      const bool known = target != labels_.end() && target->second < entry_.code.size();
      if (!known) fail_at(entry_.code[instruction].line, "no label " + label + " before an instruction");
      entry_.code[instruction].target = target->second;
    }
    const bool ends =
        !entry_.code.empty() && entry_.code.back().guard == kNoGuard &&
        (entry_.code.back().operation->kind == Kind::Return || entry_.code.back().operation->kind == Kind::Branch);
    if (!ends) fail("the code runs on behind its end");
  }

  void parse_registers() {
    const int bits = type_bits(take());
    if (bits == 0) fail("expected a type");
    do {
      const std::string name = take();
      if (skip("<")) {
        const uint64_t registers = count();
        for (uint64_t k = 0; k < registers; ++k)
          declare(name + std::to_string(k), bits);
        expect(">");
      } else {
        declare(name, bits);
      }
    } while (skip(","));
    expect(";");
  }
  void declare(const std::string& name, int bits) { scopes_.back()[name] = {new_slot(0), static_cast<uint8_t>(bits)}; }
  uint16_t new_slot(uint64_t value) {
    if (entry_.registers.size() >= kNoGuard) fail("too many registers");
    entry_.registers.push_back(value);
    return static_cast<uint16_t>(entry_.registers.size() - 1);
  }
  uint16_t constant(uint64_t value, int bits) {
    if (bits < 64) value &= (uint64_t{1} << bits) - 1;
    const auto known = constants_.find(value);
    return known != constants_.end() ? known->second : constants_[value] = new_slot(value);
  }
  const Register* find_register(const std::string& name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      const auto found = scope->find(name);
      if (found != scope->end()) return &found->second;
    }
    return nullptr;
  }

  void parse_instruction() {
    Instruction instruction;
    if (skip("@")) {
      instruction.unless = skip("!");
      instruction.guard = register_operand(1, false);
    }
    const std::string name = take();
    instruction.line = tokens_[next_ - 1].line;
    const Braces braces = find_braces(name);
    instruction.operation = find_operation(name, braces);
    if (instruction.operation == nullptr) fail("unknown instruction " + name);
    // A conversion takes what it needs of a wider register (PTX ISA, Operand Size Exceeding Instruction-Type Size).
    parse_operands(instruction, braces, name.starts_with("cvt."));
    expect(";");
    entry_.code.push_back(instruction);
  }

  // Of the operands that follow; loads and stores have them in the name (.v2).
  Braces find_braces(const std::string& name) const {
    if (name.starts_with("ld.") || name.starts_with("st.")) return Braces::None;
    if (sees("{")) return Braces::Results;
    for (size_t k = next_; k < tokens_.size() && tokens_[k].text != ";"; ++k) {
      if (tokens_[k].text == "{") return Braces::Sources;
    }
    return Braces::None;
  }

  void parse_operands(Instruction& instruction, Braces braces, bool from_wider) {
    const Operation& operation = *instruction.operation;
    switch (operation.kind) {
      case Kind::Return:
        return;
      case Kind::Branch:
        branches_.emplace_back(entry_.code.size(), take());
        return;
      case Kind::Load:
        parse_values(instruction.slots, operation);
        expect(",");
        parse_address(instruction, operation.parts);
        return;
      case Kind::Store:
        parse_address(instruction, 0);
        expect(",");
        parse_values(instruction.slots + 1, operation);
        return;
      case Kind::Compute:
        break;
    }
    const int first = braces == Braces::Results ? 0 : operation.results;
    const int last = braces == Braces::Results ? operation.results - 1 : operation.operands - 1;
    for (int k = 0; k < operation.operands; ++k) {
      if (k > 0) expect(",");
      if (braces != Braces::None && k == first) expect("{");
      const int bits = operation.bits[k];
      instruction.slots[k] = k < operation.results ? register_operand(bits, false) : source(bits, from_wider);
      if (braces != Braces::None && k == last) expect("}");
    }
  }

  // What is loaded or stored: registers of the type's width or wider ones.
  void parse_values(uint16_t* slots, const Operation& operation) {
    const bool vector = operation.parts > 1;
    if (vector) expect("{");
    for (int k = 0; k < operation.parts; ++k) {
      if (k > 0) expect(",");
      slots[k] = operation.kind == Kind::Load ? register_operand(8 * operation.bytes, true)
                                              : source(8 * operation.bytes, true);
    }
    if (vector) expect("}");
  }

  void parse_address(Instruction& instruction, int operand) {
    expect("[");
    instruction.slots[operand] = source(64);
    if (skip("+")) instruction.offset = static_cast<int64_t>(count());
    expect("]");
  }

  uint16_t register_operand(int bits, bool or_wider) {
    const std::string name = take();
    const Register* found = find_register(name);
    if (found == nullptr) fail("no register " + name);
    if (found->bits != bits && !(or_wider && found->bits > bits)) fail(name + " has another width");
    return found->slot;
  }

  // A register, a number, or a parameter's address.
  uint16_t source(int bits, bool or_wider = false) {
    if (const auto value = number()) return constant(*value, bits);
    const auto parameter = parameters_.find(tokens_[next_].text);
    if (parameter == parameters_.end()) return register_operand(bits, or_wider);
    if (bits != 64) fail("an address has 64 bits");
    ++next_;
    return constant(parameter->second, bits);
  }

  Program& program_;
  const std::vector<Token> tokens_;
  size_t next_ = 0;

  // Of the entry that is parsed.
  Entry entry_;
  std::map<std::string, size_t> parameters_;  // their addresses
  std::map<std::string, uint32_t> labels_;
  std::vector<std::pair<size_t, std::string>> branches_;  // instruction, label
  std::map<uint64_t, uint16_t> constants_;
  std::vector<std::map<std::string, Register>> scopes_;
};

}  // namespace

std::string Program::at(int line) const {
  std::string text = line > 0 && line <= static_cast<int>(lines.size()) ? lines[line - 1] : "";
  text.erase(0, text.find_first_not_of(" \t"));
  return file + ":" + std::to_string(line) + ": '" + text + "': ";
}

Program parse(const std::string& text, const std::string& file) {
  Program program{file, {}, {}};
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);)
    program.lines.push_back(line);
  Parser(program).run();
  return program;
}

Program parse_file(const std::string& file) {
  std::ifstream in(file);
  std::ostringstream text;
  if (!(text << in.rdbuf())) throw std::runtime_error("cannot read " + file);
  return parse(text.str(), file);
}

}  // namespace tessera::kernels::ptx
