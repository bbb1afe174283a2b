// Public: saving, loading and reading checkpoints, and weights for other tools.
#pragma once

#include "tessera/checkpoint/deepspeed/save.h"
#include "tessera/checkpoint/export.h"
#include "tessera/checkpoint/reader.h"
#include "tessera/engine/checkpoint.h"
#include "tessera/engine/export.h"
