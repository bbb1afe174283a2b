// The public C++ API of Tessera.
#pragma once

#include "tessera/comm/backends.h"
#include "tessera/comm/mesh.h"
#include "tessera/comm/timed_group.h"
#include "tessera/config/config.h"
#include "tessera/engine/checkpoint.h"
#include "tessera/engine/engine.h"
#include "tessera/offload/states.h"
#include "tessera/optim/optimizer.h"
#include "tessera/optim/schedule.h"
#include "tessera/parallel/attention.h"
#include "tessera/parallel/cost.h"
#include "tessera/parallel/functions.h"
#include "tessera/parallel/layers.h"
#include "tessera/parallel/plan.h"
#include "tessera/parallel/vocabulary.h"
