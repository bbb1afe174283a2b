// Torch process groups (Gloo) whose ranks are threads of this process.
#pragma once

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace tessera::testing {

using TorchGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

// Returns when all ranks have come: who releases its group earlier takes connections with it that others are just making.
inline void await_all(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
  const auto key = [](int r) { return "made_" + std::to_string(r); };
  store->set(key(rank), std::string("1"));
  for (int r = 0; r < size; ++r)
    store->get(key(r));
}

// Runs fn(rank, process group) on `size` threads; rethrows the first exception.
inline void run_gloo_threads(int size, const std::function<void(int, TorchGroup)>& fn) {
  using Group = c10d::ProcessGroup;
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> errors(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(60));
        options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
        auto gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
        auto group = c10::make_intrusive<Group>(store, rank, size);
        group->setBackend(c10::DeviceType::CPU, Group::BackendType::GLOO, gloo);
        group->setDefaultBackend(Group::BackendType::GLOO);
        group->setGroupName("threads");
        await_all(store, rank, size);
        fn(rank, group);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads)
    thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace tessera::testing
