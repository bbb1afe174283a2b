// Test support: ranks as threads of this process.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
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

// Ranks as threads on a mesh of `replicas` x `shards`; the rank that fn gets counts replica by replica.
inline void run_meshes(int replicas, int shards, const std::function<void(int, const comm::Mesh&)>& fn) {
  std::vector<std::vector<comm::GroupPtr>> rows, columns;
  for (int r = 0; r < replicas; ++r)
    rows.push_back(comm::thread_groups(shards, std::chrono::minutes(2)));
  for (int s = 0; s < shards; ++s)
    columns.push_back(comm::thread_groups(replicas, std::chrono::minutes(2)));
  run_ranks(replicas * shards, [&](int rank, const comm::GroupPtr&) {
    const auto row = std::move(rows[rank / shards][rank % shards]);
    const auto column = std::move(columns[rank % shards][rank / shards]);
    comm::Mesh mesh(row);
    mesh.set(comm::Axis::DpReplicate, column);
    try {
      fn(rank, mesh);
    } catch (const std::exception& error) {
      row->abort(error.what());
      column->abort(error.what());
      throw;
    }
  });
}

}  // namespace tessera::testing
