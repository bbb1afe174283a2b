// Public: update rules and schedules without an engine.
#pragma once

#include "tessera/optim/optimizer.h"
#include "tessera/optim/schedule.h"
#include "tessera/optim/tensors.h"
