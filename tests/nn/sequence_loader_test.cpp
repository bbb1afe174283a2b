#include "tessera/nn/sequence_loader.h"

#include <gtest/gtest.h>
#include <torch/data.h>

#include <optional>
#include <vector>

#include "tessera/pipeline/wire.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera::nn {
namespace {

using parallel::cut_batch;

at::Tensor ids_of(int64_t length, int64_t first = 0) {
  return at::arange(first, first + 2 * length, at::kLong).view({2, length});
}

SequenceTensors batch_of(int64_t length, int64_t first = 0) {
  return {{"input_ids", ids_of(length, first)},
          {"labels", ids_of(length, first)},
          {"position_ids", at::arange(length).expand({2, length})}};
}

TEST(CutBatch, EachRankHasItsRange) {
  SequenceTensors batch = batch_of(6);
  batch["weight"] = at::ones({2});
  batch["features"] = at::arange(36).view({2, 6, 3});
  batch["attention_mask"] = at::tensor({1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0}).view({2, 6});
  const auto parts = cut_batch(batch, 2);
  ASSERT_EQ(parts.size(), 2U);
  for (int64_t rank = 0; rank < 2; ++rank) {
    const SequenceTensors& part = parts[static_cast<size_t>(rank)];
    EXPECT_EQ(part.size(), 5U);
    EXPECT_TRUE(at::equal(part.at("input_ids"), ids_of(6).narrow(1, 3 * rank, 3)));
    EXPECT_TRUE(at::equal(part.at("features"), batch.at("features").narrow(1, 3 * rank, 3)));
    EXPECT_TRUE(at::equal(part.at("weight"), at::ones({2})));
    EXPECT_EQ(part.at("position_ids")[1][0].item<int64_t>(), 3 * rank);
  }
  // The next rank's first token, too.
  EXPECT_TRUE(at::equal(parts[0].at("shift_labels"), at::tensor({1, 2, 3, 7, 8, 9}, at::kLong).view({2, 3})));
  EXPECT_TRUE(at::equal(parts[1].at("shift_labels"), at::tensor({4, 5, -100, 10, 11, -100}, at::kLong).view({2, 3})));
  batch.erase("position_ids");
  EXPECT_TRUE(at::equal(cut_batch(batch, 2, Positions::Made)[1].at("position_ids"), at::arange(3, 6).expand({2, 3})));
}

TEST(CutBatch, WhatCannotBeCutIsNamed) {
  const auto error = [](const SequenceTensors& batch, const std::vector<std::string>& others = {}) {
    return testing::error_of<c10::ValueError>([&] { cut_batch(batch, 2, Positions::Given, others); });
  };
  SequenceTensors batch = batch_of(8);
  batch.erase("position_ids");
  EXPECT_HAS(error(batch, {"name"}),
             "[SequenceLoader] the batch has no position_ids, only input_ids, labels, name; a part");
  batch.erase("input_ids");
  EXPECT_HAS(error(batch), "the batch has no input_ids, only labels");
  EXPECT_HAS(error(batch_of(9)),
             "9 tokens a sequence is not divisible by the 2 ranks of sequence_parallel_size; pad it to 10");
  batch = batch_of(8);
  batch["attention_mask"] = at::tensor({0, 1, 1, 1, 1, 1, 1, 1}).view({1, 8});
  EXPECT_HAS(error(batch), "padding must be at the end");
  batch = batch_of(8);
  batch["mask"] = at::eye(8).to_sparse();
  EXPECT_HAS(error(batch), "a tensor of the layout Sparse; make it dense");
}

// The ranks of a sequence that have the same batch, as an engine's loader gives it.
TEST(SequencePart, IsThatOfTheRank) {
  testing::run_ranks(2, [](int rank, const comm::GroupPtr& group) {
    const SequenceTensors part = parallel::sequence_part({{"input_ids", ids_of(4)}}, *group, Positions::Made);
    EXPECT_TRUE(at::equal(part.at("input_ids"), ids_of(4).narrow(1, 2 * rank, 2)));
    EXPECT_EQ(part.at("position_ids")[0][0].item<int64_t>(), 2 * rank);
  });
}

// Sequence i begins with 100 i, and is as long as `lengths` says.
struct Sequences : torch::data::Dataset<Sequences, int64_t> {
  explicit Sequences(size_t size) : count(size) {}
  int64_t get(size_t index) override { return static_cast<int64_t>(index); }
  std::optional<size_t> size() const override { return count; }
  size_t count;
};

TEST(SequenceLoader, AllRanksGoThroughEachOnesBatches) {
  testing::run_ranks(2, [](int rank, const comm::GroupPtr& group) {
    Loader<Sequences> own(Sequences(6), rank, 2, 1, {.shuffle = false});
    SequenceLoader<Sequences> loader(
        own, [](const std::vector<int64_t>& batch) { return batch_of(4 + 2 * batch[0], 100 * batch[0]); }, group);
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t number = 0; number < 6; ++number) {
        const auto part = loader.next();
        ASSERT_TRUE(part);
        EXPECT_TRUE(at::equal(part->at("input_ids"),
                              cut_batch(batch_of(4 + 2 * number, 100 * number), 2)[rank].at("input_ids")))
            << number;
        EXPECT_EQ(part->count("shift_labels"), 1U);
      }
      EXPECT_FALSE(loader.next());
    }
    EXPECT_EQ(own.epoch(), 2);
  });
}

TEST(SequenceLoader, EndsWithTheShortestAndFailsTogether) {
  testing::run_ranks(2, [](int rank, const comm::GroupPtr& group) {
    Loader<Sequences> own(Sequences(rank == 0 ? 1 : 3), 0, 1, 1);
    SequenceLoader<Sequences> loader(own, [](const auto&) { return batch_of(4); }, group);
    for (int pass = 0; pass < 2; ++pass) {
      int batches = 0;
      while (loader.next())
        ++batches;
      EXPECT_EQ(batches, 2);
    }
    SequenceLoader<Sequences> uneven(own, [&](const auto&) { return batch_of(rank == 0 ? 4 : 5); }, group);
    EXPECT_HAS(testing::error_of<c10::ValueError>([&] { uneven.next(); }), "5 tokens a sequence is not divisible");
    SequenceLoader<Sequences> broken(
        own,
        [&](const auto&) -> SequenceTensors {
          if (rank == 1) throw std::runtime_error("a damaged sample");
          return batch_of(4);
        },
        group);
    if (rank == 1) {
      EXPECT_THROW(broken.next(), std::runtime_error);
    } else {
      EXPECT_HAS(testing::error_of<pipeline::StageFailed>([&] { broken.next(); }),
                 "the batch of rank 1 of the sequence could not be had: a damaged sample");
    }
  });
}

}  // namespace
}  // namespace tessera::nn
