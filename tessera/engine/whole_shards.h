// The Shards by which optimizers of whole parameters (optim/whole.h) ask an engine whose states are cut over ranks.
#pragma once

#include <string>

#include "tessera/engine/engine.h"
#include "tessera/optim/whole.h"

namespace tessera::engine {

// Parameters go by their numbers in the engine, which must outlive the shards. Not-implemented error, with the optimizer's name,
// where states are cut and some rank has a parameter of its own (an expert), of which other ranks have no slice. Local.
optim::ShardsPtr shards_of(Engine& engine, const std::string& optimizer);

}  // namespace tessera::engine
