#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "tests/stand_in/staged_backend.h"

void tessera_stand_in_stage(const char* group_name) {
  const auto group = c10d::resolve_process_group(group_name);
  tessera::testing::stage(*group, group->getBackend(c10::DeviceType::PrivateUse1));
}
