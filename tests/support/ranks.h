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
  using comm::Axes;
  const auto of = [&](comm::Axis axis) { return sizes.contains(axis) ? sizes.at(axis) : 1; };
  // The rank's number along `axes`, and along all others.
  const auto place = [&](int rank, Axes axes) {
    int inside = 0, outside = 0, rest = 1;
    for (const comm::Axis axis : comm::kAxes)
      rest *= of(axis);
    for (const comm::Axis axis : comm::kAxes) {
      rest /= of(axis);
      int& number = axes.has(axis) ? inside : outside;
      number = number * of(axis) + rank / rest % of(axis);
    }
    return std::pair(inside, outside);
  };
  std::vector<Axes> sets(comm::kAxes.begin(), comm::kAxes.end());
  if (of(comm::Axis::DpShard) > 1 && of(comm::Axis::Sp) > 1) sets.push_back(comm::kStateAxes);
  std::map<Axes, std::map<int, std::vector<comm::GroupPtr>>> groups;
  int world = 1;
  for (const auto& [axis, size] : sizes)
    world *= size;
  for (const Axes axes : sets) {
    int size = 1;
    for (const comm::Axis axis : comm::kAxes)
      size *= axes.has(axis) ? of(axis) : 1;
    for (int other = 0; other < world / size; ++other)
      groups[axes][other] = comm::thread_groups(size, std::chrono::minutes(2));
  }
  run_ranks(world, [&](int rank, const comm::GroupPtr&) {
    comm::Mesh mesh;
    std::vector<comm::GroupPtr> mine;
    for (const Axes axes : sets) {
      const auto [inside, outside] = place(rank, axes);
      mine.push_back(groups.at(axes).at(outside)[inside]);
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
