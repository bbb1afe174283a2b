#include "tessera/zero/shared_params.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/comm/shm/group.h"
#include "tessera/zero/flat_params.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace tessera::testing {

using comm::GroupPtr;
using zero::FlatParams;
using zero::ParamState;
using zero::SharedParams;

namespace {

constexpr auto kLong = std::chrono::minutes(2);

std::vector<FlatParams::Item> plain_items() {
  return {{"w", at::arange(85, at::kFloat).view({17, 5}).clone().requires_grad_(true), {}},
          {"b", at::full({3}, 7.0).requires_grad_(true), {}}};
}

shard::Layout layout(int shards) {
  return {std::vector<int64_t>{85, 3}, shards};
}

// A unit of two parameters in shared memory, on each of `world` ranks.
void with_flat(int world, bool sharded, at::ScalarType dtype,
               const std::function<void(FlatParams&, SharedParams&, int rank, const GroupPtr&)>& body) {
  run_threads(comm::shm_thread_groups(world, kLong), [&](int rank, const GroupPtr& group) {
    SharedParams shared(group, SharedParams::bytes_of(layout(world), dtype));
    FlatParams flat("u", plain_items(), dtype, rank, world, sharded, shared.take(layout(world), dtype));
    shared.written("construction");
    body(flat, shared, rank, group);
    group->barrier("the end");
  });
}

}  // namespace

TEST(SharedParams, UnitsGetSpacesOfTheirOwnInOneMemory) {
  run_threads(comm::shm_thread_groups(2, kLong), [](int rank, const GroupPtr& group) {
    const shard::Layout one = layout(2);
    const int64_t bytes = SharedParams::bytes_of(one, at::kFloat) + SharedParams::bytes_of(one, at::kBFloat16);
    SharedParams shared(group, bytes);
    EXPECT_TRUE(shared.on());
    EXPECT_EQ(shared.bytes(), bytes);
    const at::Tensor a = shared.take(one, at::kFloat), b = shared.take(one, at::kBFloat16);
    EXPECT_EQ(a.numel(), one.size());
    EXPECT_EQ(b.scalar_type(), at::kBFloat16);
    if (rank == 0) a.fill_(1);
    if (rank == 1) b.fill_(2);
    shared.written("test");
    EXPECT_TRUE(a.eq(1).all().item<bool>());
    EXPECT_TRUE(b.eq(2).all().item<bool>());
    shared.readers_done("test");
  });
  SharedParams none;
  EXPECT_FALSE(none.on() || none.take(layout(2), at::kFloat).defined());
  none.written("nothing");
  none.readers_done("nothing");
}

TEST(SharedParams, MomentsAreMomentsOfAllRanks) {
  run_threads(comm::shm_thread_groups(3, kLong), [](int rank, const GroupPtr& group) {
    SharedParams shared(group, 64);
    const at::Tensor memory = shared.take(shard::Layout(std::vector<int64_t>{1}, 1), at::kByte);
    for (int round = 0; round < 200; ++round) {
      const int writer = round % 3;
      if (rank == writer) memory.fill_(round);
      shared.written("test");
      EXPECT_EQ(memory[0].item<int>(), round % 256);
      shared.readers_done("test");
    }
  });
}

TEST(SharedParams, GatheringMovesPointersAndNothingElse) {
  for (const int world : {2, 3}) {
    with_flat(world, true, at::kFloat, [](FlatParams& flat, SharedParams&, int, const GroupPtr& group) {
      const at::Tensor w = flat.items()[0].tensor, alias = w.detach().t();
      EXPECT_EQ(flat.state(), ParamState::Sharded);
      EXPECT_EQ(flat.bytes(), 0);
      EXPECT_EQ(flat.shared_bytes(), 4 * flat.layout().size());
      EXPECT_NE(error_of([&] { (void)w.sum(); }).find("parameter 'w' is partitioned"), std::string::npos);
      group->reset_stats();
      for (int round = 0; round < 3; ++round) {
        flat.begin_gather(*group, {});
        flat.finish_gather();
        EXPECT_TRUE(flat.is_in_space());
        EXPECT_TRUE(alias.equal(plain_items()[0].tensor.detach().t()));
        EXPECT_TRUE(flat.view(1).equal(at::full({3}, 7.0)));
        EXPECT_EQ(w.const_data_ptr(), flat.whole().const_data_ptr());
        EXPECT_FALSE(flat.release().defined());
        EXPECT_NE(error_of([&] { (void)alias.sum(); }).find("'w'"), std::string::npos);
      }
      EXPECT_EQ(group->stats().all_gather.calls + group->stats().barrier.calls, 0);
    });
  }
}

TEST(SharedParams, PrivateCopiesKeepEditsAndGiveTheSliceOnRequest) {
  with_flat(2, true, at::kFloat, [](FlatParams& flat, SharedParams& shared, int rank, const GroupPtr& group) {
    flat.begin_gather(*group, {});
    flat.finish_gather();
    flat.make_private(at::empty({flat.layout().size() + 9}));
    EXPECT_FALSE(flat.is_in_space());
    fill(flat.items()[0].tensor, 100 + rank);
    fill(flat.items()[1].tensor, 100 + rank);
    shared.readers_done("test");
    flat.keep_write(0);  // not item 1
    shared.written("test");
    std::string edited;
    EXPECT_TRUE(flat.release(&edited).defined());
    EXPECT_EQ(edited, "b");
    flat.begin_gather(*group, {});
    flat.finish_gather();
    const at::Tensor w = flat.whole();
    for (int r = 0; r < 2; ++r) {
      const shard::Range mine = flat.layout().owned(0, r);
      EXPECT_TRUE(w.narrow(0, mine.begin, mine.size()).eq(100 + r).all().item<bool>()) << "rank " << r << "'s slice";
    }
    EXPECT_TRUE(flat.view(1).equal(at::full({3}, 7.0)));
    flat.release();
  });
}

TEST(SharedParams, RoundedValuesAreThoseThatWouldHaveTravelled) {
  with_flat(2, true, at::kFloat, [](FlatParams& flat, SharedParams&, int, const GroupPtr& group) {
    const at::Tensor thirds = plain_items()[0].tensor.detach() / 3;
    FlatParams apart("v", {{"w", thirds.clone().requires_grad_(true), {}}}, at::kFloat, group->rank(), 2, true);
    SharedParams other(group, SharedParams::bytes_of(apart.layout(), at::kFloat));
    FlatParams same("v", {{"w", thirds.clone().requires_grad_(true), {}}}, at::kFloat, group->rank(), 2, true,
                    other.take(apart.layout(), at::kFloat));
    other.written("construction");
    const auto gather = [&](FlatParams& f, int64_t staging) {
      f.gather_in(at::kBFloat16);
      f.begin_gather(*group, at::empty({f.layout().size()}), at::empty({staging}, at::kBFloat16));
      f.finish_gather();
      EXPECT_TRUE(f.is_rounded());
    };
    gather(apart, apart.layout().size());
    gather(same, 33);  // piece by piece
    EXPECT_TRUE(same.view(0).equal(apart.view(0)));
    EXPECT_FALSE(same.view(0).equal(thirds));
    same.make_exact(*group);
    EXPECT_TRUE(same.view(0).equal(thirds));
    EXPECT_TRUE(same.release().defined() && same.take_staging().defined());
    (void)flat;
  });
}

TEST(SharedParams, WholeOnesLieInTheMemoryAndAreLentForWriting) {
  with_flat(3, false, at::kBFloat16, [](FlatParams& flat, SharedParams& shared, int rank, const GroupPtr& group) {
    const at::Tensor w = flat.items()[0].tensor, alias = w.detach();
    EXPECT_EQ(flat.state(), ParamState::Ready);
    EXPECT_EQ(w.const_data_ptr(), flat.whole().const_data_ptr());
    EXPECT_TRUE(w.equal(plain_items()[0].tensor.to(at::kBFloat16)));
    flat.make_private_copy(0);
    EXPECT_TRUE(flat.has_private_copy(0));
    fill(w, 50 + rank);
    group->barrier();
    EXPECT_TRUE(flat.values(0).eq(50 + rank).all().item<bool>());
    EXPECT_TRUE(flat.whole().narrow(0, 0, 85).equal(plain_items()[0].tensor.flatten().to(at::kBFloat16)));
    shared.readers_done("test");
    flat.keep_write(0);
    flat.end_private_copy(0);
    shared.written("test");
    for (int r = 0; r < 3; ++r) {
      const shard::Range mine = flat.layout().owned(0, r);
      EXPECT_TRUE(alias.flatten().narrow(0, mine.begin, mine.size()).eq(50 + r).all().item<bool>());
    }
    shared.readers_done("test");
    flat.make_private_copy(0);
    fill(w, -1);
    flat.end_private_copy(0);
    EXPECT_FALSE(w.eq(-1).any().item<bool>()) << "forgotten";
  });
}

TEST(SharedParams, ReplacedDataIsTakenWhereItMayBeWritten) {
  with_flat(2, false, at::kFloat, [](FlatParams& flat, SharedParams& shared, int, const GroupPtr&) {
    at::Tensor w = flat.items()[0].tensor;
    flat.make_private_copy(0);
    w.set_data(at::full({17, 5}, 3.0));
    shared.readers_done("test");
    flat.keep_write(0);
    flat.end_private_copy(0);
    shared.written("test");
    EXPECT_EQ(w.const_data_ptr(), flat.whole().const_data_ptr());
    EXPECT_TRUE(w.eq(3).all().item<bool>());
  });
}

// A model that is used on without its engine, by one rank, leaves the others alone; so do references to old data.
TEST(SharedParams, TheEndGivesWholeParametersMemoryOfTheirOwn) {
  std::vector<at::Tensor> kept(2), aliases(2), lent(2);
  with_flat(2, false, at::kFloat, [&](FlatParams& flat, SharedParams&, int rank, const GroupPtr& group) {
    kept[rank] = flat.items()[0].tensor;
    lent[rank] = flat.items()[1].tensor;
    aliases[rank] = kept[rank].detach();
    flat.make_private_copy(1);
    fill(lent[rank], rank);
    flat.abandon("the end");
    group->barrier();
    fill(kept[rank], rank);
    group->barrier();
    EXPECT_TRUE(kept[rank].eq(rank).all().item<bool>());
    EXPECT_EQ(flat.shared_bytes(), 0);
  });
  for (int r = 0; r < 2; ++r) {
    EXPECT_TRUE(kept[r].eq(r).all().item<bool>() && aliases[r].eq(r).all().item<bool>());
    EXPECT_TRUE(lent[r].eq(r).all().item<bool>());
  }
}

}  // namespace tessera::testing
