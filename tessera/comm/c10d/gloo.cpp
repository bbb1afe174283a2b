#include "tessera/comm/c10d/gloo.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupWrapper.hpp>

#include <sstream>

#include "tessera/base/env.h"

namespace tessera::comm {

c10::intrusive_ptr<c10d::Backend> gloo_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                               std::chrono::milliseconds timeout, bool loopback) {
  using Gloo = c10d::ProcessGroupGloo;
  auto options = Gloo::Options::create(timeout);
  if (const auto names = env::get("GLOO_SOCKET_IFNAME")) {
    std::istringstream list(*names);
    for (std::string name; std::getline(list, name, ',');)
      options->devices.push_back(Gloo::createDeviceForInterface(name));
  } else if (loopback) {
    options->devices.push_back(Gloo::createDeviceForHostname("127.0.0.1"));
  } else {
    options->devices.push_back(Gloo::createDefaultDevice());
  }
  return c10::make_intrusive<Gloo>(store, rank, size, options);
}

c10::intrusive_ptr<c10d::Backend> without_checks(c10::intrusive_ptr<c10d::Backend> backend) {
  const auto* const wrapper = dynamic_cast<const c10d::ProcessGroupWrapper*>(backend.get());
  return wrapper ? wrapper->getWrappedPg() : backend;
}

}  // namespace tessera::comm
