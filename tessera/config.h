// Public: the configuration.
#pragma once

#include "tessera/config/config.h"
