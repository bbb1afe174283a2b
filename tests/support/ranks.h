// Test support: ranks as threads of this process.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tessera/comm/backends.h"
#include "tessera/comm/mesh.h"
#include "tests/support/vector_kernels.h"

namespace tessera::testing {

// Runs fn(rank, groups[rank]) on a thread for each rank and returns when all have ended. When one throws, its
// group is aborted, so that the others end too, and the exception that came first is thrown again
// here. Note that gtest's ASSERT_* only leave the function they are in: in a rank, prefer EXPECT_*
// or throw.
inline void run_threads(std::vector<comm::GroupPtr> groups, const std::function<void(int, comm::GroupPtr)>& fn) {
  choose_vector_kernels();
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < static_cast<int>(groups.size()); ++rank) {
    threads.emplace_back([&, rank, group = std::move(groups[rank])]() mutable {
      try {
        fn(rank, group);
      } catch (...) {
        std::string what = "unknown exception";
        {
          const std::scoped_lock lock(mutex);
          if (!first) first = std::current_exception();
        }
        try {
          throw;
        } catch (const std::exception& error) {
          what = error.what();
        } catch (...) {
        }
        group->abort(what);
      }
    });
  }
  for (auto& thread : threads)
    thread.join();
  if (first) std::rethrow_exception(first);
}

// The same over a thread group of `size` ranks.
inline void run_ranks(int size, const std::function<void(int, comm::GroupPtr)>& fn,
                      std::chrono::milliseconds timeout = std::chrono::minutes(2)) {
  run_threads(comm::thread_groups(size, timeout), fn);
}

// Ranks as threads on a mesh: how many along each axis, and the rank that fn gets counts in the order of the axes.
using AxisSizes = std::map<comm::Axis, int>;
inline void run_axes(const AxisSizes& sizes, const std::function<void(int, const comm::Mesh&)>& fn) {
  comm::MeshShape shape;
  for (const auto& [axis, size] : sizes)
    shape.sizes[static_cast<size_t>(axis)] = size;
  const int world = shape.size(comm::kAxes);
  std::map<std::vector<int>, std::vector<comm::GroupPtr>> groups;  // by their ranks
  for (const comm::Axes axes : shape.groups())
    for (int rank = 0; rank < world; ++rank)
      if (auto& group = groups[shape.ranks_along(axes, rank)]; group.empty())
        group = comm::thread_groups(shape.size(axes), std::chrono::minutes(2));
  run_ranks(world, [&](int rank, const comm::GroupPtr&) {
    comm::Mesh mesh;
    std::vector<comm::GroupPtr> mine;
    for (const comm::Axes axes : shape.groups()) {
      const std::vector<int> ranks = shape.ranks_along(axes, rank);
      mine.push_back(groups.at(ranks)[std::find(ranks.begin(), ranks.end(), rank) - ranks.begin()]);
      mesh.set(axes, mine.back());
    }
    try {
      fn(rank, mesh);
    } catch (const std::exception& error) {
      for (const comm::GroupPtr& group : mine)
        group->abort(error.what());
      throw;
    }
  });
}

// Hybrid sharding.
inline void run_meshes(int replicas, int shards, const std::function<void(int, const comm::Mesh&)>& fn) {
  run_axes({{comm::Axis::DpReplicate, replicas}, {comm::Axis::DpShard, shards}}, fn);
}

}  // namespace tessera::testing
