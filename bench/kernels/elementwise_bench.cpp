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

const Block& block(int which) {
  static const Block blocks[] = {{DType::F32, kElements}, {DType::F32, kElements}};
  return blocks[which];
}

int64_t bytes(DType dtype) {
  return static_cast<int64_t>(size_of(dtype));
}

template <class Body>
void add(const std::string& name, const Streams& streams, Body body) {
  for (int threads : {1, 2}) {
    for (const Table* table : measured_tables()) {
      const std::string full = name + "/threads:" + std::to_string(threads) + "/" + table->name;
      benchmark::RegisterBenchmark(full.c_str(),
                                   [=](benchmark::State& s) {
                                     measure(s, threads, streams,
                                             [&](int64_t begin, int64_t end) { body(*table, begin, end); });
                                   })
          ->UseManualTime()
          ->MinTime(0.2);
    }
  }
}

void read(Streams& s, DType dtype, int which) {
  (dtype == DType::F32 ? s.read4 : s.read2).push_back(block(which).as<char>());
}
void write(Streams& s, DType dtype, int which) {
  (dtype == DType::F32 ? s.write4 : s.write2).push_back(block(which).as<char>());
}

void add_pair(Pair pair) {
  const std::string types = std::string(name_of(pair.from)) + "_to_" + name_of(pair.to);
  Streams copy, accumulate;
  read(copy, pair.from, 0);
  read(accumulate, pair.from, 0);
  write(copy, pair.to, 1);
  (pair.to == DType::F32 ? accumulate.update4 : accumulate.update2) = {block(1).as<char>()};
  for (float scale : {1.0f, 0.5f}) {
    const std::string name = std::string(scale == 1.0f ? "copy/" : "scaled_copy/") + types;
    add(name, copy, [=](const Table& table, int64_t begin, int64_t end) {
      table.scaled_copy(block(1).as(begin * bytes(pair.to)), pair.to, block(0).as(begin * bytes(pair.from)), pair.from,
                        scale, end - begin);
    });
  }
  add("scaled_add/" + types, accumulate, [=](const Table& table, int64_t begin, int64_t end) {
    table.scaled_add(block(1).as(begin * bytes(pair.to)), pair.to, block(0).as(begin * bytes(pair.from)), pair.from,
                     0.5f, end - begin);
  });
  if (pair.to == DType::F32) return;
  add("scaled_add_stochastic/" + types, accumulate, [=](const Table& table, int64_t begin, int64_t end) {
    table.scaled_add_stochastic(block(1).as(begin * bytes(pair.to)), pair.to, block(0).as(begin * bytes(pair.from)),
                                pair.from, 0.5f, end - begin, {1, 2, static_cast<uint64_t>(begin)});
  });
}

void add_split() {
  Streams split, join;
  split.read4 = join.write4 = {block(0).as<char>()};
  split.write2 = join.read2 = {block(1).as<char>(), block(1).as<char>(2 * kElements)};
  add("split", split, [](const Table& table, int64_t begin, int64_t end) {
    table.split(block(1).as(2 * begin), block(1).as(2 * (kElements + begin)), block(0).as<float>(4 * begin),
                end - begin);
  });
  add("join", join, [](const Table& table, int64_t begin, int64_t end) {
    table.join(block(0).as<float>(4 * begin), block(1).as(2 * begin), block(1).as(2 * (kElements + begin)),
               end - begin);
  });
}

void add_sum_of_squares(DType dtype) {
  Streams one;
  read(one, dtype, 0);
  add(std::string("sum_of_squares/") + name_of(dtype), one, [=](const Table& table, int64_t begin, int64_t end) {
    benchmark::DoNotOptimize(table.sum_of_squares(block(0).as(begin * bytes(dtype)), dtype, end - begin));
  });
}

const bool kRegistered = [] {
  for (const Pair& pair : kPairs)
    add_pair(pair);
  for (DType dtype : {DType::F32, DType::BF16})
    add_sum_of_squares(dtype);
  add_split();
  return true;
}();

}  // namespace
}  // namespace tessera::bench
