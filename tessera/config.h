// Public: the configuration.
#pragma once

#include "tessera/config/config.h"
#include "tessera/config/elastic.h"
#include "tessera/config/estimate.h"
