// Public: ranks and meshes.
#pragma once

#include "tessera/base/free_port.h"
#include "tessera/comm/averages.h"
#include "tessera/comm/backends.h"
#include "tessera/comm/group.h"
#include "tessera/comm/mesh.h"
#include "tessera/comm/parts.h"
#include "tessera/comm/timed_group.h"
