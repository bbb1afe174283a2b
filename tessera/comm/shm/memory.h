// Memory that the tensors of all ranks of one host live in.
#pragma once

#include "tessera/comm/group.h"

namespace tessera::comm {

// Group::shared_memory for `group`, whose ranks are processes (or threads) of one host and user. Collective.
//
// Rank 0 makes and reserves a segment, the others attach; once all have, its file is closed on every rank, so that no
// process can join later and the memory goes with the last tensor.
at::Tensor shm_memory(Group& group, int64_t bytes, Label label);

}  // namespace tessera::comm
