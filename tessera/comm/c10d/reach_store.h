// torch's store at an address, in bounded time.
#pragma once

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <optional>
#include <string>

namespace tessera::comm {

// Opens c10d::TCPStore(address, options), whose client prints warnings while nobody listens, and waits without end for the first
// word of whoever does. This call waits quietly, and throws DistNetworkError where nobody listens for options.timeout, a
// listener says nothing for 15 s, or all of it takes as long more than options.timeout.
c10::intrusive_ptr<c10d::Store> reach_store(const std::string& address, const c10d::TCPStoreOptions& options);

// Whether somebody listens there; nothing where that is not known: a host that does not answer, or a queue that is full.
std::optional<bool> listens(const std::string& address, int port);

}  // namespace tessera::comm
