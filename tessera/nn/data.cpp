#include "tessera/nn/data.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/engine/agreement.h"
#include "tessera/zero/ranks.h"

namespace tessera::nn {
namespace {

thread_local at::Generator reading;  // of the batch that this thread reads

// splitmix64: neighbouring seeds have nothing in common.
uint64_t mixed(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

}  // namespace

at::Generator batch_generator() {
  TESSERA_CHECK(reading.defined(), "data",
                "batch_generator() is for a dataset whose batch an nn::Loader reads, in the thread that reads it; "
                "elsewhere use a generator of your own");
  return reading;
}

namespace detail {

BatchDraws::BatchDraws(uint64_t seed) : before_(std::exchange(reading, at::detail::createCPUGenerator(seed))) {}

BatchDraws::~BatchDraws() {
  reading = before_;
}

std::optional<BatchRequest> BatchSampler::next(size_t batch_size) {
  auto examples = sampler_.next(batch_size);
  if (!examples) return {};
  return BatchRequest{std::move(*examples), batch_seed(seed_, next_++)};
}

uint64_t batch_seed(uint64_t pass_seed, int64_t batch) {
  return mixed(pass_seed + mixed(static_cast<uint64_t>(batch)));
}

void read_aside(const std::function<void()>& read) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const at::Tensor before = generator.get_state();
  read();
  generator.set_state(before);
}

uint64_t pass_seed(uint64_t seed, int64_t epoch, int rank) {
  return mixed(mixed(mixed(seed) + static_cast<uint64_t>(epoch)) + static_cast<uint64_t>(rank));
}

}  // namespace detail

RankSampler::RankSampler(int64_t size, int rank, int ranks, const LoaderOptions& options, DataPosition position) {
  const io::DataOrder order{
      .shuffle = options.shuffle, .seed = options.seed, .drop_last = options.drop_last.value_or(false)};
  const std::vector<int64_t> mine = io::rank_order(size, rank, ranks, order, position);
  mine_.assign(mine.begin(), mine.end());
}

RankSampler::RankSampler(const std::vector<int64_t>& order, int rank, int ranks, bool drop_last, int64_t samples) {
  const std::vector<int64_t> mine = io::dealt(order, rank, ranks, drop_last, samples);
  mine_.assign(mine.begin(), mine.end());
}

std::optional<std::vector<size_t>> RankSampler::next(size_t batch_size) {
  if (next_ == mine_.size()) return {};
  const size_t end = std::min(mine_.size(), next_ + batch_size);
  std::vector<size_t> batch(mine_.begin() + static_cast<std::ptrdiff_t>(next_),
                            mine_.begin() + static_cast<std::ptrdiff_t>(end));
  next_ = end;
  return batch;
}

void RankSampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("next", c10::IValue(static_cast<int64_t>(next_)));
}

void RankSampler::load(torch::serialize::InputArchive& archive) {
  c10::IValue next;
  archive.read("next", next);
  next_ = std::min(mine_.size(), static_cast<size_t>(std::max<int64_t>(0, next.toInt())));
}

c10::IValue to_value(DataPosition position) {
  c10::impl::GenericDict value(c10::StringType::get(), c10::AnyType::get());
  value.insert("epoch", position.epoch);
  value.insert("samples", position.samples);
  if (position.size > 0) value.insert("size", position.size);
  if (position.workers) value.insert("workers", *position.workers);
  return value;
}

DataPosition data_position(const c10::IValue& value, int64_t size, std::optional<int64_t> workers) {
  const auto count = [&](const char* key) {
    TESSERA_CHECK_IO(value.isGenericDict() && value.toGenericDict().contains(key) &&
                         value.toGenericDict().at(key).isInt() && value.toGenericDict().at(key).toInt() >= 0,
                     "data", "the state of a loader has no '", key, "' that can be");
    return value.toGenericDict().at(key).toInt();
  };
  DataPosition position{count("epoch"), count("samples")};
  if (value.toGenericDict().contains("size")) position.size = count("size");
  if (value.toGenericDict().contains("workers")) position.workers = count("workers");  // of Python's loader of a stream
  io::check_position(position, size, workers);
  return position;
}

namespace detail {

std::vector<int64_t> begin_order(PassOrder& order, int64_t epoch, int64_t size, int64_t saved_size,
                                 const std::function<void(const std::string&)>& agree) {
  std::vector<int64_t> made = order_of(order, epoch, size);
  TESSERA_CHECK_VALUE(saved_size == 0 || saved_size == static_cast<int64_t>(made.size()), "data",
                      "the state is of a place in a pass of ", saved_size, " examples, and the order here gives ",
                      made.size(), " of pass ", epoch,
                      ": give the loader the order of that run, or begin without its state");
  if (agree) agree(line_of(made));
  return made;
}

c10::IValue with_order(const c10::IValue& state, const c10::IValue& order) {
  if (!order.isNone()) state.toGenericDict().insert("order", order);
  return state;
}

void load_order(PassOrder* order, const c10::IValue& state) {
  const auto values = state.toGenericDict();
  if (!values.contains("order")) return;
  TESSERA_CHECK_VALUE(
      order != nullptr, "data",
      "the state is of a loader with an order of the program's own: give this one LoaderOptions::order, "
      "or begin without its state");
  order->load_state(values.at("order"));
}

void check_orders(const comm::Mesh& mesh, c10::Device device, const std::string& line) {
  zero::Ranks ranks(mesh);
  ranks.device = device;
  engine::check_same(ranks, {line}, "data", "the order of the examples is not the same on all ranks",
                     "make it of the number of the pass, and draw from the generator that order_by() gives");
}

}  // namespace detail

}  // namespace tessera::nn
