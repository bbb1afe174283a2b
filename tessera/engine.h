// Public: an engine of a torch::nn module, and what goes with it.
#pragma once

#include "tessera/nn/construction.h"
#include "tessera/nn/data.h"
#include "tessera/nn/data_order.h"
#include "tessera/nn/engine.h"
#include "tessera/nn/flops_profiler.h"
#include "tessera/nn/hooked.h"
#include "tessera/nn/optimizers.h"
#include "tessera/nn/recipe.h"
#include "tessera/nn/recompute.h"
#include "tessera/nn/scope.h"
#include "tessera/nn/sizes.h"
#include "tessera/nn/state_dict.h"
#include "tessera/nn/states.h"
