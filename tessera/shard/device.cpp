#include "tessera/shard/device.h"

#include <dlfcn.h>

#include <array>
#include <mutex>

#include "tessera/base/error.h"

namespace tessera::shard {
namespace {

constexpr auto kEntry = "tessera_device_table";
constexpr int kTypes = static_cast<int>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES);

struct Loaded {
  const kernels::DeviceTable* table = nullptr;
  std::string why_not;
};

Loaded load(c10::DeviceType type) {
  const std::string library = "libtessera_" + c10::DeviceTypeName(type, /*lower_case=*/true) + ".so";
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr)
    return {nullptr, std::string("its kernels were not found (") + dlerror() +
                         "); build Tessera where that device's compiler is found"};
  const auto entry = reinterpret_cast<TesseraDeviceTable>(dlsym(handle, kEntry));
  if (entry == nullptr) return {nullptr, library + " has no " + kEntry + "()"};
  const kernels::DeviceTable* const table = entry();
  if (table->version != kernels::kDeviceTableVersion)
    return {nullptr, library + " was made for another version of Tessera; build both together"};
  std::string why_not = table->why_unusable();
  return {why_not.empty() ? table : nullptr, std::move(why_not)};
}

// The table of a type is loaded once and never let go, as libraries are.
const Loaded& loaded(c10::DeviceType type) {
  static std::array<std::once_flag, kTypes> once;
  static std::array<Loaded, kTypes> tables;
  const auto place = static_cast<size_t>(type);
  std::call_once(once[place], [&] { tables[place] = load(type); });
  return tables[place];
}

}  // namespace

const kernels::DeviceTable& device_kernels(c10::DeviceType type) {
  const Loaded& found = loaded(type);
  TESSERA_CHECK_BUILT(found.table != nullptr, "shard.device", "tensors on device type '",
                      c10::DeviceTypeName(type, true), "' cannot be trained: ", found.why_not,
                      "; or move the model to the CPU");
  return *found.table;
}

void check_device(c10::Device device) {
  if (!device.is_cpu()) device_kernels(device.type());
}

bool is_captured(c10::Device device) {
  bool captured = false;
  if (!device.is_cpu())
    on_device(device, [&](const kernels::DeviceTable& table, void* stream) { captured = table.is_captured(stream); });
  return captured;
}

}  // namespace tessera::shard
