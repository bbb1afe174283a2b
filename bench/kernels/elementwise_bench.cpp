// Element-wise passes of every table, and a probe with the same streams.
#include "bench/kernels/bench_util.h"

namespace tessera::bench {
namespace {

using namespace tessera::kernels;

struct Pair {
  DType to, from;
};
constexpr Pair kPairs[] = {{DType::F32, DType::F32},
                           {DType::BF16, DType::BF16},
                           {DType::F32, DType::BF16},
                           {DType::BF16, DType::F32},
                           {DType::F16, DType::F32}};

// What all passes share.
struct Blocks {
  explicit Blocks(int64_t n)
      : elements(n), capacity(Capacity(n).elements()), from(DType::F32, capacity), to(DType::F32, capacity) {}
  int64_t elements, capacity;
  Block from, to;
};
using Shared = std::shared_ptr<const Blocks>;

int64_t bytes(DType dtype) {
  return static_cast<int64_t>(size_of(dtype));
}

// Registers body(table, begin, end) over the blocks, which hold `types` before.
class Passes {
 public:
  explicit Passes(const Settings& settings)
      : settings_(settings), blocks_(std::make_shared<const Blocks>(settings.elements)) {}

  const Shared& blocks() const { return blocks_; }

  template <class Body>
  void add(const std::string& name, Pair types, const Streams& streams, Body body) const {
    for (int threads : {1, 2}) {
      for (const Table* table : measured_tables(settings_)) {
        const std::string full = name + "/threads:" + std::to_string(threads) + "/" + table->name;
        const int64_t n = settings_.elements;
        benchmark::RegisterBenchmark(full.c_str(), [=, blocks = blocks_](benchmark::State& s) {
          fill(blocks->from, types.from, n, normal_values(), 1e-3f);
          fill(blocks->to, types.to, n, normal_values(), 1e-3f);
          measure(s, n, threads, streams, [&](int64_t begin, int64_t end) { body(*table, begin, end); });
        })->UseManualTime();
      }
    }
  }

 private:
  Settings settings_;
  Shared blocks_;
};

void read(Streams& s, DType dtype, const Block& block) {
  (dtype == DType::F32 ? s.read4 : s.read2).push_back(block.as<char>());
}
void write(Streams& s, DType dtype, const Block& block) {
  (dtype == DType::F32 ? s.write4 : s.write2).push_back(block.as<char>());
}

void add_pair(const Passes& passes, Pair pair) {
  const std::string types = std::string(name_of(pair.from)) + "_to_" + name_of(pair.to);
  const Shared b = passes.blocks();
  Streams copy, accumulate;
  read(copy, pair.from, b->from);
  read(accumulate, pair.from, b->from);
  write(copy, pair.to, b->to);
  (pair.to == DType::F32 ? accumulate.update4 : accumulate.update2) = {b->to.as<char>()};
  for (float scale : {1.0f, 0.5f}) {
    const std::string name = std::string(scale == 1.0f ? "copy/" : "scaled_copy/") + types;
    passes.add(name, pair, copy, [=](const Table& table, int64_t begin, int64_t end) {
      table.scaled_copy(b->to.as(begin * bytes(pair.to)), pair.to, b->from.as(begin * bytes(pair.from)), pair.from,
                        scale, end - begin);
    });
  }
  passes.add("scaled_add/" + types, pair, accumulate, [=](const Table& table, int64_t begin, int64_t end) {
    table.scaled_add(b->to.as(begin * bytes(pair.to)), pair.to, b->from.as(begin * bytes(pair.from)), pair.from, 0.5f,
                     end - begin);
  });
  if (pair.to == DType::F32) return;
  passes.add("scaled_add_stochastic/" + types, pair, accumulate, [=](const Table& table, int64_t begin, int64_t end) {
    table.scaled_add_stochastic(b->to.as(begin * bytes(pair.to)), pair.to, b->from.as(begin * bytes(pair.from)),
                                pair.from, 0.5f, end - begin, {1, 2, static_cast<uint64_t>(begin)});
  });
}

void add_split(const Passes& passes) {
  const Shared b = passes.blocks();
  const int64_t residual = 2 * b->capacity;  // where it begins, behind the weights
  Streams split, join;
  split.read4 = join.write4 = {b->from.as<char>()};
  split.write2 = join.read2 = {b->to.as<char>(), b->to.as<char>(residual)};
  const Pair types{DType::F32, DType::F32};
  passes.add("split", types, split, [=](const Table& table, int64_t begin, int64_t end) {
    table.split(b->to.as(2 * begin), b->to.as(residual + 2 * begin), b->from.as<float>(4 * begin), end - begin);
  });
  passes.add("join", types, join, [=](const Table& table, int64_t begin, int64_t end) {
    table.join(b->from.as<float>(4 * begin), b->to.as(2 * begin), b->to.as(residual + 2 * begin), end - begin);
  });
}

void add_sum_of_squares(const Passes& passes, DType dtype) {
  const Shared b = passes.blocks();
  Streams one;
  read(one, dtype, b->from);
  passes.add(std::string("sum_of_squares/") + name_of(dtype), {dtype, dtype}, one,
             [=](const Table& table, int64_t begin, int64_t end) {
               benchmark::DoNotOptimize(table.sum_of_squares(b->from.as(begin * bytes(dtype)), dtype, end - begin));
             });
}

}  // namespace

void add_elementwise(const Settings& settings) {
  const Passes passes(settings);
  for (const Pair& pair : kPairs)
    add_pair(passes, pair);
  for (DType dtype : {DType::F32, DType::BF16})
    add_sum_of_squares(passes, dtype);
  add_split(passes);
}

}  // namespace tessera::bench
