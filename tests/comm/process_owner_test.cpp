#include "tessera/comm/process_owner.h"

#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <thread>

#include "tests/comm/collectives.h"
#include "tests/comm/process_ranks.h"
#include "tests/support/ranks.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using testing::message_of;

// What `body` returns in a forked copy of this process, which exits as a program does where `whole`.
int in_copy(const std::function<bool()>& body, bool whole = false) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // a copy that hangs ends by a signal
    const int code = body() ? 0 : 1;
    whole ? exit(code) : _exit(code);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(ProcessOwner, IsNotInACopy) {
  const ProcessOwner owner;
  EXPECT_TRUE(owner.is_here());
  EXPECT_EQ(in_copy([&] { return !owner.is_here() && ProcessOwner().is_here(); }), 0);
  EXPECT_TRUE(owner.is_here());
}

struct WithThread {
  ~WithThread() { thread.join(); }
  std::thread thread{[] { std::this_thread::sleep_for(200ms); }};
};

TEST(ProcessOwner, WhatHasThreadsIsNotDestroyedInACopy) {
  auto made = make_owned<WithThread>();
  const std::weak_ptr<WithThread> known = made;
  EXPECT_EQ(in_copy([&] {
              made.reset();
              return known.expired();
            }),
            0);
  made.reset();
}

// A group is of use to its rank after copies of it have called, aborted and gone. The environment says of which kind.
TEST(ProcessOwner, CopiesOfGroupsDoNotTouchTheRanks) {
  if (!testing::is_rank()) {
    for (const auto& env : {testing::kShared, testing::kGloo, testing::Environment{{"TESSERA_TEST_HOSTS", "2"}}})
      testing::expect_success(testing::run_processes(3, env));
    return;
  }
  if (const char* hosts = std::getenv("TESSERA_TEST_HOSTS"))
    setenv("TESSERA_HOST_ID", std::stoi(std::getenv("RANK")) < std::stoi(hosts) ? "a" : "b", 1);
  auto group = environment_group(60s);
  auto sibling = group->sibling();
  group->barrier();
  for (const bool whole : {false, true}) {
    const auto copy = [&] {
      auto t = at::ones({8});
      const auto text = message_of<c10::DistBackendError>([&] { sibling->all_reduce(t, ReduceOp::Sum).wait(); });
      EXPECT_HAS(text, "this process is a forked copy of the rank");
      EXPECT_THROW(group->barrier(), c10::DistBackendError);
      EXPECT_THROW(group->sibling(), c10::DistBackendError);
      group->abort("the copy is in trouble");
      sibling.reset();
      group.reset();
      return !::testing::Test::HasFailure();
    };
    EXPECT_EQ(in_copy(copy, whole), 0) << whole;
    auto t = at::ones({100000});
    sibling->all_reduce(t, ReduceOp::Sum).wait();
    EXPECT_EQ(t.sum().item<float>(), 100000.0f * group->size());
  }
  group->barrier();
}

TEST(ProcessOwner, CopiesOfThreadsDoNotHang) {
  testing::run_ranks(2, [](int rank, GroupPtr group) {
    group->barrier();
    if (rank == 1) group->barrier();  // most likely blocked when the other forks
    if (rank == 0) {
      EXPECT_EQ(in_copy([&] {
                  EXPECT_HAS(message_of<c10::DistBackendError>([&] { group->barrier(); }), "forked copy");
                  group->abort("the copy is in trouble");
                  group.reset();
                  return !::testing::Test::HasFailure();
                }),
                0);
      group->barrier();
    }
  });
}

}  // namespace
}  // namespace tessera::comm
