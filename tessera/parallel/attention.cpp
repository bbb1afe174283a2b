#include "tessera/parallel/attention.h"

#include <ATen/ops/repeat_interleave.h>

#include "tessera/base/error.h"
#include "tessera/parallel/functions.h"

namespace tessera::parallel {
namespace {
constexpr int64_t kHeadDim = 2;
}  // namespace

Heads deal_heads(int64_t queries, int64_t keys, int ranks) {
  TESSERA_CHECK_VALUE(keys > 0 && queries % keys == 0, "parallel", "sequence parallel attention: ", keys,
                      " key/value heads do not divide ", queries, " query heads");
  TESSERA_CHECK_VALUE(queries >= ranks, "parallel", "sequence parallel attention: ", queries,
                      " query heads are too few for ", ranks, " ranks (sequence_parallel_size)");
  // The least repetition that gives every rank a key/value head.
  Heads heads;
  while (keys * heads.repeat < ranks || queries % (keys * heads.repeat) != 0)
    ++heads.repeat;
  heads.keys = part_sizes(keys * heads.repeat, ranks);
  for (const int64_t size : heads.keys)
    heads.queries.push_back(queries / (keys * heads.repeat) * size);
  return heads;
}

Dealt to_heads(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const SequenceCut& cut) {
  TESSERA_CHECK_VALUE(cut.group != nullptr && (cut.sequence_dim == 0 || cut.sequence_dim == 1), "parallel",
                      "sequence parallel attention: the sequence is dim 0 or 1 of a tensor of 4, not ",
                      cut.sequence_dim);
  for (const at::Tensor* t : {&query, &key, &value})
    TESSERA_CHECK_VALUE(t->dim() == 4, "parallel",
                        "sequence parallel attention: query, key and value have 4 dims, not ", t->sizes());
  TESSERA_CHECK_VALUE(key.size(kHeadDim) == value.size(kHeadDim), "parallel",
                      "sequence parallel attention: ", key.size(kHeadDim), " key heads and ", value.size(kHeadDim),
                      " value heads");
  Dealt dealt;
  dealt.heads = deal_heads(query.size(kHeadDim), key.size(kHeadDim), cut.group->size());
  const Heads& heads = dealt.heads;
  const auto repeated = [&](const at::Tensor& t) {
    return heads.repeat == 1 ? t : at::repeat_interleave(t, heads.repeat, kHeadDim);
  };
  const auto all = exchange({query, repeated(key), repeated(value)}, cut.group, kHeadDim, cut.sequence_dim,
                            {heads.queries, heads.keys, heads.keys}, cut.lengths, "query, key and value to heads");
  dealt.query = all[0];
  dealt.key = all[1];
  dealt.value = all[2];
  return dealt;
}

at::Tensor to_sequence(const at::Tensor& result, const Heads& heads, const SequenceCut& cut) {
  const int rank = cut.group->rank();
  TESSERA_CHECK_VALUE(result.dim() == 4 && result.size(kHeadDim) == heads.queries[rank], "parallel",
                      "sequence parallel attention: the local attention returned ", result.sizes(),
                      ", which does not have the ", heads.queries[rank], " heads of its query at dim ", kHeadDim);
  std::vector<Sizes> lengths;
  if (!cut.lengths.empty()) lengths.push_back(cut.lengths);
  return exchange({result}, cut.group, cut.sequence_dim, kHeadDim, lengths, heads.queries,
                  "result of attention to the sequence")[0];
}

}  // namespace tessera::parallel
