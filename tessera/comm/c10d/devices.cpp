#include "tessera/comm/c10d/devices.h"

#include <ATen/DeviceAccelerator.h>
#include <dlfcn.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <map>
#include <mutex>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/hosts/hosts.h"

namespace tessera::comm {
namespace {

struct Loaded {
  const DeviceBackend* backend = nullptr;
  std::string why_not;
};

Loaded load(const std::string& type) {
  const std::string library = "libtessera_" + type + "_comm.so";
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return {nullptr, std::string("there is no back end of their own (") + dlerror() + ")"};
  const auto entry = reinterpret_cast<TesseraDeviceBackend>(dlsym(handle, "tessera_device_backend"));
  if (entry == nullptr) return {nullptr, library + " has no tessera_device_backend()"};
  if (entry()->version != kDeviceBackendVersion)
    return {nullptr, library + " was made for another version of Tessera; build both together"};
  return {entry(), ""};
}

// A library is loaded once and never let go, as libraries are.
const Loaded& loaded(const std::string& type) {
  static std::mutex mutex;
  static auto& by_type = *new std::map<std::string, Loaded>;
  const std::scoped_lock lock(mutex);
  const auto found = by_type.find(type);
  return found != by_type.end() ? found->second : by_type.emplace(type, load(type)).first->second;
}

}  // namespace

std::optional<c10::Device> own_device(int local_rank) {
  const auto type = at::accelerator::getAccelerator(/*checked=*/false);
  if (!type || at::accelerator::deviceCount() == 0) return {};
  c10::DeviceIndex index = at::accelerator::getDeviceIndex();
  if (index == 0 && local_rank < at::accelerator::deviceCount())
    at::accelerator::setDeviceIndex(index = static_cast<c10::DeviceIndex>(local_rank));
  return c10::Device(*type, index);
}

namespace {

std::string lower(c10::DeviceType type) {
  return c10::DeviceTypeName(type, /*lower_case=*/true);
}

// Why ranks, who have announced `type identity`, cannot use the back end of the type.
std::string why_gloo(const std::string& type, const std::vector<std::string>& announced) {
  if (const Loaded& found = loaded(type); found.backend == nullptr) return found.why_not;
  std::map<std::string, size_t> holders;
  for (size_t rank = 0; rank < announced.size(); ++rank) {
    const auto [first, is_new] = holders.try_emplace(announced[rank], rank);
    const bool known = announced[rank].size() > type.size() + 1;
    if (!known) return c10::str("rank ", rank, " has no back end for them, or does not know its device");
    if (!is_new) return c10::str("ranks ", first->second, " and ", rank, " have one device");
  }
  return "";
}

}  // namespace

RankDevice find_device(const Launch& own, c10d::Store& store) {
  const auto device = own_device(own.local_rank);
  const std::string type = device ? lower(device->type()) : "";
  const DeviceBackend* const backend = device ? loaded(type).backend : nullptr;
  const std::string identity = backend != nullptr ? backend->identity(*device) : "";
  const auto announced = exchange(store, own.rank, own.size, "device", device ? type + " " + identity : "");
  for (size_t rank = 0; rank < announced.size(); ++rank) {
    if (announced[rank].empty()) return {};
    const std::string other = announced[rank].substr(0, announced[rank].find(' '));
    TESSERA_CHECK_VALUE(!device || other == type, "comm", "rank ", rank, " has a device of type '", other,
                        "' and rank ", own.rank, " one of type '", type, "'; all ranks train on one type");
  }
  const std::string why = why_gloo(type, announced);
  if (why.empty()) return {device->type(), backend};
  if (own.rank == 0) TORCH_WARN("[comm] tensors of ", type, " go over Gloo, by way of host memory: ", why);
  return {device->type(), nullptr};
}

void add_device_backend(const RankDevice& device, c10d::ProcessGroup& group,
                        const c10::intrusive_ptr<c10d::Store>& store, std::chrono::milliseconds timeout) {
  using Group = c10d::ProcessGroup;
  if (!device.is_used()) return;
  if (device.backend == nullptr) {
    group.setBackend(device.type, Group::BackendType::GLOO, group.getBackend(c10::DeviceType::CPU));
    return;
  }
  const auto own = c10::make_intrusive<c10d::PrefixStore>("device", store);
  const auto backend = device.backend->make(own, group.getRank(), group.getSize(), timeout);
  group.setBackend(device.type, Group::strToBackendType(backend->getBackendName()), backend);
}

}  // namespace tessera::comm
