// Update rules over all forms of model states, in every table, beside a probe with the same streams.
#include "bench/kernels/bench_util.h"
#include "tests/kernels/forms.h"

namespace tessera::bench {
namespace {

using namespace tessera::kernels;
using kernels::testing::Form;
using kernels::testing::MasterForm;

// A form with the gradients that go with it.
struct Shape {
  Form form;
  DType grad;
  int states;

  std::string name() const { return form.name() + "/" + name_of(grad) + "_grad"; }
};

// Shared by all benchmarks, as large as the largest form.
struct Buffers {
  explicit Buffers(int64_t n) : Buffers(n, Capacity(n).elements()) {}
  Buffers(int64_t n, int64_t capacity)
      : elements(n),
        master(DType::F32, capacity),
        state0(DType::F32, capacity),
        state1(DType::F32, capacity),
        grad(DType::F32, capacity),
        weight(DType::BF16, capacity),
        residual(DType::BF16, capacity) {}

  int64_t elements;
  Block master, state0, state1, grad, weight, residual;
};

// Values as in training; a few weights and gradients are denormal numbers in fp16.
void fill_all(const Buffers& b, const Shape& shape) {
  const std::vector<float> normal = normal_values();
  std::vector<float> squares(normal);
  for (float& x : squares)
    x *= x;
  const auto put = [&](const Block& block, DType dtype, const std::vector<float>& values, float scale) {
    fill(block, dtype, b.elements, values, scale);
  };
  put(b.master, DType::F32, normal, 0.02f);
  put(b.weight, shape.form.master.weight_dtype, normal, 0.02f);
  put(b.grad, shape.grad, normal, 1e-3f);
  put(b.state0, shape.form.state_dtype, normal, 1e-3f);
  put(b.state1, shape.form.state_dtype, squares, 1e-6f);
  if (shape.form.master.residual) best_table().split(b.weight.as(), b.residual.as(), b.master.as<float>(), b.elements);
}

UpdateRange range_of(const Buffers& b, const Shape& shape) {
  UpdateRange r;
  r.n = b.elements;
  if (shape.form.master.master) r.master = b.master.as<float>();
  if (shape.form.master.residual) r.residual = b.residual.as();
  if (shape.form.master.weight) r.weight = b.weight.as();
  r.weight_dtype = shape.form.master.weight_dtype;
  r.adopts = shape.form.master.adopts;
  r.grad = b.grad.as();
  r.grad_dtype = shape.grad;
  r.state0 = b.state0.as();
  r.state1 = b.state1.as();
  r.state_dtype = shape.form.state_dtype;
  r.rounding = shape.form.rounding;
  r.random = {1, 2, 0};
  return r;
}

Streams streams_of(const Buffers& b, const Shape& shape) {
  const MasterForm& master = shape.form.master;
  Streams s;
  if (master.master) s.update4 = {b.master.as<char>()};
  if (master.residual) s.update2 = {b.residual.as<char>()};
  if (master.weight) (master.master && !master.adopts ? s.write2 : s.update2).push_back(b.weight.as<char>());
  auto& states = shape.form.state_dtype == DType::F32 ? s.update4 : s.update2;
  if (shape.states > 0) states.push_back(b.state0.as<char>());
  if (shape.states > 1) states.push_back(b.state1.as<char>());
  (shape.grad == DType::F32 ? s.read4 : s.read2) = {b.grad.as<char>()};
  return s;
}

using Shared = std::shared_ptr<const Buffers>;

// Adam in all forms and tables; the other rules in the best table, in the forms of the precision modes that people
// choose and one by nearest rounding.
std::vector<Shape> shapes(int states) {
  const auto chosen = [&](const Form& form) {
    const std::string name = form.name();
    return states == 2 || name == "fp32/fp32_states" || name == "fp32+bf16/fp32_states" ||
           (states == 0 ? name == "split/fp32_states" : name == "split/bf16_states/stochastic") ||
           name == (states == 0 ? "bf16_alone/fp32_states" : "bf16_alone/bf16_states") ||
           name == (states == 0 ? "bf16_alone/fp32_states/stochastic" : "bf16_alone/bf16_states/stochastic");
  };
  std::vector<Shape> list;
  for (const Form& form : kernels::testing::forms()) {
    if (states == 0 && form.state_dtype != DType::F32) continue;
    if (form.rounding == Rounding::Stochastic && !form.draws(states)) continue;
    if (!chosen(form)) continue;
    const bool fp16 = form.master.weight && form.master.weight_dtype == DType::F16;
    const DType half = fp16 ? DType::F16 : DType::BF16;
    if (form.master.weight) list.push_back({form, half, states});
    if (form.master.master && !fp16 && form.state_dtype == DType::F32) list.push_back({form, DType::F32, states});
  }
  return list;
}

template <class Rule>
void add(const Settings& settings, const Shared& buffers, const std::string& rule_name, Rule rule,
         void (*Table::*entry)(const Rule&, const UpdateRange&, float), int states) {
  for (const Shape& shape : shapes(states)) {
    for (int threads : {1, 2}) {
      for (const Table* table : measured_tables(settings)) {
        if (states != 2 && table != &best_table()) continue;
        const std::string name =
            rule_name + "/" + shape.name() + "/threads:" + std::to_string(threads) + "/" + table->name;
        benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& s) {
          const Buffers& b = *buffers;
          fill_all(b, shape);
          const UpdateRange all = range_of(b, shape);
          measure(s, b.elements, threads, streams_of(b, shape),
                  [&](int64_t begin, int64_t end) { (table->*entry)(rule, part(all, begin, end), 1.0f); });
        })->UseManualTime();
      }
    }
  }
}

constexpr int64_t kTurns = 15;

// Updates in turns, so that a busy neighbour slows all forms. The buffers are filled anew for each, and a pass that is not
// timed comes first. Reports picoseconds an element (median) by form.
void measure_in_turns(benchmark::State& state, const Buffers& b, const std::vector<Shape>& forms,
                      const AdamRule& rule) {
  std::vector<std::vector<double>> times(forms.size());
  for (auto _ : state) {
    double all = 0;
    for (size_t k = 0; k < forms.size(); ++k) {
      fill_all(b, forms[k]);
      const UpdateRange range = range_of(b, forms[k]);
      const auto update = [&](int64_t begin, int64_t end) { best_table().adam(rule, part(range, begin, end), 1.0f); };
      pass_seconds(b.elements, update);
      times[k].push_back(pass_seconds(b.elements, update));
      all += times[k].back();
    }
    state.SetIterationTime(all);
  }
  for (size_t k = 0; k < forms.size(); ++k)
    state.counters["adam/" + forms[k].name()] = picoseconds_an_element(times[k], b.elements);
}

// Adam in the forms whose times are compared with each other.
void add_in_turns(const Shared& buffers, const AdamRule& rule) {
  const std::string compared[] = {"fp32/fp32_states", "fp32+bf16/fp32_states", "split/fp32_states",
                                  "split/bf16_states/stochastic", "bf16_alone/bf16_states/stochastic"};
  std::vector<Shape> forms;
  for (const Shape& shape : shapes(2)) {
    const bool own_grad = !shape.form.master.weight || shape.grad != DType::F32;
    if (own_grad && std::count(std::begin(compared), std::end(compared), shape.form.name()) > 0) forms.push_back(shape);
  }
  for (int threads : {1, 2}) {
    const std::string name = "in_turns/threads:" + std::to_string(threads) + "/" + best_table().name;
    const auto run = [=](benchmark::State& state) {
      at::set_num_threads(threads);
      measure_in_turns(state, *buffers, forms, rule);
    };
    benchmark::RegisterBenchmark(name.c_str(), run)->UseManualTime()->Iterations(kTurns);
  }
}

}  // namespace

void add_updates(const Settings& settings) {
  const auto buffers = std::make_shared<const Buffers>(settings.elements);
  const AdamRule adam{1e-6, 0.9, 0.999, 1e-8, 0.1};
  add(settings, buffers, "adam", adam, &Table::adam, 2);
  add_in_turns(buffers, adam);
  add(settings, buffers, "sgd", SgdRule{1e-6, 0, 0, 0}, &Table::sgd, 0);
  add(settings, buffers, "momentum", SgdRule{1e-6, 0.9, 0, 0}, &Table::sgd, 1);
  add(settings, buffers, "lion", LionRule{1e-6, 0.9, 0.99, 0.1}, &Table::lion, 1);
  add(settings, buffers, "adagrad", AdagradRule{1e-6, 1e-10, 0}, &Table::adagrad, 1);
}

}  // namespace tessera::bench
