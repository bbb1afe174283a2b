// Gloo as torch has it.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

namespace tessera::comm {

// The interfaces of GLOO_SOCKET_IFNAME; else the loopback if asked for, for ranks of one host; else the interface that
// the host name resolves to. Collective.
c10::intrusive_ptr<c10d::Backend> gloo_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                               std::chrono::milliseconds timeout, bool loopback);

}  // namespace tessera::comm
