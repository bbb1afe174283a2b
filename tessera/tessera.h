// The public C++ API of Tessera: these headers. What else is installed is theirs, in detail/, and may change at any time.
#pragma once

#include "tessera/checkpoint.h"
#include "tessera/comm.h"
#include "tessera/config.h"
#include "tessera/engine.h"
#include "tessera/offload.h"
#include "tessera/optim.h"
#include "tessera/parallel.h"
#include "tessera/pipeline.h"
#include "tessera/safetensors.h"
#include "tessera/version.h"
