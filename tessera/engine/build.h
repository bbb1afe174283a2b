// From a configuration to the options of an engine.
#pragma once

#include "tessera/config/config.h"
#include "tessera/engine/engine.h"

namespace tessera::engine {

// Options of an engine whose data-parallel group has `data_parallel_size` ranks. The rule is External where the
// configuration names no optimizer that runs natively. Local and pure. Value error when the batch sizes do not fit,
// not-implemented error that names every key asking for something not served.
Options options_from(const config::Config& config, int data_parallel_size);

}  // namespace tessera::engine
