// Sequences that are cut over two ranks (Ulysses, arXiv:2309.14509): attention sees whole sequences for half of the heads, all other
// layers half of the sequence.
//   tessera-run -n 2 ulysses
#include "small.h"

namespace {

using namespace small;
using tessera::comm::Axis;

void train() {
  const auto config = small::config(R"(, "zero_optimization": {"stage": 3}, "sequence_parallel_size": 2)");
  const tessera::comm::Mesh mesh = tessera::nn::environment_mesh(config);
  const auto sharing = mesh.group(Axis::Sp);
  constexpr int64_t kSequenceDim = 1;
  const small::Attend attend = [sharing](const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
    const auto turned = [](const at::Tensor& t) { return t.transpose(1, 2); };
    tessera::parallel::SequenceAttention attention(
        [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
          return turned(causal(turned(q), turned(k), turned(v)));
        },
        {sharing, kSequenceDim});
    return turned(attention(turned(query), turned(key), turned(value)));
  };
  Gpt model(attend, /*units=*/true);
  auto engine = tessera::initialize(model, config, mesh);
  const int64_t own = kLength / sharing->size(), begin = own * sharing->rank();
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto [ids, labels] = batch(step, engine.rank(), engine.size());
    const at::Tensor loss = engine.forward(ids.narrow(1, begin, own), labels.narrow(1, begin, own), begin);
    loss.backward();  // the mean over equal parts is the mean of the means
    engine.step();
    const double shown = engine.mean(loss).item<double>();
    if (engine.rank() == 0 && begin == 0) print("step", step, shown);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return small::run(argc, argv, train, small::train_plain_gpt);
}
