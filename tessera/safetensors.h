// Public: safetensors in and out, without an engine.
#pragma once

#include "tessera/checkpoint/weight_files.h"
