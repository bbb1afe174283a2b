// Attention over a sequence that is cut over the ranks of a group (DeepSpeed-Ulysses, arXiv 2309.14509): outside, a rank has its
// part of the sequence and all heads; around the local attention, the whole sequence and its part of the heads. One exchange
// brings query, key and value there, another one the result back.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/parallel/functions.h"
#include "tessera/parallel/sizes.h"

namespace tessera::parallel {

// Tensors are [s / ranks, b, heads, width] with sequence_dim 0, or [b, s / ranks, heads, width] with 1.
struct SequenceCut {
  comm::GroupPtr group;
  int64_t sequence_dim = 0;
  Sizes lengths = {};  // the ranks' parts of the sequence; empty: equal ones
  // In how many parts the heads go, each part's exchanges under the attention of another part. Fewer where a rank
  // has fewer key/value heads; one where the ranks have unequally many heads.
  int parts = 1;
};

namespace detail {
// Value error, of the origin `label`, for SequenceCut::parts that are no number of parts.
void check_parts(int64_t parts, const std::string& label);
}  // namespace detail

// The heads of one call: how many each rank has.
struct Heads {
  Sizes queries, keys;  // [rank]
  int64_t repeat = 1;   // of each key/value head, where there are fewer than ranks
};
// Value errors, of the origin `label`: fewer query heads than ranks; query heads that the key/value heads do not divide.
Heads deal_heads(int64_t queries, int64_t keys, int ranks, const std::string& label = "parallel");

struct Dealt {
  at::Tensor query, key, value;  // whole sequence, this rank's heads; strided views where that saves a copy
  Heads heads;
};
// Exchanges: collective and differentiable, as all of functions.h. The number of key/value heads may be a part of the query's;
// a rank's query heads are those of its key/value heads.
Dealt to_heads(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const SequenceCut& cut);
// Brings the result of the local attention, [.., heads of the rank, width], back in parts of the sequence.
at::Tensor to_sequence(const at::Tensor& result, const Heads& heads, const SequenceCut& cut);

// One call of to_heads(), of local attentions over parts of the heads and of to_sequence(). All exchanges of parts but the first
// are in flight while a local attention runs, in the backward too.
class HeadParts {
 public:
  // Starts to send.
  HeadParts(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const SequenceCut& cut);
  int size() const { return static_cast<int>(there_.size()); }
  Dealt take(int part);  // parts are taken in order; `heads` are those of the part
  void give(int part, const at::Tensor& result);
  at::Tensor join();  // to be called after the last part

 private:
  SequenceCut cut_;
  Heads heads_;
  Sizes keys_;  // heads of a rank, by part
  std::vector<Exchanging> there_, back_;
};

// A local attention (query, key, value, more...) -> result, in the same layout, over a cut sequence; called once for each part.
template <class Local>
class SequenceAttention {
 public:
  explicit SequenceAttention(Local local, SequenceCut cut) : local_(std::move(local)), cut_(std::move(cut)) {
    detail::check_parts(cut_.parts, "SequenceAttention");
  }

  template <class... A>
  at::Tensor operator()(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const A&... more) {
    HeadParts parts(query, key, value, cut_);
    for (int part = 0; part < parts.size(); ++part) {
      const Dealt dealt = parts.take(part);
      parts.give(part, local_(dealt.query, dealt.key, dealt.value, more...));
    }
    return parts.join();
  }

 private:
  Local local_;
  SequenceCut cut_;
};

template <class Local>
using DistributedAttention [[deprecated("is DeepSpeed's name, and goes with 0.3.0; here it is SequenceAttention")]] =
    SequenceAttention<Local>;

}  // namespace tessera::parallel
