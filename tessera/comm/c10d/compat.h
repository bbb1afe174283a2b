// The forks between torch versions that concern process groups.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>

namespace tessera::comm::compat {

// torch 2.11 and 2.12 can only list the devices.
template <class Group>
bool has_backend_for(Group& group, c10::DeviceType type) {
  if constexpr (requires { group.hasBackendForDeviceType(type); })
    return group.hasBackendForDeviceType(type);
  else
    return std::ranges::any_of(group.getDeviceTypes(), [type](c10::Device d) { return d.type() == type; });
}

// The kind of a reduce-scatter of several tensors, which a work tells profilers: torch 2.11 and 2.12 have one for all calls
// of several tensors.
template <class Op>
constexpr Op reduce_scatter_coalesced() {
  if constexpr (requires { Op::REDUCE_SCATTER_TENSOR_COALESCED; })
    return Op::REDUCE_SCATTER_TENSOR_COALESCED;
  else
    return Op::COALESCED;
}

}  // namespace tessera::comm::compat
