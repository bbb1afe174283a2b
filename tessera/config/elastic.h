// Which train batch size lets a job run on most numbers of ranks: the section `elasticity` of a configuration.
//
// A batch fits n data-parallel ranks when it is micro_batch * accumulation * n for one of the micro-batch sizes. Candidates are, for
// each micro-batch size and for their least common multiple, its largest product within max_train_batch_size with a number of
// many divisors (a highly composite one). The one that fits most numbers of ranks wins; of two that fit as many, the larger, or
// with prefer_larger_batch false the smaller.
//
// Version 0.2 (the default) grows and shrinks a job by whole nodes: a node has num_gpus_per_node / model_parallel_size ranks, its
// batch is max_train_batch_size / that, and min_gpus and max_gpus count the nodes that they cover whole. Version 0.1 counts
// ranks one by one, whatever a node has.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/config/config.h"
#include "tessera/config/text.h"

namespace tessera::config {

struct ElasticBatch {
  int64_t train_batch_size = 0;
  std::vector<int64_t> ranks;  // numbers of data-parallel ranks that the batch fits, ascending
};

// The batch that the section chooses; it need not be enabled. InvalidConfig for a wrong section, and where no batch fits.
ElasticBatch elastic_batch(const Config& config);

// The micro_batch_sizes that the batch can be cut into on so many data-parallel ranks, in their order. InvalidConfig for a
// wrong section, and where the batch does not fit the ranks.
std::vector<int64_t> elastic_micro_batches(const Config& config, int64_t ranks);

// The rules of an enabled section.
void check_elasticity(const Config& config, Report& report);

// The numbers up to `limit` that have more divisors than every smaller one, ascending.
std::vector<int64_t> highly_composite(int64_t limit);

}  // namespace tessera::config
