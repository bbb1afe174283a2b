// Update rules of every table, and a probe with the same streams (README of the numbers: bytes read
// + bytes written).
#include "bench/kernels/bench_util.h"
#include "bench/kernels/probe.h"

namespace tessera::bench {
namespace {

using namespace tessera::kernels;

struct Shape {
  const char* name;
  DType grad;
  bool weight;
  int states;
  int64_t bytes() const { return 8 + 8 * states + static_cast<int64_t>(size_of(grad)) + (weight ? 2 : 0); }
};

struct Buffers {
  Block master{DType::F32, kElements}, state0{DType::F32, kElements}, state1{DType::F32, kElements},
      grad{DType::F32, kElements}, weight{DType::BF16, kElements};
};

const Buffers& buffers() {
  static const Buffers all;
  return all;
}

UpdateRange range_of(const Shape& shape, int64_t begin, int64_t end) {
  const Buffers& b = buffers();
  UpdateRange r;
  r.n = end - begin;
  r.master = b.master.as<float>(4 * begin);
  r.weight = shape.weight ? b.weight.as(2 * begin) : nullptr;
  r.grad = b.grad.as(static_cast<int64_t>(size_of(shape.grad)) * begin);
  r.grad_dtype = shape.grad;
  r.state0 = b.state0.as<float>(4 * begin);
  r.state1 = b.state1.as<float>(4 * begin);
  return r;
}

void run_probe(benchmark::State& state, Shape shape, int threads, int64_t ahead) {
  const Buffers& b = buffers();
  Streams s;
  s.update4 = {b.master.as<char>()};
  if (shape.states > 0) s.update4.push_back(b.state0.as<char>());
  if (shape.states > 1) s.update4.push_back(b.state1.as<char>());
  (shape.grad == DType::F32 ? s.read4 : s.read2) = {b.grad.as<char>()};
  if (shape.weight) s.write2 = {b.weight.as<char>()};
  measure(state, threads, shape.bytes(), [&](int64_t begin, int64_t end) { probe(s, begin, end, ahead); });
}

template <class Rule>
void add(const std::string& rule_name, Rule rule, void (*Table::*entry)(const Rule&, const UpdateRange&, float),
         int states) {
  const Shape shapes[] = {{"f32", DType::F32, false, states},
                          {"bf16_grad_and_weight", DType::BF16, true, states},
                          {"f32_grad_bf16_weight", DType::F32, true, states}};
  for (const Shape& shape : shapes) {
    for (int threads : {1, 2}) {
      const std::string tail = std::string("/") + shape.name + "/threads:" + std::to_string(threads);
      for (int64_t ahead : {0, 512}) {
        const std::string name = rule_name + tail + (ahead ? "/probe_prefetch" : "/probe");
        benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& s) {
          run_probe(s, shape, threads, ahead);
        })->UseRealTime();
      }
      for (const Table* table : available_tables()) {
        const std::string name = rule_name + tail + "/" + table->name;
        benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& s) {
          measure(s, threads, shape.bytes(),
                  [&](int64_t begin, int64_t end) { (table->*entry)(rule, range_of(shape, begin, end), 1.0f); });
        })->UseRealTime();
      }
    }
  }
}

const bool kRegistered = [] {
  add("adam", AdamRule{1e-3, 0.9, 0.999, 1e-8, 0.1}, &Table::adam, 2);
  add("sgd", SgdRule{1e-6, 0, 0, 0}, &Table::sgd, 0);
  add("momentum", SgdRule{1e-6, 0.9, 0, 0}, &Table::sgd, 1);
  add("lion", LionRule{1e-6, 0.9, 0.99, 0.1}, &Table::lion, 1);
  add("adagrad", AdagradRule{1e-6, 1e-10, 0}, &Table::adagrad, 1);
  return true;
}();

}  // namespace
}  // namespace tessera::bench
