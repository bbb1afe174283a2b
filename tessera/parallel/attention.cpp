#include "tessera/parallel/attention.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/repeat_interleave.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/parallel/functions.h"

namespace tessera::parallel {
namespace {
constexpr int64_t kHeadDim = 2;
constexpr const char* kThere = "query, key and value to heads";
constexpr const char* kBack = "result of attention to the sequence";

constexpr const char* kNames[] = {"query", "key", "value"};

void check_group(const SequenceCut& cut) {
  TESSERA_CHECK_VALUE(cut.group != nullptr, "SequenceAttention",
                      "sequence parallel attention has no group: set SequenceCut::group; an attention that was moved "
                      "from has none any more");
}

void check(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const SequenceCut& cut) {
  check_group(cut);
  check_sequence_dim(cut.sequence_dim);
  check_parts(cut.parts);
  const at::Tensor* const all[] = {&query, &key, &value};
  for (size_t i = 0; i < 3; ++i)
    TESSERA_CHECK_VALUE(
        all[i]->dim() == 4 && query.dim() == 4 && all[i]->size(cut.sequence_dim) == query.size(cut.sequence_dim),
        "SequenceAttention", kNames[i], " has the sizes ", all[i]->sizes(), ", query ", query.sizes(),
        ": all must be 4-D with the sequence, as long, in dim ", cut.sequence_dim);
  TESSERA_CHECK_VALUE(key.size(kHeadDim) == value.size(kHeadDim), "SequenceAttention",
                      "sequence parallel attention: ", key.size(kHeadDim), " key heads and ", value.size(kHeadDim),
                      " value heads");
}

void check_result(const at::Tensor& result, int64_t heads) {
  TESSERA_CHECK_VALUE(result.dim() == 4 && result.size(kHeadDim) == heads, "SequenceAttention",
                      "sequence parallel attention: the local attention returned ", result.sizes(),
                      ", which does not have the ", heads, " heads of its query at dim ", kHeadDim);
}

at::Tensor repeated(const at::Tensor& t, const Heads& heads) {
  return heads.repeat == 1 ? t : at::repeat_interleave(t, heads.repeat, kHeadDim);
}

std::vector<Sizes> lengths_of(const SequenceCut& cut) {
  return cut.lengths.empty() ? std::vector<Sizes>() : std::vector<Sizes>{cut.lengths};
}

Sizes times(Sizes sizes, int64_t factor) {
  for (int64_t& size : sizes)
    size *= factor;
  return sizes;
}

// Splits [.., heads, width] into every part's heads of every rank: [.., ranks, heads of a part, width].
std::vector<at::Tensor> split(const at::Tensor& t, int64_t ranks, const Sizes& parts) {
  return t.unflatten(kHeadDim, {ranks, -1}).split_with_sizes(parts, kHeadDim + 1);
}

}  // namespace

void check_sequence_dim(int64_t sequence_dim, const std::string& label) {
  if (sequence_dim != 0 && sequence_dim != 1)
    TESSERA_FAIL(::c10::ValueError, "[", label, "] sequence_dim must be 0 or 1, got ", sequence_dim);
}

void check_parts(int64_t parts, const std::string& label) {
  if (parts < 1) TESSERA_FAIL(::c10::ValueError, "[", label, "] parts must be an integer of 1 or more, got ", parts);
}

Heads deal_heads(int64_t queries, int64_t keys, int ranks, const std::string& label) {
  if (keys <= 0 || queries % keys != 0)
    TESSERA_FAIL(::c10::ValueError, "[", label, "] sequence parallel attention: ", keys,
                 " key/value heads do not divide ", queries, " query heads");
  if (queries < ranks)
    TESSERA_FAIL(::c10::ValueError, "[", label, "] sequence parallel attention: ", queries,
                 " query heads are too few for ", ranks, " ranks (sequence_parallel_size)");
  // Finds the least repetition that gives every rank a key/value head.
  Heads heads;
  while (keys * heads.repeat < ranks || queries % (keys * heads.repeat) != 0)
    ++heads.repeat;
  heads.keys = part_sizes(keys * heads.repeat, ranks);
  for (const int64_t size : heads.keys)
    heads.queries.push_back(queries / (keys * heads.repeat) * size);
  return heads;
}

Dealt to_heads(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const SequenceCut& cut) {
  SequenceCut one = cut;
  one.parts = 1;
  return HeadParts(query, key, value, one).take(0);
}

at::Tensor to_sequence(const at::Tensor& result, const Heads& heads, const SequenceCut& cut) {
  check_group(cut);
  check_result(result, heads.queries[cut.group->rank()]);
  return exchange({result}, cut.group, cut.sequence_dim, kHeadDim, lengths_of(cut), heads.queries, kBack)[0];
}

HeadParts::HeadParts(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const SequenceCut& cut)
    : cut_(cut) {
  check(query, key, value, cut);
  const int ranks = cut.group->size();
  heads_ = deal_heads(query.size(kHeadDim), key.size(kHeadDim), ranks);
  const int64_t keys = heads_.keys[0];
  const bool even = keys * ranks == key.size(kHeadDim) * heads_.repeat;
  keys_ = part_sizes(keys, static_cast<int>(even && ranks > 1 ? std::min<int64_t>(cut.parts, keys) : 1));
  const at::Tensor all[] = {query, repeated(key, heads_), repeated(value, heads_)};
  if (keys_.size() == 1) {
    there_.emplace_back(std::vector<at::Tensor>{all[0], all[1], all[2]}, cut.group, kHeadDim, cut.sequence_dim,
                        std::vector<Sizes>{heads_.queries, heads_.keys, heads_.keys}, cut.lengths, kThere);
    return;
  }
  const auto queries = split(all[0], ranks, times(keys_, heads_.queries[0] / keys)), k = split(all[1], ranks, keys_),
             v = split(all[2], ranks, keys_);
  for (size_t i = 0; i < keys_.size(); ++i)
    there_.emplace_back(std::vector<at::Tensor>{queries[i], k[i], v[i]}, cut.group, kHeadDim, cut.sequence_dim,
                        std::vector<Sizes>(), cut.lengths, kThere);
}

Dealt HeadParts::take(int part) {
  auto all = there_.at(part).wait();
  Dealt dealt;
  if (keys_.size() == 1) {
    dealt.heads = heads_;
  } else {
    for (at::Tensor& t : all)
      t = t.squeeze(kHeadDim);
    const auto ranks = static_cast<size_t>(cut_.group->size());
    dealt.heads = {Sizes(ranks, all[0].size(kHeadDim)), Sizes(ranks, keys_[part]), heads_.repeat};
  }
  dealt.query = all[0];
  dealt.key = all[1];
  dealt.value = all[2];
  return dealt;
}

void HeadParts::give(int part, const at::Tensor& result) {
  const int rank = cut_.group->rank();
  const bool one = keys_.size() == 1;
  check_result(result, heads_.queries[rank] / heads_.keys[rank] * (one ? heads_.keys[rank] : keys_.at(part)));
  back_.emplace_back(std::vector<at::Tensor>{one ? result : result.unsqueeze(kHeadDim)}, cut_.group, cut_.sequence_dim,
                     kHeadDim, lengths_of(cut_), one ? heads_.queries : Sizes(), kBack);
}

at::Tensor HeadParts::join() {
  TESSERA_CHECK(back_.size() == there_.size(), "SequenceAttention", "sequence parallel attention: results of ",
                back_.size(), " of ", there_.size(), " parts are there");
  if (back_.size() == 1) return back_[0].wait()[0];
  std::vector<at::Tensor> results;
  for (Exchanging& part : back_)
    results.push_back(part.wait()[0]);
  return at::cat(results, kHeadDim + 1).flatten(kHeadDim, kHeadDim + 1);
}

}  // namespace tessera::parallel
