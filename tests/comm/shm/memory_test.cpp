// Group::shared_memory over every kind of group: threads, processes that share memory, and those that cannot.
#include "tessera/comm/shm/memory.h"

#include <csignal>
#include <filesystem>
#include <fstream>

#include "tessera/comm/backends.h"
#include "tessera/comm/shm/group.h"
#include "tests/comm/collectives.h"
#include "tests/comm/process_ranks.h"
#include "tests/support/ranks.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using testing::await_marks;
using testing::in_ranks;
using testing::kShared;
using testing::leave_mark;
using testing::message_of;
using testing::run_threads;

constexpr int64_t kTooMuchToMap = int64_t{1} << 55;  // for one process's allocator, too

// Can be mapped, also under sanitizers, but there is no such memory.
int64_t too_much() {
  return 2 * int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGE_SIZE);
}

std::vector<GroupPtr> groups_of(const std::string& kind, int size) {
  return kind == "threads" ? thread_groups(size, 2min) : shm_thread_groups(size, 2min);
}

// Mappings and open files of this process that have to do with segments.
int segments_held() {
  int count = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    count += line.find("memfd:tessera") != std::string::npos ? 1 : 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const auto target = std::filesystem::read_symlink(entry.path(), gone).string();
    count += target.find("memfd:tessera") != std::string::npos ? 1000 : 0;
  }
  return count;
}

class SharedMemory : public ::testing::TestWithParam<std::tuple<std::string, int>> {};
INSTANTIATE_TEST_SUITE_P(Groups, SharedMemory,
                         ::testing::Combine(::testing::Values("threads", "segments"), ::testing::Values(1, 2, 3, 5)));

TEST_P(SharedMemory, IsOneZeroedMemoryForAllRanks) {
  const auto [kind, size] = GetParam();
  run_threads(groups_of(kind, size), [size = size](int rank, const GroupPtr& group) {
    for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{size * 1000}, int64_t{3 << 20}}) {
      const at::Tensor memory = group->shared_memory(bytes, "x");
      ASSERT_EQ(memory.numel(), bytes);
      ASSERT_EQ(memory.scalar_type(), at::kByte);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data_ptr()) % 64, 0U);
      EXPECT_FALSE(memory.any().item<bool>());
      group->barrier("all have looked");
      const int64_t part = bytes / size;
      memory.narrow(0, rank * part, part).fill_(rank + 1);
      group->barrier("all have written");
      for (int r = 0; r < size; ++r)
        EXPECT_TRUE(memory.narrow(0, r * part, part).eq(r + 1).all().item<bool>());
      group->barrier("all have read");
    }
  });
}

TEST_P(SharedMemory, OutlivesItsGroupAndIsNotMixedUpWithOthers) {
  const auto [kind, size] = GetParam();
  std::vector<at::Tensor> first(size), second(size), third(size);
  run_threads(groups_of(kind, size), [&](int rank, GroupPtr group) {
    const GroupPtr sibling = group->sibling();
    first[rank] = group->shared_memory(100, "first");
    second[rank] = sibling->shared_memory(100, "second");
    third[rank] = group->shared_memory(100, "third");
  });
  first[0].fill_(1);
  second[0].fill_(2);
  for (int r = 0; r < size; ++r) {
    EXPECT_TRUE(first[r].eq(1).all().item<bool>());
    EXPECT_TRUE(second[r].eq(2).all().item<bool>());
    EXPECT_TRUE(third[r].eq(0).all().item<bool>());
  }
}

TEST(SharedMemorySizes, TooMuchIsAnErrorOnAllRanksThatLeavesTheGroupWell) {
  for (const std::string kind : {"threads", "segments"}) {
    const auto groups = groups_of(kind, 3);
    const int before = segments_held();
    run_threads(groups, [&](int, const GroupPtr& group) {
      const int64_t bytes = kind == "threads" ? kTooMuchToMap : too_much();
      const auto text = message_of<c10::DistBackendError>([&] { group->shared_memory(bytes, "parameters"); });
      EXPECT_HAS(text, "[comm] ");
      EXPECT_HAS(text, std::to_string(bytes) + " B");
      EXPECT_HAS(text, " B are needed");
      if (kind == "segments") {
        EXPECT_HAS(message_of<c10::DistBackendError>([&] { group->shared_memory(kTooMuchToMap); }), "cannot map");
      }
      EXPECT_EQ(group->shared_memory(10).numel(), 10);
    });
    EXPECT_EQ(segments_held(), before);
  }
  EXPECT_THROW(single_group()->shared_memory(-1), c10::ValueError);
}

TEST(SharedMemorySizes, DifferentSizesAreNamedOnAllRanks) {
  for (const std::string kind : {"threads", "segments"}) {
    run_threads(groups_of(kind, 2), [](int rank, const GroupPtr& group) {
      const auto text = message_of<c10::DistBackendError>([&] { group->shared_memory(100 + rank, "x"); });
      EXPECT_HAS(text, "the ranks disagree");
      EXPECT_HAS(text, "101 B");
    });
  }
}

TEST(SharedMemorySizes, NoFileStaysOpenAndNothingStaysMapped) {
  const auto groups = groups_of("segments", 3);
  const int before = segments_held();
  for (int round = 0; round < 20; ++round) {
    std::vector<at::Tensor> kept(3);
    run_threads(groups, [&](int rank, const GroupPtr& group) { kept[rank] = group->shared_memory(1 << 20, "x"); });
    EXPECT_EQ(segments_held(), before + 3) << "one mapping a rank, no file";
  }
  EXPECT_EQ(segments_held(), before);
}

// ---- processes

TEST(SharedMemoryProcesses, ShareOneMemory) {
  if (!in_ranks({3}, kShared)) return;
  const auto group = environment_group(60s);
  at::Tensor memory = group->shared_memory(4096 * group->size(), "counters");
  for (int turn = 0; turn < group->size(); ++turn) {
    if (turn == group->rank()) memory.add_(1);
    group->barrier();
  }
  EXPECT_TRUE(memory.eq(group->size()).all().item<bool>());
  EXPECT_EQ(message_of<c10::DistBackendError>([&] { group->shared_memory(too_much(), "parameters"); }).find("[comm] "),
            0U);
  group->barrier();
}

TEST(SharedMemoryProcesses, HaveNoneOverGloo) {
  if (!in_ranks({2}, testing::kGloo)) return;
  EXPECT_FALSE(environment_group(60s)->shared_memory(100, "x").defined());
}

// Rank 0 dies after the group is there: the others, who wait for its segment, say so and hold nothing.
TEST(SharedMemoryProcesses, ADeadRankIsAnErrorOfTheOthers) {
  if (!in_ranks({3}, kShared, /*lost=*/0)) return;
  const auto group = environment_group(60s);
  leave_mark("met");
  if (group->rank() == 0) {
    EXPECT_TRUE(await_marks("met", {1, 2}));
    raise(SIGKILL);
  }
  const int before = segments_held();
  const auto text = message_of<c10::DistBackendError>([&] { group->shared_memory(1 << 20, "parameters"); });
  EXPECT_HAS(text, "rank");
  EXPECT_HAS(text, "1048576 B of shared memory for parameters");
  EXPECT_EQ(segments_held(), before);
}

}  // namespace
}  // namespace tessera::comm
