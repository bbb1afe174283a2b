#include "tessera/comm/hosts/group.h"

#include <latch>

#include "tests/comm/collectives.h"
#include "tests/comm/hosts/threads.h"

namespace tessera::comm {
namespace {

using testing::message_of;

void over_hosts(const std::vector<int>& host_of, const std::function<void(GroupPtr)>& body) {
  testing::run_hosts(host_of, [&](int rank, ShmSharePtr here, const std::function<GroupPtr()>& between) {
    body(hosts_group({host_of}, rank, std::move(here), between));
  });
}

TEST(HostsGroup, RandomCollectivesInFlight) {
  for (const auto& host_of : testing::kHosts) {
    over_hosts(host_of, [&](GroupPtr group) {
      EXPECT_EQ(group->name(), "shared memory and gloo");
      EXPECT_EQ(group->size(), static_cast<int>(host_of.size()));
      testing::random_collectives(*group, 60, 41, 20011);
      group->barrier();
    });
  }
}

TEST(HostsGroup, ALaunchedCallGoesOnByItself) {
  std::latch through(3);
  over_hosts({0, 0, 1, 1}, [&](GroupPtr group) {
    auto t = at::ones({500000});
    auto pending = group->all_reduce(t, ReduceOp::Sum);
    if (group->rank() == 3) through.wait();  // looks after its handle when the others have their results
    pending.wait();
    if (group->rank() != 3) through.count_down();
    EXPECT_TRUE(t.eq(4).all().item<bool>());
    group->barrier();
  });
}

// What every rank says when some of them fail; nobody goes before all have said it.
std::vector<std::string> announced_by(const std::function<std::string(GroupPtr)>& body) {
  std::vector<std::string> said(4);
  std::latch ended(4);
  over_hosts({0, 1, 1, 0}, [&](GroupPtr group) {
    said[group->rank()] = body(group);
    ended.arrive_and_wait();
  });
  return said;
}

TEST(HostsGroup, DifferentCallsOnOneHostAreNamedOnAll) {
  const auto said = announced_by([](const GroupPtr& group) {
    auto t = at::ones({8});
    const auto label = group->rank() == 2 ? "unit y" : "unit x";
    const auto text = message_of<c10::DistBackendError>([&] { group->all_reduce(t, ReduceOp::Sum, label).wait(); });
    EXPECT_HAS(message_of<c10::DistBackendError>([&] { group->barrier("later"); }), "the ranks disagree: rank 1");
    return text;
  });
  for (const auto& text : said) {
    EXPECT_HAS(text, "the ranks disagree: rank 1 called ");
    EXPECT_HAS(text, "all_reduce (unit x, 32 B, Float, sum)");
    EXPECT_HAS(text, "rank 2 called ");
    EXPECT_HAS(text, "all_reduce (unit y, 32 B, Float, sum)");
  }
}

}  // namespace
}  // namespace tessera::comm
