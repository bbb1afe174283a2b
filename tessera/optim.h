// Public: update rules and schedules without an engine.
#pragma once

#include "tessera/optim/advice.h"
#include "tessera/optim/optimizer.h"
#include "tessera/optim/schedule.h"
#include "tessera/optim/tensors.h"
#include "tessera/optim/types.h"
#include "tessera/optim/whole.h"
