// Public: states that are elsewhere.
#pragma once

#include "tessera/offload/states.h"
