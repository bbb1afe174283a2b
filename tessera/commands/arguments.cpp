#include "tessera/commands/arguments.h"

#include <algorithm>
#include <charconv>

namespace tessera::commands {

namespace {

constexpr size_t kColumn = 26;  // where the help of an argument begins

std::string line_of(const std::string& name, const std::string& help) {
  const std::string gap =
      name.size() + 2 < kColumn ? std::string(kColumn - 2 - name.size(), ' ') : "\n" + std::string(kColumn, ' ');
  return "  " + name + gap + help + "\n";
}

std::string shown(const Syntax::Argument& option) {
  return option.name + (option.value.empty() ? "" : " " + option.value) + (option.several ? "..." : "");
}

bool is_option(const std::string& text) {
  return text.size() > 1 && text[0] == '-';
}

}  // namespace

std::string Syntax::usage() const {
  std::string text = "usage: tessera " + command;
  for (const Argument& argument : needed)
    text += " " + argument.name + (argument.several ? "..." : "");
  for (const Argument& option : options)
    text += " [" + shown(option) + "]";
  text += "\n\n" + summary + "\n\n";
  for (const Argument& argument : needed)
    text += line_of(argument.name, argument.help);
  for (const Argument& option : options)
    text += line_of(shown(option), option.help + (option.fallback.empty() ? "" : "; default: " + option.fallback));
  return text;
}

Arguments::Arguments(const Syntax& syntax, const std::vector<std::string>& given) : syntax_(syntax) {
  size_t place = 0;
  for (size_t at = 0; at < given.size(); ++at) {
    if (given[at] == "-h" || given[at] == "--help") {
      help_ = true;
      return;
    }
    if (!is_option(given[at])) {
      const bool more = place > 0 && place == syntax.needed.size() && syntax.needed.back().several;
      if (place == syntax.needed.size() && !more) refuse("too many arguments: " + given[at]);
      values_[syntax.needed[more ? place - 1 : place++].name].push_back(given[at]);
      continue;
    }
    const size_t equals = given[at].find('=');
    std::string name = given[at].substr(0, equals);
    std::replace(name.begin() + 2, name.end(), '_', '-');
    const auto option = std::find_if(syntax.options.begin(), syntax.options.end(),
                                     [&](const Syntax::Argument& o) { return o.name == name; });
    if (option == syntax.options.end()) refuse("unknown option " + name);
    if (option->value.empty() && equals != std::string::npos) refuse(name + " takes no value");
    auto& values = values_[name];
    values.clear();
    if (option->value.empty()) continue;
    if (equals != std::string::npos) values.push_back(given[at].substr(equals + 1));
    while (at + 1 < given.size() && !is_option(given[at + 1]) &&
           (values.empty() || (option->several && equals == std::string::npos)))
      values.push_back(given[++at]);
    if (values.empty()) refuse(name + " needs a value");
  }
  if (place < syntax.needed.size()) refuse("it needs " + syntax.needed[place].name);
}

const std::vector<std::string>& Arguments::all(const std::string& name) const {
  return values_.at(name);
}

const std::string& Arguments::text(const std::string& name) const {
  if (const auto found = values_.find(name); found != values_.end()) return found->second.back();
  const auto option = std::find_if(syntax_.options.begin(), syntax_.options.end(),
                                   [&](const Syntax::Argument& o) { return o.name == name; });
  return option->fallback;
}

int64_t Arguments::number(const std::string& name, int64_t least) const {
  return numbers(name, least).back();
}

std::vector<int64_t> Arguments::numbers(const std::string& name, int64_t least) const {
  std::vector<int64_t> found;
  for (const std::string& text : all(name)) {
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < least)
      refuse(name + " must be a whole number from " + std::to_string(least) + ", got '" + text + "'");
    found.push_back(value);
  }
  return found;
}

size_t Arguments::choice(const std::string& name, const std::vector<std::string>& choices) const {
  const auto found = std::find(choices.begin(), choices.end(), text(name));
  if (found != choices.end()) return static_cast<size_t>(found - choices.begin());
  std::string listed;
  for (const std::string& one : choices)
    listed += (listed.empty() ? "" : ", ") + one;
  refuse(name + " must be one of " + listed + ", got '" + text(name) + "'");
}

void Arguments::refuse(const std::string& problem) const {
  throw WrongUsage("tessera " + syntax_.command + ": " + problem + "\n" + syntax_.usage());
}

}  // namespace tessera::commands
