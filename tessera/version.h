// Public: the version of the library, and the classes of its errors.
#pragma once

#include "tessera/base/error.h"
#include "tessera/base/version.h"
