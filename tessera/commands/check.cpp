#include "tessera/commands/table.h"
#include "tessera/config/config.h"
#include "tessera/config/served.h"
#include "tessera/config/source.h"
#include "tessera/config/text.h"

namespace tessera::commands {

namespace {

void check(const Arguments& given, const FrontEnd&, Result& result) {
  const auto warn = [&](const std::vector<std::string>& lines) {
    for (const std::string& line : lines)
      result.errors += "warning: " + line + "\n";
  };
  const int64_t ranks = given.has("--ranks") ? given.number("--ranks", 1) : 0;
  const Config config = [&] {
    try {
      return config::config_of(given.text("config"));
    } catch (const config::InvalidConfig& error) {
      warn(error.warnings());
      throw;
    }
  }();
  warn(config.warnings);
  config::check_served(config);
  result.output = config.describe(given.has("--all"));
  if (!result.output.ends_with('\n')) result.output += '\n';
  if (ranks == 0) return;
  const config::Batch batch = config.resolve_batch(ranks);
  result.output +=
      c10::str(ranks, " ranks: ", batch.train_batch_size, " samples a step = micro batch ", batch.micro_batch_size,
               " x ", batch.gradient_accumulation_steps, " accumulation steps x ", ranks, "\n");
}

}  // namespace

Command check_command() {
  return {{.command = "check",
           .summary = "Whether a configuration is valid and served, and what it resolves to.",
           .needed = {{"config", "a file, JSON text, or base64 of it"}},
           .options = {{"--ranks", "also the batch of so many data-parallel ranks", "N"},
                       {"--all", "also what the configuration does not mention"}}},
          check};
}

}  // namespace tessera::commands
