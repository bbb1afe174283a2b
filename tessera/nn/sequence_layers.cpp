#include "tessera/nn/sequence_layers.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/nn/outputs.h"

namespace tessera::nn {
namespace {

using torch::nn::AnyModule;
using torch::nn::AnyValue;

constexpr size_t kMostArguments = 6;

// Functions by type, and by the number of arguments: as a list the compiler does not make one large function of them.
using AppendTensors = bool (*)(AnyValue& value, std::vector<at::Tensor>& tensors);
template <class T>
bool append_as(AnyValue& value, std::vector<at::Tensor>& tensors) {
  const T* const held = value.try_get<T>();
  if (held != nullptr) append_tensors(*held, tensors);
  return held != nullptr;
}

template <class... T>
std::vector<AppendTensors> appends_of() {
  return {append_as<T>...};
}

// Appends the tensors in a value; false for a type that is none of those that layers of torch have.
bool append_any(AnyValue& value, std::vector<at::Tensor>& tensors) {
  using T = at::Tensor;
  using Two = std::tuple<T, T>;
  static const std::vector<AppendTensors> known =
      appends_of<T, std::optional<T>, std::vector<T>, Two, std::tuple<T, T, T>, std::tuple<T, Two>, std::optional<Two>,
                 std::pair<T, T>, bool, int, int64_t, float, double, std::optional<int64_t>, std::vector<int64_t>,
                 std::optional<std::vector<int64_t>>, std::string>();
  return std::ranges::any_of(known, [&](AppendTensors append) { return append(value, tensors); });
}

using LayerCall = AnyValue (*)(AnyModule& layer, std::vector<AnyValue>& arguments);
template <class Numbers>
struct CallWith;
template <size_t... Number>
struct CallWith<std::index_sequence<Number...>> {
  static AnyValue call(AnyModule& layer, std::vector<AnyValue>& arguments) {
    return layer.any_forward(std::move(arguments[Number])...);
  }
};
template <size_t... Count>
std::vector<LayerCall> calls_of(std::index_sequence<Count...>) {
  return {CallWith<std::make_index_sequence<Count>>::call...};
}

AnyValue call_with(AnyModule& layer, std::vector<AnyValue>& arguments) {
  static const std::vector<LayerCall> by_count = calls_of(std::make_index_sequence<kMostArguments + 1>());
  TESSERA_CHECK_BUILT(arguments.size() < by_count.size(), "engine.forward", "a layer of a Sequential is called with ",
                      arguments.size(), " arguments, more than ", kMostArguments,
                      ": push tessera::nn::unit(layer) into it in its place");
  return by_count[arguments.size()](layer, arguments);
}

bool is_gathered(const AnyModule& any) {
  return !any.is_empty() && any.type_info() == typeid(GatheredLayer);
}

}  // namespace

GatheredLayer::GatheredLayer(AnyModule layer) : layer_(std::move(layer)) {}

AnyValue GatheredLayer::call(std::vector<AnyValue>&& arguments) {
  ModuleScope call(scope());
  if (call.wants_tensors()) {
    std::vector<at::Tensor> inputs;
    bool all = true;
    for (AnyValue& argument : arguments)
      all = append_any(argument, inputs) && all;
    if (!all) inputs.clear();  // the call ends with the backward
    call.note_inputs(inputs);
  }
  AnyValue result = call_with(layer_, arguments);
  std::vector<at::Tensor> outputs;
  const bool known = !call.wants_tensors() || append_any(result, outputs);
  call.finish(outputs, /*hides=*/!known);
  return result;
}

at::Tensor GatheredLayer::forward(at::Tensor input) {
  std::vector<AnyValue> arguments;
  arguments.emplace_back(std::move(input));
  return call(std::move(arguments)).get<at::Tensor>();
}

std::unordered_map<const torch::nn::Module*, GatheredLayer*> gathered_layers(const torch::nn::Module& root) {
  std::unordered_map<const torch::nn::Module*, GatheredLayer*> found;
  root.apply([&](const torch::nn::Module& module) {
    // The AnyModules of a Sequential are as const as it is; the layers are not.
    auto* const sequence = const_cast<torch::nn::SequentialImpl*>(module.as<torch::nn::SequentialImpl>());
    if (sequence == nullptr) return;
    for (AnyModule& any : *sequence)
      if (is_gathered(any)) found.emplace(any.ptr().get(), &any.get<GatheredLayer>());
  });
  return found;
}

GatheredSequences::GatheredSequences(std::shared_ptr<torch::nn::Module> root, std::vector<std::string> leaves)
    : root_(std::move(root)), leaves_(std::move(leaves)) {
  wrap();
}

void GatheredSequences::wrap() {
  std::vector<std::string> as_one = leaves_;  // and modules that say themselves when they run, with all that is inside
  const auto is_part = [&](const std::string& path) {
    return std::ranges::any_of(as_one, [&](const std::string& around) {
      return around.empty() || path == around || path.starts_with(around + ".");
    });
  };
  for (const auto& item : root_->named_modules()) {
    if (dynamic_cast<ScopeHolder*>(item.value().get()) != nullptr) as_one.push_back(item.key());
    auto* const sequence = item.value()->as<torch::nn::SequentialImpl>();
    if (sequence == nullptr || is_part(item.key())) continue;
    wrap(*sequence);
    sequences_.emplace_back(item.value());
  }
}

void GatheredSequences::wrap(torch::nn::SequentialImpl& sequence) {
  for (AnyModule& any : sequence) {
    if (any.is_empty() || is_gathered(any)) continue;
    const std::shared_ptr<torch::nn::Module> layer = any.ptr();
    if (dynamic_cast<ScopeHolder*>(layer.get()) != nullptr || layer->parameters().empty()) continue;
    any = AnyModule(std::make_shared<GatheredLayer>(std::move(any)));
  }
}

GatheredSequences::~GatheredSequences() {
  for (const auto& each : sequences_) {
    const std::shared_ptr<torch::nn::Module> module = each.lock();
    if (module == nullptr) continue;
    for (AnyModule& any : *module->as<torch::nn::SequentialImpl>()) {
      if (!is_gathered(any)) continue;
      AnyModule layer = std::move(any.get<GatheredLayer>().layer());
      any = std::move(layer);
    }
  }
}

}  // namespace tessera::nn
