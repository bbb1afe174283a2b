// The commands as data.
#pragma once

#include <string>
#include <vector>

#include "tessera/commands/arguments.h"
#include "tessera/commands/commands.h"

namespace tessera::commands {

struct Command {
  Syntax syntax;
  // Adds to `result`; throws what an engine's calls throw.
  void (*run)(const Arguments& arguments, const FrontEnd& front, Result& result);
};

Command inspect_command();                        // checkpoints.cpp
Command export_command();                         // checkpoints.cpp
Command deepspeed_command();                      // checkpoints.cpp
Command universal_command();                      // checkpoints.cpp
Command check_command();                          // check.cpp
Command estimate_command(const FrontEnd& front);  // estimate.cpp
Command page_command();                           // page.cpp
Command report_command();                         // report.cpp

}  // namespace tessera::commands
