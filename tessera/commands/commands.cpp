#include "tessera/commands/commands.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/commands/table.h"
#include "tessera/config/text.h"

namespace tessera::commands {

namespace {

constexpr int kFailed = 1, kWrongUsage = 2;

std::vector<Command> table_of(const FrontEnd& front) {
  return {inspect_command(), export_command(),        deepspeed_command(), universal_command(),
          check_command(),   estimate_command(front), page_command(),      report_command()};
}

}  // namespace

std::vector<Name> names() {
  std::vector<Name> found;
  for (const Command& command : table_of({}))
    found.push_back({command.syntax.command, command.syntax.summary});
  return found;
}

Result run(const std::vector<std::string>& arguments, const FrontEnd& front) {
  const std::string name = arguments.empty() ? "" : arguments.front();
  const std::vector<Command> table = table_of(front);
  const auto command =
      std::find_if(table.begin(), table.end(), [&](const Command& c) { return c.syntax.command == name; });
  if (command == table.end()) {
    std::vector<std::string> all;
    for (const Command& one : table)
      all.push_back(one.syntax.command);
    const std::string near = config::nearest(name, all);
    const std::string hint = near.empty() ? "; tessera --help lists them" : "; did you mean '" + near + "'?";
    return {kWrongUsage, "", "tessera: there is no command '" + name + "'" + hint + "\n"};
  }
  Result result;
  const auto failed = [&](int code, const char* text) {
    result.code = code;
    result.errors += text;
    if (!result.errors.ends_with('\n')) result.errors += '\n';
  };
  try {
    const Arguments given(command->syntax, {arguments.begin() + 1, arguments.end()});
    if (given.help())
      result.output = command->syntax.usage();
    else
      command->run(given, front, result);
  } catch (const WrongUsage& error) {
    failed(kWrongUsage, error.what());
  } catch (const c10::ValueError& error) {
    failed(kFailed, error.what_without_backtrace());
  } catch (const c10::NotImplementedError& error) {
    failed(kFailed, error.what_without_backtrace());
  } catch (const IoError& error) {
    failed(kFailed, error.what_without_backtrace());
  }
  return result;
}

}  // namespace tessera::commands
