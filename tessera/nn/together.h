// What the ranks of several engines (comm/parts.h) agree on.
#pragma once

#include <vector>

#include "tessera/comm/parts.h"
#include "tessera/nn/session.h"

namespace tessera::nn {

// The step of an engine that is one of several, on all ranks of all parts: one norm of all to clip by, one decision to skip.
// `copies`: see norm_contribution(). True when weights were updated. UsageError, on every rank and with nothing stepped, where
// only some engines are at an accumulation boundary. Collective over all parts.
bool step_together(Session& engine, const comm::Parts& parts, const std::vector<int>& copies = {});
// Does the same for all engines of this process, where parts lie over each other.
bool step_together(const std::vector<Session*>& engines, const comm::Parts& parts);

}  // namespace tessera::nn
