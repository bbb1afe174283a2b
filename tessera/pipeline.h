// Public: several engines as one program: pipelines, links, steps together.
#pragma once

#include "tessera/nn/layers.h"
#include "tessera/nn/link.h"
#include "tessera/nn/pipeline.h"
#include "tessera/nn/together.h"
