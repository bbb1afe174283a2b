// Gloo as torch has it.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

namespace tessera::comm {

// Gloo on the interfaces of GLOO_SOCKET_IFNAME; else the loopback if asked for, for ranks of one host; else the interface that
// the host name resolves to. Collective.
c10::intrusive_ptr<c10d::Backend> gloo_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                               std::chrono::milliseconds timeout, bool loopback);

// The back end itself, where torch compares the calls of all ranks by a wrapper (TORCH_DISTRIBUTED_DEBUG=DETAIL).
c10::intrusive_ptr<c10d::Backend> without_checks(c10::intrusive_ptr<c10d::Backend> backend);

}  // namespace tessera::comm
