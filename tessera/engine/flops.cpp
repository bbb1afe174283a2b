#include "tessera/engine/flops.h"

#include <ATen/record_function.h>

#include <array>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::engine {
namespace {

using Inputs = c10::ArrayRef<const c10::IValue>;

// Sizes of tensors among the inputs; operators of another form than the known one count nothing.
const at::Tensor* tensor_at(const Inputs& inputs, size_t place, int64_t dims) {
  if (inputs.size() <= place || !inputs[place].isTensor()) return nullptr;
  const at::Tensor& tensor = inputs[place].toTensor();
  return tensor.defined() && (dims == 0 || tensor.dim() == dims) ? &tensor : nullptr;
}

// Of [b, m, k] by [b, k, n], with or without b.
double product(const Inputs& inputs, size_t first, int64_t dims) {
  const at::Tensor* const left = tensor_at(inputs, first, dims);
  const at::Tensor* const right = tensor_at(inputs, first + 1, dims);
  if (left == nullptr || right == nullptr) return 0;
  return 2.0 * static_cast<double>(left->numel()) * static_cast<double>(right->size(-1));
}

// (input, weight, bias, stride, padding, dilation, transposed, ...): each place of the output, or of the input where it is
// transposed, with each weight of a group.
double convolution(const Inputs& inputs) {
  const at::Tensor* const input = tensor_at(inputs, 0, 0);
  const at::Tensor* const weight = tensor_at(inputs, 1, 0);
  if (input == nullptr || weight == nullptr || inputs.size() < 7 || input->dim() != weight->dim()) return 0;
  if (!inputs[3].isIntList() || !inputs[4].isIntList() || !inputs[5].isIntList() || !inputs[6].isBool()) return 0;
  const auto stride = inputs[3].toIntVector(), padding = inputs[4].toIntVector(), dilation = inputs[5].toIntVector();
  double places = static_cast<double>(input->size(0));
  for (int64_t i = 2; i < input->dim(); ++i) {
    const auto at = [&](const std::vector<int64_t>& of) { return of[of.size() == 1 ? 0 : static_cast<size_t>(i - 2)]; };
    const int64_t reach = at(dilation) * (weight->size(i) - 1) + 1;
    const int64_t size =
        inputs[6].toBool() ? input->size(i) : (input->size(i) + 2 * at(padding) - reach) / at(stride) + 1;
    places *= static_cast<double>(size);
  }
  return 2.0 * places * static_cast<double>(weight->numel());
}

// Of queries [b, h, q, d], keys [b, h, k, d] and values [b, h, k, v]: two products, whatever a mask leaves out.
double attention(const Inputs& inputs) {
  const at::Tensor* const query = tensor_at(inputs, 0, 4);
  const at::Tensor* const key = tensor_at(inputs, 1, 4);
  const at::Tensor* const value = tensor_at(inputs, 2, 4);
  if (query == nullptr || key == nullptr || value == nullptr) return 0;
  const double pairs = static_cast<double>(query->size(0) * query->size(1)) * static_cast<double>(query->size(2)) *
                       static_cast<double>(key->size(2));
  return 2 * pairs * static_cast<double>(query->size(3) + value->size(3));
}

constexpr std::array kAttentions{
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable"};

double operations_of(std::string_view name, const Inputs& inputs) {
  if (name == "aten::mm" || name == "aten::_scaled_mm") return product(inputs, 0, 2);
  if (name == "aten::addmm" || name == "aten::_addmm_activation") return product(inputs, 1, 2);
  if (name == "aten::bmm") return product(inputs, 0, 3);
  if (name == "aten::baddbmm") return product(inputs, 1, 3);
  if (name == "aten::convolution") return convolution(inputs);
  for (const char* attends : kAttentions)
    if (name == attends) return attention(inputs);
  return 0;
}

bool copies(std::string_view name) {
  return name == "aten::_to_copy" || name == "aten::clone";
}

}  // namespace

struct FlopCounter::State {
  Listener* listener;
  double total = 0;
};

// What runs in one thread. A callback of torch's gets no data of its owner's; torch gives it to threads of a backward on a device, too,
// where nothing runs.
struct FlopCounter::Thread {
  std::vector<std::weak_ptr<State>> running;  // the innermost one last
  std::optional<at::CallbackHandle> handle;
  int counted = 0, backwards = 0;  // calls that are under way

  // One call of an operator, of those that are more than begun.
  struct Call : at::ObserverContext {
    Call(int& open) : open(&open) { ++open; }
    Call(const at::Tensor& from) : from(from) {}
    int* open = nullptr;
    at::Tensor from;
  };

  // Calls f with every counter that lives; the innermost one is the last.
  template <class F>
  void each(const F& f) const {
    for (size_t i = 0; i < running.size(); ++i)
      if (const auto state = running[i].lock()) f(*state, i + 1 == running.size());
  }

  // Forgets counters that are gone, of which another thread may have ended some.
  void tidy() {
    std::erase_if(running, [](const auto& state) { return state.expired(); });
    if (running.empty() && handle) at::removeCallback(*std::exchange(handle, std::nullopt));
  }

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call) {
    Thread& here = this_thread();
    if (call.scope() == at::RecordScope::BACKWARD_FUNCTION) return std::make_unique<Call>(here.backwards);
    if (here.counted > 0) return nullptr;
    const std::string_view name = call.name();
    const auto inputs = call.inputs();
    if (copies(name)) {
      const at::Tensor* const from = tensor_at(inputs, 0, 0);
      return from == nullptr ? nullptr : std::make_unique<Call>(*from);
    }
    const double operations = operations_of(name, inputs);
    if (operations == 0) return nullptr;
    here.each([&](State& state, bool innermost) {
      if (innermost) state.total += operations;
      if (state.listener != nullptr) state.listener->counted(operations, inputs, here.backwards > 0);
    });
    return std::make_unique<Call>(here.counted);
  }

  static void end(const at::RecordFunction& call, at::ObserverContext* context) {
    if (context == nullptr) return;
    const Call& begun = static_cast<const Call&>(*context);
    if (begun.open != nullptr) {
      --*begun.open;
      return;
    }
    const auto& outputs = call.outputs();
    if (outputs.size() != 1 || !outputs[0].isTensor()) return;  // the call has failed
    this_thread().each([&](const State& state, bool) {
      if (state.listener != nullptr) state.listener->copied(begun.from, outputs[0].toTensor());
    });
  }
};

FlopCounter::Thread& FlopCounter::this_thread() {
  thread_local Thread here;
  return here;
}

FlopCounter::FlopCounter(Listener* listener) : state_(std::make_shared<State>(State{listener})) {
  Thread& here = this_thread();
  here.tidy();
  here.running.push_back(state_);
  if (here.handle) return;
  here.handle =
      at::addThreadLocalCallback(at::RecordFunctionCallback(&Thread::begin, &Thread::end)
                                     .needsInputs(true)
                                     .needsOutputs(true)
                                     .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
}

FlopCounter::~FlopCounter() {
  state_.reset();
  this_thread().tidy();
}

double FlopCounter::total() const {
  return state_->total;
}

bool FlopCounter::in_backward() {
  return this_thread().backwards > 0;
}

}  // namespace tessera::engine
