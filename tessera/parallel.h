// Public: models and sequences that ranks share.
#pragma once

#include "tessera/nn/cut_model.h"
#include "tessera/nn/parallel.h"
#include "tessera/nn/sequence_loader.h"
#include "tessera/parallel/attention.h"
#include "tessera/parallel/cost.h"
#include "tessera/parallel/functions.h"
#include "tessera/parallel/layers.h"
#include "tessera/parallel/plan.h"
#include "tessera/parallel/sequence_batch.h"
#include "tessera/parallel/tiles.h"
#include "tessera/parallel/vocabulary.h"
