#include "tessera/offload/states.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <thread>
#include <vector>

#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"
#include "tests/support/open_files.h"

namespace tessera::offload {

using shard::Buffer;
using shard::Quantity;
using shard::Residence;

namespace {

const at::TensorOptions kFloats = at::TensorOptions(at::kFloat);

StateOptions on_disk(const io::TempFolder& folder) {
  return {.residence = Residence::Nvme, .folder = folder.path()};
}

}  // namespace

TEST(States, BuffersOnADiskHoldWhatIsWritten) {
  const io::TempFolder folder;
  const auto home = state_homes(on_disk(folder));
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kShort}) {
    const int64_t size = shard::kTile + 1001;  // a whole tile, and a part of one
    const auto options = at::TensorOptions(dtype);
    const Buffer buffer(size, options, home(Quantity::Master, size, options));
    EXPECT_EQ(buffer.residence(), Residence::Nvme);
    EXPECT_TRUE(buffer.read({0, size}).equal(at::zeros({size}, options)));
    at::Tensor expected = at::arange(size).remainder(251).to(dtype);
    buffer.write({0, size}, expected);
    buffer.fill({5, 700}, 3);
    expected.narrow(0, 5, 695).fill_(3);
    buffer.write({shard::kTile - 10, shard::kTile + 10}, at::full({20}, 9, at::kFloat));
    expected.narrow(0, shard::kTile - 10, 20).fill_(9);
    // The way of an update: fetched, changed and stored, the next one on its way meanwhile.
    shard::PendingView first = buffer.fetch({0, shard::kTile}), second = buffer.fetch({shard::kTile, size});
    for (const auto& [view, range] :
         {std::pair(&first, shard::Range{0, shard::kTile}), std::pair(&second, shard::Range{shard::kTile, size})}) {
      at::Tensor values = view->wait();
      values.add_(1);
      buffer.store(range, values);
    }
    expected.add_(1);
    buffer.flush();
    EXPECT_TRUE(buffer.read({0, size}).equal(expected));
    EXPECT_TRUE(buffer.fetch({7, 7}).wait().equal(at::empty({0}, options)));
  }
}

// What is to be written only has a kept buffer of the file's, and is written from there.
TEST(States, MemoryToFillIsThatOfTheFile) {
  const io::TempFolder folder;
  const auto home = state_homes(on_disk(folder));
  const int64_t size = 2 * shard::kTile + 77;
  const Buffer buffer(size, kFloats, home(Quantity::Weight, size, kFloats));
  const at::Tensor expected = at::arange(size, kFloats);
  std::vector<const void*> lay;
  for (const shard::Range tile : shard::tiles_of({0, size})) {
    at::Tensor values = buffer.to_fill(tile).wait();
    values.copy_(expected.narrow(0, tile.begin, tile.size()));
    lay.push_back(values.const_data_ptr());
    buffer.store(tile, values);
    values.reset();
    buffer.flush();
  }
  EXPECT_EQ(lay[0], lay[1]);
  EXPECT_TRUE(buffer.read({0, size}).equal(expected));
  EXPECT_EQ(buffer.to_fill({7, 7}).wait().numel(), 0);
  const Buffer here(at::zeros({5}));
  EXPECT_EQ(here.to_fill({0, 5}).wait().const_data_ptr(), here.tensor().const_data_ptr());
}

TEST(States, OneFileAThreadWhileAnyOfItIsAlive) {
  const io::TempFolder folder;
  const auto home = state_homes(on_disk(folder));
  EXPECT_TRUE(testing::files_in(folder.path()).empty()) << "nobody has asked yet";
  auto master = home(Quantity::Master, 10, kFloats), state = home(Quantity::State0, 10, kFloats);
  const size_t one = testing::files_in(folder.path()).size();
  EXPECT_GE(one, 1u);
  shard::HomePtr other;
  std::thread([&] { other = home(Quantity::Master, 10, kFloats); }).join();
  EXPECT_EQ(testing::files_in(folder.path()).size(), 2 * one) << "another rank";
  other.reset();
  master.reset();
  EXPECT_EQ(testing::files_in(folder.path()).size(), one);
  state.reset();
  EXPECT_TRUE(testing::files_in(folder.path()).empty()) << "the space is free again";
}

// Ranks as threads, in any order: of each the first buffers are those that stay in memory.
TEST(States, WhatStaysInMemoryIsCountedByThread) {
  const io::TempFolder folder;
  StateOptions options = on_disk(folder);
  options.in_memory = 15;
  const auto home = state_homes(options);
  const auto of_a_rank = [&] {
    std::vector<bool> on_the_disk;
    for (const int64_t size : {10, 10, 5, 1})
      on_the_disk.push_back(home(Quantity::Master, size, kFloats) != nullptr);
    return on_the_disk;
  };
  std::array<std::vector<bool>, 3> found;
  found[0] = of_a_rank();
  std::thread([&] {
    found[1] = of_a_rank();
    std::thread([&] { found[2] = of_a_rank(); }).join();
  }).join();
  for (const auto& one : found)
    EXPECT_EQ(one, (std::vector<bool>{false, true, false, true}));
}

TEST(States, HostMemoryIsWhereACpuModelsStatesAre) {
  const auto home = state_homes({.residence = Residence::Host});
  EXPECT_EQ(home(Quantity::Master, 10, kFloats), nullptr);
  EXPECT_EQ(home(Quantity::State0, 10, kFloats), nullptr);
}

TEST(States, WhatCannotBeHadIsSaidWhenItIsAskedFor) {
  const auto none = state_homes({.residence = Residence::Nvme});
  EXPECT_HAS(testing::error_of([&] { none(Quantity::Master, 10, kFloats); }), "nvme_path");
  const auto home = state_homes({.residence = Residence::Nvme, .folder = "/proc/none"});
  EXPECT_HAS(testing::error_of([&] { home(Quantity::Master, 10, kFloats); }), "/proc/none");
}

}  // namespace tessera::offload
