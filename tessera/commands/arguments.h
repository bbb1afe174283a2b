// The arguments of a command line.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace tessera::commands {

// What a command takes, as data: one table a command.
struct Syntax {
  struct Argument {
    std::string name;  // "dir", or of an option "--tag", where - and _ are one letter
    std::string help;
    std::string value = {};  // of an option: what stands for its value in the usage; empty: a flag
    bool several = false;  // one value or more: of an option up to the next one, of the last argument all that are none
    std::string fallback = {};  // of an option with a value that is not given
  };
  std::string command;  // "inspect"
  std::string summary;
  std::vector<Argument> needed{}, options{};

  std::string usage() const;
};

// A command line that cannot be read; its text ends with the usage.
struct WrongUsage : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Arguments {
 public:
  Arguments(const Syntax& syntax, const std::vector<std::string>& given);  // WrongUsage

  bool help() const { return help_; }
  bool has(const std::string& option) const { return values_.contains(option); }
  // The last value that was given, else the fallback.
  const std::string& text(const std::string& name) const;
  const std::vector<std::string>& all(const std::string& name) const;
  // Whole numbers; WrongUsage for anything but whole numbers from `least`.
  int64_t number(const std::string& name, int64_t least) const;
  std::vector<int64_t> numbers(const std::string& name, int64_t least) const;
  // The index of text() in `choices`; WrongUsage for an unknown one.
  size_t choice(const std::string& name, const std::vector<std::string>& choices) const;

 private:
  [[noreturn]] void refuse(const std::string& problem) const;

  const Syntax& syntax_;
  bool help_ = false;
  std::map<std::string, std::vector<std::string>> values_;
};

}  // namespace tessera::commands
