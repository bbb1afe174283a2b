#include "tessera/engine/flops.h"

#include <array>
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

// A callback of torch's gets no data of its owner's.
thread_local FlopCounter* current = nullptr;

}  // namespace

FlopCounter::FlopCounter() : outer_(std::exchange(current, this)) {
  if (outer_ == nullptr)
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&FlopCounter::count).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

FlopCounter::~FlopCounter() {
  if (handle_) at::removeCallback(*handle_);
  current = outer_;
}

std::unique_ptr<at::ObserverContext> FlopCounter::count(const at::RecordFunction& call) {
  current->total_ += operations_of(call.name(), call.inputs());
  return nullptr;
}

}  // namespace tessera::engine
