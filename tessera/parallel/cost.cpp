#include "tessera/parallel/cost.h"

#include <algorithm>
#include <cstdio>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/parallel/sizes.h"
#include "tessera/shard/layout.h"
#include "tessera/shard/placement.h"

namespace tessera::parallel {
namespace {

using comm::Axis;

class Model {
 public:
  Model(const BlockStack& model, const Training& training) : m_(model), t_(training) {
    for (const auto& [name, value] :
         {std::pair("layers", m_.layers), std::pair("hidden", m_.hidden), std::pair("heads", m_.heads),
          std::pair("kv_heads", m_.kv_heads), std::pair("head_dim", m_.head_dim), std::pair("inner", m_.inner),
          std::pair("batch", t_.batch), std::pair("length", t_.length), std::pair("micro_batches", t_.micro_batches)})
      TESSERA_CHECK_VALUE(value > 0, "parallel", "cost: ", name, " is ", value, ", it must be positive");
    TESSERA_CHECK_VALUE(m_.heads % m_.kv_heads == 0, "parallel", "cost: ", m_.kv_heads,
                        " key/value heads do not divide ", m_.heads);
    const int64_t parts = ranks(Axis::Sp) * (t_.sequence_regions ? ranks(Axis::Tp) : 1);
    TESSERA_CHECK_VALUE(t_.length % parts == 0, "parallel", "cost: a sequence of ", t_.length,
                        " tokens cannot be cut into ", parts, " parts");
    TESSERA_CHECK_VALUE(m_.kv_heads % ranks(Axis::Tp) == 0 && m_.heads / ranks(Axis::Tp) >= ranks(Axis::Sp) &&
                            m_.inner % ranks(Axis::Tp) == 0,
                        "parallel", "cost: ", m_.kv_heads, " key/value heads and an inner width of ", m_.inner,
                        " are not dealt out evenly to ", ranks(Axis::Tp),
                        " ranks of tp, or leave fewer heads than the ", ranks(Axis::Sp), " ranks of sp");
  }

  Cost make() {
    if (ranks(Axis::Tp) > 1) tensor_parallel();
    if (ranks(Axis::Sp) > 1) sequence_parallel();
    zero();
    return std::move(cost_);
  }

 private:
  int64_t ranks(Axis axis) const {
    const auto found = t_.ranks.find(axis);
    return found == t_.ranks.end() ? 1 : found->second;
  }
  // `payload`: bytes of the whole buffer.
  void send(const std::string& axis, const char* operation, int64_t ranks, int64_t payload, int64_t calls) {
    if (ranks == 1 || calls == 0) return;
    const bool both = std::string_view(operation) == "all_reduce";
    Traffic& traffic = cost_.axes[axis][operation];
    traffic.calls += calls;
    traffic.bytes += calls * (both ? 2 * payload * (ranks - 1) / ranks : payload / ranks * (ranks - 1));
  }

  // A block enters two regions (attention, MLP) and leaves them again.
  void tensor_parallel() {
    const int64_t n = ranks(Axis::Tp), tokens = t_.batch * t_.length / ranks(Axis::Sp);
    const int64_t activations = tokens * m_.hidden * t_.activation_bytes;
    const int64_t blocks = m_.layers * t_.micro_batches, forwards = t_.recompute ? 2 : 1;
    const int64_t entries = t_.shared_inputs ? 2 : 3 + (m_.gated ? 2 : 1);
    if (t_.sequence_regions) {
      // Gathers: forward in, backward of out, backward in once more for the weights' gradients.
      const int64_t again = t_.keep_gathered ? 0 : entries;
      send("tp", "all_gather", n, activations, blocks * (entries * forwards + 2 + again));
      send("tp", "reduce_scatter", n, activations, blocks * (2 * forwards + entries));
    } else {
      send("tp", "all_reduce", n, activations, blocks * (2 * forwards + entries));
    }
    const bool whole_ends = t_.sequence_regions && t_.whole_ends;
    if (whole_ends) {
      send("tp", "all_gather", n, activations,
           2 * t_.micro_batches);               // after the last norm; before the first block, backward
      const int64_t norms = 2 * m_.layers + 1;  // gradients of their weights
      send("tp", "all_reduce", n, m_.hidden * t_.activation_bytes, norms * t_.micro_batches);
    }
    if (m_.vocabulary == 0 || !t_.vocab_parallel) return;
    if (t_.sequence_regions && !whole_ends) {
      send("tp", "reduce_scatter", n, activations, 2 * t_.micro_batches);  // embedding; head backward
      send("tp", "all_gather", n, activations,
           (t_.keep_gathered ? 2 : 3) * t_.micro_batches);  // head; embedding backward
    } else {
      send("tp", "all_reduce", n, activations, 2 * t_.micro_batches);
    }
    send("tp", "all_reduce", n, tokens * 4, t_.micro_batches);      // maxima of the cross entropy
    send("tp", "all_reduce", n, 2 * tokens * 4, t_.micro_batches);  // sums
  }

  // Exchanges bring query, key and value to heads, and the result back; the same backwards.
  void sequence_parallel() {
    const int64_t n = ranks(Axis::Sp), tp = ranks(Axis::Tp), tokens = t_.batch * t_.length / n;
    const int64_t blocks = m_.layers * t_.micro_batches, times = t_.recompute ? 3 : 2;
    const int64_t queries = m_.heads / tp, one = tokens * m_.head_dim * t_.activation_bytes;
    int64_t keys = m_.kv_heads / tp;
    while (keys < n || queries % keys != 0)  // keys are repeated, so that every rank has one
      keys += m_.kv_heads / tp;
    send("sp", "all_to_all", n, one * (queries + 2 * keys), blocks * times);
    // A rank has its own heads of all tokens: those of the first rank, which has the most.
    const int64_t own = part_sizes(keys, static_cast<int>(n))[0] * (queries / keys);
    send("sp", "all_to_all", n, tokens * n * own * m_.head_dim * t_.activation_bytes, blocks * times);
  }

  std::vector<int64_t> block() const {
    const int64_t tp = ranks(Axis::Tp), q = m_.heads * m_.head_dim / tp, kv = m_.kv_heads * m_.head_dim / tp,
                  inner = m_.inner / tp;
    std::vector<int64_t> sizes;
    const auto linear = [&](int64_t inputs, int64_t outputs) {
      sizes.push_back(inputs * outputs);
      if (m_.bias) sizes.push_back(outputs);
    };
    sizes.push_back(m_.hidden);
    for (const int64_t outputs : {q, kv, kv})
      linear(m_.hidden, outputs);
    linear(q, m_.hidden);
    sizes.push_back(m_.hidden);
    for (int i = 0; i < (m_.gated ? 2 : 1); ++i)
      linear(m_.hidden, inner);
    linear(inner, m_.hidden);
    return sizes;
  }

  void unit(const std::vector<int64_t>& sizes, int64_t times) {
    const int64_t shards = ranks(Axis::DpShard) * ranks(Axis::Sp), replicas = ranks(Axis::DpReplicate);
    for (const int64_t size : sizes)
      cost_.parameters += size * times;
    const shard::Layout layout(sizes, static_cast<int>(shards));
    const shard::StagePlacements& stage = shard::placements_of_stage(t_.stage);
    const int64_t gradients = layout.size() * t_.gradient_bytes, values = layout.size() * t_.parameter_bytes;
    const int64_t reductions = times * (stage.reduce_at == shard::ReduceAt::EveryBackward ? t_.micro_batches : 1);
    const std::string axis = comm::kStateAxes.name();
    const bool cut = stage.grads == shard::Placement::Shard;
    send(axis, cut ? "reduce_scatter" : "all_reduce", shards, gradients, reductions);
    if (stage.params == shard::Placement::Shard)
      send(axis, "all_gather", shards, values, times * t_.micro_batches * 2);
    else if (stage.states == shard::Placement::Shard)
      send(axis, "all_gather", shards, values, times);
    send("dp_replicate", "all_reduce", replicas, cut ? gradients / shards : gradients, times);
  }

  void zero() {
    unit(block(), m_.layers);
    if (m_.vocabulary == 0) return;
    const Sizes rows = part_sizes(m_.vocabulary, static_cast<int>(t_.vocab_parallel ? ranks(Axis::Tp) : 1));
    unit({rows[0] * m_.hidden, m_.hidden, rows[0] * m_.hidden}, 1);  // embedding, last norm, head
  }

  const BlockStack& m_;
  const Training& t_;
  Cost cost_;
};

std::string readable(int64_t bytes) {
  char text[32];
  const char* unit = bytes < 1 << 20 ? "KB" : bytes < 1 << 30 ? "MB" : "GB";
  const double size = bytes < 1 << 20 ? 1e3 : bytes < 1 << 30 ? 1e6 : 1e9;
  std::snprintf(text, sizeof text, "%.2f %s", static_cast<double>(bytes) / size, unit);
  return text;
}

}  // namespace

Traffic Cost::of(const std::string& axis, const std::string& operation) const {
  const auto found = axes.find(axis);
  if (found == axes.end()) return {};
  const auto traffic = found->second.find(operation);
  return traffic == found->second.end() ? Traffic() : traffic->second;
}

int64_t Cost::bytes(const std::string& axis) const {
  int64_t sum = 0;
  if (const auto found = axes.find(axis); found != axes.end())
    for (const auto& [operation, traffic] : found->second)
      sum += traffic.bytes;
  return sum;
}

std::string Cost::text() const {
  std::string result = c10::str("parameters of a rank of tp: ", parameters, "\n");
  char line[128];
  std::snprintf(line, sizeof line, "%-16s%-16s%12s%16s\n", "axis", "operation", "messages", "sent");
  result += line;
  for (const auto& [axis, operations] : axes) {
    for (const auto& [operation, traffic] : operations) {
      std::snprintf(line, sizeof line, "%-16s%-16s%12lld%16s\n", axis.c_str(), operation.c_str(),
                    static_cast<long long>(traffic.calls), readable(traffic.bytes).c_str());
      result += line;
    }
  }
  return result;
}

Cost cost(const BlockStack& model, const Training& training) {
  return Model(model, training).make();
}

}  // namespace tessera::parallel
