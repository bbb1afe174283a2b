// Which units are gathered when: holds, calls, keeping, prefetching, changed orders.
#include "tessera/zero/unsharder.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "tests/support/ranks.h"

namespace tessera::testing {

using namespace zero;

namespace {

// Units of 64 elements, one scope each.
struct Chain {
  Chain(int units, int rank, const comm::GroupPtr& group, GatherOptions options) : unsharder(options, phases) {
    for (int i = 0; i < units; ++i) {
      std::vector<FlatParams::Item> items{
          {"p" + std::to_string(i), at::full({64}, static_cast<double>(i), at::kFloat).requires_grad_(true), {}}};
      flats.push_back(std::make_unique<FlatParams>("u" + std::to_string(i), std::move(items), at::kFloat, rank,
                                                   group->size(), true));
      unsharder.add(flats.back().get(), group);
    }
    for (int i = 0; i < units; ++i)
      unsharder.add_scope({i});
    root = unsharder.add_scope({});
  }

  // Which units are there, as "10-": gathered, sharded, on its way.
  std::string states() const {
    std::string text;
    for (const auto& flat : flats)
      text += flat->state() == ParamState::Ready ? '1' : flat->state() == ParamState::Sharded ? '0' : '-';
    return text;
  }
  std::string forward(const std::vector<int>& order, bool recorded = true) {
    std::string seen;
    unsharder.enter(root, false);
    for (const int i : order) {
      unsharder.enter(i, false);
      seen += (seen.empty() ? "" : " ") + states();
      unsharder.leave(i, false, recorded);
    }
    unsharder.leave(root, false, recorded);
    return seen;
  }
  std::string backward(const std::vector<int>& order) {
    std::string seen;
    unsharder.begin_backward({});
    for (const int i : order) {
      auto& call = calls.emplace_back(std::make_unique<ScopeCall>());
      call->units = {i};
      call->producers = 1;
      unsharder.call_made(*call);
      unsharder.call_opened(*call, false);
      seen += (seen.empty() ? "" : " ") + states();
      unsharder.call_closed(*call);
    }
    unsharder.end_backward();
    return seen;
  }

  std::vector<std::unique_ptr<FlatParams>> flats;
  std::vector<std::unique_ptr<ScopeCall>> calls;
  Phases phases;
  Unsharder unsharder;
  int root = -1;  // the scope of the model, around all others
};

void on_two_ranks(GatherOptions options, const std::function<void(Chain&, const comm::GroupPtr&)>& body,
                  int units = 3) {
  run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
    Chain chain(units, rank, group, options);
    body(chain, group);
  });
}

GatherOptions no_prefetch() {
  GatherOptions options;
  options.prefetch = false;
  return options;
}

}  // namespace

// A gather that fails in its last moment keeps no bucket.
TEST(Unsharder, FailedGathersGiveTheirBucketsBack) {
  for (const auto travel : {at::kFloat, at::kBFloat16}) {
    run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
      Chain chain(1, rank, group, {});
      chain.flats[0]->gather_in(travel);
      at::Tensor parameter = chain.flats[0]->items()[0].tensor;
      parameter.set_data(at::zeros({64}));
      EXPECT_ANY_THROW(chain.unsharder.enter(0, false));
      const int64_t bytes = chain.unsharder.bytes();
      for (int again = 0; again < 3; ++again)
        EXPECT_ANY_THROW(chain.unsharder.enter(0, false));
      EXPECT_EQ(chain.unsharder.bytes(), bytes);
      EXPECT_FALSE(chain.unsharder.inside_scope());
    });
  }
}

TEST(Unsharder, AUnitIsWholeOnlyWhileItIsUsed) {
  on_two_ranks(no_prefetch(), [](Chain& chain, const comm::GroupPtr& group) {
    EXPECT_EQ(chain.states(), "000");
    EXPECT_EQ(chain.forward({0, 1, 2}), "100 010 001");
    EXPECT_EQ(chain.backward({2, 1, 0}), "001 010 100");
    EXPECT_EQ(chain.states(), "000");
    EXPECT_EQ(group->stats().all_gather.calls, 6);
    EXPECT_EQ(chain.unsharder.bytes(), 64 * 4) << "one bucket serves all";
  });
}

TEST(Unsharder, TheUnitThatTheBackwardNeedsFirstStays) {
  on_two_ranks(no_prefetch(), [](Chain& chain, const comm::GroupPtr& group) {
    chain.forward({0, 1, 2});
    chain.backward({2, 1, 0});
    group->reset_stats();
    chain.forward({0, 1, 2});
    EXPECT_EQ(chain.states(), "001");
    chain.backward({2, 1, 0});
    EXPECT_EQ(group->stats().all_gather.calls, 5);
    chain.forward({0, 1, 2}, /*recorded=*/false);
    EXPECT_EQ(chain.states(), "000") << "no backward comes";
  });
}

TEST(Unsharder, TheNextUnitOfTheLastPassIsGatheredEarly) {
  on_two_ranks({}, [](Chain& chain, const comm::GroupPtr&) {
    EXPECT_EQ(chain.forward({0, 1, 2}), "100 010 001");
    EXPECT_EQ(chain.backward({2, 1, 0}), "001 010 100");
    EXPECT_EQ(chain.forward({0, 1, 2}), "1-0 01- 001");
    EXPECT_EQ(chain.backward({2, 1, 0}), "0-1 -10 100");
    EXPECT_EQ(chain.states(), "000");
  });
}

TEST(Unsharder, BudgetsLimitPrefetching) {
  GatherOptions crowded;
  crowded.max_live = 127;
  for (const GatherOptions& options : {no_prefetch(), crowded}) {
    on_two_ranks(options, [](Chain& chain, const comm::GroupPtr&) {
      chain.forward({0, 1, 2});
      EXPECT_EQ(chain.forward({0, 1, 2}), "100 010 001");
    });
  }
}

TEST(Unsharder, AReuseDistanceKeepsUnitsForTheBackward) {
  GatherOptions options = no_prefetch();
  options.reuse_distance = 2 * 64;
  on_two_ranks(options, [](Chain& chain, const comm::GroupPtr&) {
    chain.forward({0, 1, 2});
    chain.backward({2, 1, 0});
    EXPECT_EQ(chain.forward({0, 1, 2}), "100 010 011") << "u1 comes again after u2 twice, u0 after four units";
    EXPECT_EQ(chain.states(), "011");
    EXPECT_EQ(chain.backward({2, 1, 0}), "011 010 100");
    EXPECT_EQ(chain.states(), "000");
  });
}

TEST(Unsharder, ChangedOrdersAreFollowedAndNothingStays) {
  on_two_ranks({}, [](Chain& chain, const comm::GroupPtr&) {
    const std::vector<std::vector<int>> orders{{0, 1, 2}, {2, 0}, {1}, {0, 0, 1, 0, 2}, {2, 1, 0}, {0, 1, 2}};
    for (const auto& order : orders) {
      chain.forward(order, /*recorded=*/false);
      EXPECT_EQ(chain.states(), "000");
      chain.forward(order);
      chain.backward({order.rbegin(), order.rend()});
      EXPECT_EQ(chain.states(), "000");
    }
  });
}

TEST(Unsharder, NestedScopesCostNothing) {
  on_two_ranks(no_prefetch(), [](Chain& chain, const comm::GroupPtr& group) {
    const int outer = chain.unsharder.add_scope({0, 1});
    EXPECT_TRUE(chain.unsharder.enter(outer, false));
    EXPECT_FALSE(chain.unsharder.enter(0, false));
    EXPECT_TRUE(chain.unsharder.watched(0).empty());
    chain.unsharder.leave(0, false, true);
    EXPECT_EQ(chain.states(), "110");
    EXPECT_EQ(chain.unsharder.watched(outer), (std::vector<int>{0, 1}));
    chain.unsharder.leave(outer, false, false);
    EXPECT_EQ(chain.states(), "000");
    EXPECT_EQ(group->stats().all_gather.calls, 2);
  });
}

TEST(Unsharder, AScopeThatReadsAForeignUnitHoldsItFromThenOn) {
  on_two_ranks(no_prefetch(), [](Chain& chain, const comm::GroupPtr&) {
    chain.unsharder.enter(1, false);
    EXPECT_EQ(chain.unsharder.holding_scope(), 1);
    chain.unsharder.extend_scope(1, 0, false);
    EXPECT_EQ(chain.states(), "110");
    chain.unsharder.leave(1, false, false);
    EXPECT_EQ(chain.states(), "000");
    EXPECT_EQ(chain.forward({1}, false), "110");
    EXPECT_EQ(chain.states(), "000");
  });
}

TEST(Unsharder, LostEndsOfScopesAreMadeUpFor) {
  on_two_ranks(no_prefetch(), [](Chain& chain, const comm::GroupPtr&) {
    chain.unsharder.enter(0, false);
    chain.unsharder.enter(1, false);
    chain.unsharder.leave(0, false, false);  // 1 never said that it ended
    EXPECT_EQ(chain.states(), "000");
    chain.unsharder.enter(0, false);
    chain.unsharder.enter(2, false);
    chain.unsharder.abort_all();
    EXPECT_EQ(chain.states(), "000");
    chain.unsharder.leave(2, false, false);  // too late: ignored
    EXPECT_FALSE(chain.unsharder.inside_scope());
  });
}

TEST(Unsharder, AllGradientsOfAUnitReleaseIt) {
  on_two_ranks(no_prefetch(), [](Chain& chain, const comm::GroupPtr&) {
    ScopeCall call;  // its inputs carry no gradient
    call.units = {1};
    chain.unsharder.call_made(call);
    chain.unsharder.begin_backward({&call});
    chain.unsharder.call_opened(call, false);
    EXPECT_EQ(chain.states(), "010");
    chain.unsharder.gradient_arrived(1, 0);
    EXPECT_EQ(chain.states(), "000");
    chain.unsharder.end_backward();
    chain.unsharder.call_gone(call);
  });
}

TEST(Unsharder, AUnitIsOverWithTheLastOfItsCalls) {
  on_two_ranks(no_prefetch(), [](Chain& chain, const comm::GroupPtr&) {
    ScopeCall first, second;  // one module, called twice
    ScopeCall other;          // of a graph that this rank keeps, and another one does not
    for (ScopeCall* call : {&other, &first, &second}) {
      call->units = {1};
      call->producers = 1;
      chain.unsharder.call_made(*call);
    }
    for (int round = 0; round < 2; ++round) {  // the graph is kept
      chain.unsharder.begin_backward({&second, &first, &second});
      chain.unsharder.call_opened(second, false);
      chain.unsharder.call_opened(first, false);  // the node that made second's input is first's output
      EXPECT_TRUE(chain.unsharder.call_closed(second).empty());
      EXPECT_EQ(chain.states(), "010") << "first still needs it";
      EXPECT_EQ(chain.unsharder.call_closed(first), (std::vector<int>{1}));
      EXPECT_EQ(chain.states(), "000");
      chain.unsharder.end_backward();
    }
    for (ScopeCall* call : {&first, &other, &second})
      chain.unsharder.call_gone(*call);
  });
}

TEST(Unsharder, RegionsHoldAndUpdatesRefuseThem) {
  on_two_ranks(no_prefetch(), [](Chain& chain, const comm::GroupPtr&) {
    chain.unsharder.hold(0, true);
    chain.forward({0, 1}, false);
    EXPECT_EQ(chain.states(), "100");
    EXPECT_THROW(chain.unsharder.settle_before_update(), c10::Error);
    chain.unsharder.unhold(0);
    EXPECT_EQ(chain.states(), "000");
    EXPECT_NO_THROW(chain.unsharder.settle_before_update());
  });
}

TEST(Unsharder, AnEditOutsideARegionIsAnError) {
  on_two_ranks(no_prefetch(), [](Chain& chain, const comm::GroupPtr&) {
    chain.unsharder.enter(0, false);
    {
      const at::NoGradGuard no_grad;
      at::Tensor param = chain.flats[0]->items()[0].tensor;
      param.add_(1);
    }
    EXPECT_THROW(chain.unsharder.leave(0, false, false), c10::Error);
    EXPECT_EQ(chain.states(), "000");
  });
}

TEST(Unsharder, AnErrorOfOneUnitReleasesTheOthersAllTheSame) {
  on_two_ranks(no_prefetch(), [](Chain& chain, const comm::GroupPtr&) {
    const int scope = chain.unsharder.add_scope({0, 1, 2});
    chain.unsharder.enter(scope, false);
    {
      const at::NoGradGuard no_grad;
      at::Tensor param = chain.flats[0]->items()[0].tensor;
      param.add_(1);
    }
    EXPECT_THROW(chain.unsharder.leave(scope, false, false), c10::Error);
    EXPECT_EQ(chain.states(), "000");
  });
}

TEST(Unsharder, RanksThatGatherInDifferentOrdersGetANamedError) {
  std::string what;
  try {
    run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
      Chain chain(3, rank, group, no_prefetch());
      chain.forward(rank == 0 ? std::vector<int>{0, 1} : std::vector<int>{1, 0}, false);
    });
  } catch (const std::exception& e) {
    what = e.what();
  }
  EXPECT_NE(what.find("disagree"), std::string::npos) << what;
  EXPECT_NE(what.find("'u0'"), std::string::npos) << what;
  EXPECT_NE(what.find("'u1'"), std::string::npos) << what;
}

}  // namespace tessera::testing
