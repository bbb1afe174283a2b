#include "tessera/comm/c10d/call_log.h"

#include <latch>
#include <thread>

#include "tessera/comm/backends.h"
#include "tessera/comm/c10d/group.h"
#include "tests/comm/c10d/gloo_threads.h"
#include "tests/comm/collectives.h"
#include "tests/support/errors.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using testing::error_of;
using testing::run_gloo_threads;

OpInfo gather(const std::string& label, int64_t bytes = 64) {
  return {.name = "all_gather", .label = label, .bytes = bytes, .dtype = at::kFloat};
}

TEST(CallLog, FindsTheFirstCallThatDiffers) {
  CallLog mine(0), theirs(1);
  mine.add(1, gather("a"));
  theirs.add(1, gather("a"));
  EXPECT_FALSE(mine.difference(1, theirs.text()));
  mine.add(1, gather("b"));
  EXPECT_FALSE(mine.difference(1, theirs.text()));  // they are behind
  theirs.add(1, gather("c"));
  theirs.add(1, gather("b"));
  const std::string want =
      "the ranks disagree: rank 0 called all_gather (b, 64 B, Float), rank 1 called all_gather (c, 64 B, Float)";
  EXPECT_EQ(mine.difference(1, theirs.text()).value(), want);
  EXPECT_EQ(theirs.difference(0, mine.text()).value(), want);
}

TEST(CallLog, CountsEveryGroupOnItsOwn) {
  CallLog mine(0), theirs(1);
  EXPECT_EQ(mine.add(1, gather("a")), 0);
  EXPECT_EQ(mine.add(2, gather("b")), 0);
  EXPECT_EQ(mine.add(1, gather("c")), 1);
  theirs.add(2, gather("b"));
  theirs.add(1, gather("a"));
  EXPECT_FALSE(mine.difference(1, theirs.text()));
  theirs.add(2, gather("c"));
  EXPECT_FALSE(mine.difference(1, theirs.text()));
}

TEST(CallLog, KeepsWhatIsInFlightAndLittleMore) {
  CallLog mine(0), theirs(1);
  for (int i = 0; i < 1000; ++i) {
    mine.add(1, gather("unit " + std::to_string(i)));
    theirs.add(1, gather(i == 900 ? "odd" : "unit " + std::to_string(i)));
  }
  EXPECT_HAS(mine.difference(1, theirs.text()).value(), "rank 1 called all_gather (odd, 64 B, Float)");
  for (int i = 0; i < 1000; ++i)
    mine.done(1, i);
  EXPECT_LT(mine.text().size(), 2000u);
  EXPECT_FALSE(mine.difference(1, theirs.text()));
}

TEST(CallLog, LabelsMayHoldAnything) {
  CallLog mine(0), theirs(1);
  mine.add(1, gather("a\n12:,\x1f"));
  theirs.add(1, gather("a\n12:,\x1f"));
  EXPECT_FALSE(mine.difference(1, theirs.text()));
  theirs.add(1, gather(""));
  mine.add(1, gather(":"));
  EXPECT_TRUE(mine.difference(1, theirs.text()));
}

TEST(CallLog, NothingIsConcludedFromATextThatIsCutOff) {
  CallLog mine(0), theirs(1);
  mine.add(1, gather("a"));
  theirs.add(1, gather("b"));
  const std::string text = theirs.text();
  EXPECT_FALSE(mine.difference(1, ""));
  EXPECT_FALSE(mine.difference(1, "garbage"));
  for (size_t length = 0; length < text.size(); ++length)
    EXPECT_FALSE(mine.difference(1, text.substr(0, length))) << length;
  EXPECT_TRUE(mine.difference(1, text));
}

TEST(CallLog, ComparesWhatTwoRanksSendEachOther) {
  const OpInfo info{.name = "all_to_all", .label = "tokens", .bytes = 24, .dtype = at::kFloat};
  OpInfo larger = info;
  larger.bytes = 32;
  CallLog mine(0), theirs(1);
  mine.add(1, info, {.sent = {8, 16}, .received = {8, 4}});
  theirs.add(1, larger, {.sent = {4, 28}, .received = {16, 28}});
  EXPECT_FALSE(mine.difference(1, theirs.text()));
  mine.add(1, info, {.sent = {8, 16}, .received = {8, 4}});
  theirs.add(1, larger, {.sent = {4, 28}, .received = {20, 28}});
  const std::string want =
      "the ranks disagree: in all_to_all (tokens, 24 B) rank 0 sends 16 B to rank 1, which expects 20 B";
  EXPECT_EQ(mine.difference(1, theirs.text()).value(), want);
  EXPECT_EQ(theirs.difference(0, mine.text()).value(), want);
}

// ---- ranks over Gloo: what each of them is told

using Body = std::function<void(int, const GroupPtr&)>;

// What `body` throws on each rank, empty for nothing. All ranks stay until the last has ended.
std::vector<std::string> errors_of(int size, const Body& body) {
  std::vector<std::string> said(size);
  std::latch ended(size);
  run_gloo_threads(size, [&](int rank, testing::TorchGroup torch) {
    const auto group = make_c10d_group(nullptr, torch, C10dPath::ByDevice);
    said[rank] = error_of([&] { body(rank, group); });
    ended.arrive_and_wait();
  });
  return said;
}

// Runs all cases at once, because each takes the seconds after which calls are compared.
struct Case {
  const char* name;
  int size;
  Body body;
  std::vector<std::string> want;  // parts of the errors; empty: nobody may fail
};

void expect_errors(const std::vector<Case>& cases) {
  std::vector<std::vector<std::string>> said(cases.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < cases.size(); ++i)
    threads.emplace_back([&, i] { said[i] = errors_of(cases[i].size, cases[i].body); });
  for (auto& thread : threads)
    thread.join();
  for (size_t i = 0; i < cases.size(); ++i) {
    for (const std::string& text : said[i]) {
      if (cases[i].want.empty()) {
        EXPECT_EQ(text, "") << cases[i].name;
      }
      for (const std::string& part : cases[i].want)
        EXPECT_HAS(text, part) << cases[i].name;
    }
  }
}

Pending gather_unit(Group& group, const std::string& label, int64_t n = 16) {
  return group.all_gather(at::ones({n * group.size()}), at::ones({n}), label);
}

TEST(DifferentCalls, AreNamedOnEveryRank) {
  expect_errors({
      {"labels",
       2,
       [](int rank, const GroupPtr& group) { gather_unit(*group, rank == 0 ? "unit 'a'" : "unit 'b'").wait(); },
       {"all_gather (unit '", " failed after ",
        "the ranks disagree: rank 0 called all_gather (unit 'a', 128 B, Float), rank 1 called all_gather (unit 'b', "
        "128 B, Float)"}},
      {"operations",
       2,
       [](int rank, const GroupPtr& group) {
         auto whole = at::ones({40000}), part = at::ones({20000});
         (rank == 0 ? group->all_gather(whole, part, "x") : group->reduce_scatter(part, whole, ReduceOp::Sum, "x"))
             .wait();
       },
       {"rank 0 called all_gather (x, 160000 B, Float), rank 1 called reduce_scatter (x, 160000 B, Float, sum)"}},
      {"reductions",
       2,
       [](int rank, const GroupPtr& group) {
         auto t = at::ones({4});
         group->all_reduce(t, rank == 0 ? ReduceOp::Sum : ReduceOp::Max, "x").wait();
       },
       {"rank 0 called all_reduce (x, 16 B, Float, sum), rank 1 called all_reduce (x, 16 B, Float, max)"}},
      {"cycle of 2",
       2,
       [](int, const GroupPtr& group) { testing::wait_in_a_cycle(*group); },
       {testing::kCycleBegin, testing::kCycleEnd}},
      {"cycle of 3",
       3,
       [](int, const GroupPtr& group) { testing::wait_in_a_cycle(*group); },
       {testing::kCycleBegin, testing::kCycleEnd}},
      {"no cycle", 2, [](int, const GroupPtr& group) { testing::expect_no_cycle(*group, 7s); }, {}},
      {"dtypes",
       2,
       [](int rank, const GroupPtr& group) {
         group->broadcast(at::ones({4}, rank == 0 ? at::kFloat : at::kInt), 0).wait();
       },
       {"rank 0 called broadcast (16 B, Float, root 0), rank 1 called broadcast (16 B, Int, root 0)"}},
      {"roots",
       2,
       [](int rank, const GroupPtr& group) { group->broadcast(at::ones({4}), rank).wait(); },
       {"rank 0 called broadcast (16 B, Float, root 0), rank 1 called broadcast (16 B, Float, root 1)"}},
      {"sizes",
       3,
       [](int rank, const GroupPtr& group) {
         auto t = at::ones({rank == 1 ? 9 : 8});
         group->all_reduce(t, ReduceOp::Sum, "w").wait();
       },
       {"called all_reduce (w, 32 B, Float, sum)", "rank 1 called all_reduce (w, 36 B, Float, sum)"}},
      {"splits",
       2,
       [](int rank, const GroupPtr& group) {
         const std::vector<int64_t> to_others = rank == 0 ? std::vector<int64_t>{1, 3} : std::vector<int64_t>{2, 2};
         const std::vector<int64_t> from_others = rank == 0 ? std::vector<int64_t>{1, 2} : std::vector<int64_t>{2, 2};
         group->all_to_all(at::ones({rank == 0 ? 3 : 4}), at::ones({4}), from_others, to_others, "tokens").wait();
       },
       {"in all_to_all (tokens, 16 B) rank 0 sends 12 B to rank 1, which expects 8 B"}},
      {"barriers",
       3,
       [](int rank, const GroupPtr& group) { group->barrier(rank == 2 ? "save" : "step"); },
       {"called barrier (step, 0 B)", "rank 2 called barrier (save, 0 B)"}},
  });
}

TEST(DifferentCalls, AreNamedInWhateverOrderTheyWereMade) {
  expect_errors({
      {"two in flight in another order",
       2,
       [](int rank, const GroupPtr& group) {
         auto first = gather_unit(*group, rank == 0 ? "a" : "b");
         auto second = gather_unit(*group, rank == 0 ? "b" : "a");
         first.wait();
         second.wait();
       },
       {"rank 0 called all_gather (a, 128 B, Float), rank 1 called all_gather (b, 128 B, Float)"}},
      {"many in flight",
       2,
       [](int rank, const GroupPtr& group) {
         std::vector<Pending> pending;
         for (int i = 0; i < 200; ++i)
           pending.push_back(gather_unit(*group, "unit " + std::to_string(rank == 1 && i < 2 ? 1 - i : i)));
         for (Pending& p : pending)
           p.wait();
       },
       {"rank 0 called all_gather (unit 0, 128 B, Float), rank 1 called all_gather (unit 1, 128 B, Float)"}},
      {"a call that one rank skips",
       2,
       [](int rank, const GroupPtr& group) {
         gather_unit(*group, "both").wait();
         if (rank == 0) gather_unit(*group, "rank 0 only").wait();
         group->barrier("end");
       },
       {"rank 0 called all_gather (rank 0 only, 128 B, Float), rank 1 called barrier (end, 0 B)"}},
      {"one of three, seconds later",
       3,
       [](int rank, const GroupPtr& group) {
         if (rank == 2) std::this_thread::sleep_for(4s);  // the others compare after 3
         gather_unit(*group, rank == 2 ? "b" : "a").wait();
       },
       {"called all_gather (a, 192 B, Float)", "rank 2 called all_gather (b, 192 B, Float)"}},
      {"siblings",
       2,
       [](int rank, const GroupPtr& group) {
         const auto sibling = group->sibling();
         auto fine = gather_unit(*group, "fine");
         gather_unit(*sibling, rank == 0 ? "c" : "d").wait();
       },
       {"rank 0 called all_gather (c, 128 B, Float), rank 1 called all_gather (d, 128 B, Float)"}},
  });
}

TEST(EqualCalls, HarmNobody) {
  expect_errors({
      {"a slow rank",
       3,
       [](int rank, const GroupPtr& group) {
         for (int step = 0; step < 2; ++step) {
           auto first = gather_unit(*group, "a"), second = gather_unit(*group, "b", 30000);
           if (rank == 1 && step == 0) std::this_thread::sleep_for(4s);
           first.wait();
           second.wait();
         }
         if (rank == 2) std::this_thread::sleep_for(4s);  // the text that it showed above is old now
         group->barrier("end");
       },
       {}},
      {"other splits on every rank",
       3,
       [](int rank, const GroupPtr& group) {
         const int64_t n = 30000;
         if (rank == 1) std::this_thread::sleep_for(4s);
         std::vector<int64_t> out, in;
         for (int other = 0; other < 3; ++other) {
           in.push_back(rank * other * n);
           out.push_back(other * rank * n);
         }
         group->all_to_all(at::ones({rank * 3 * n}), at::ones({rank * 3 * n}), out, in, "tokens").wait();
         group->barrier("end");
       },
       {}},
      {"siblings in another order",
       2,
       [](int rank, const GroupPtr& group) {
         const auto sibling = group->sibling();
         for (int step = 0; step < 2; ++step) {
           auto first = gather_unit(rank == 0 ? *group : *sibling, rank == 0 ? "a" : "b");
           if (rank == 0) std::this_thread::sleep_for(2s);
           auto second = gather_unit(rank == 0 ? *sibling : *group, rank == 0 ? "b" : "a");
           if (rank == 1) std::this_thread::sleep_for(4s);
           first.wait();
           second.wait();
         }
       },
       {}},
      {"more calls than there are tags",
       2,
       [](int, const GroupPtr& group) {
         std::vector<Pending> pending;
         std::vector<at::Tensor> got;
         for (int i = 0; i < 600; ++i) {
           got.push_back(at::full({i % 7 == 0 ? 20000 : 3}, i));
           pending.push_back(group->all_reduce(got.back(), ReduceOp::Sum, "same"));
         }
         for (Pending& p : pending)
           p.wait();
         for (int i = 0; i < 600; ++i)
           EXPECT_TRUE(got[i].eq(2 * i).all().item<bool>()) << i;
       },
       {}},
  });
}

}  // namespace
}  // namespace tessera::comm
