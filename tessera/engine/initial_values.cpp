#include "tessera/engine/initial_values.h"

#include <ATen/ops/cat.h>
#include <c10/core/GradMode.h>

namespace tessera::engine {

void broadcast_unmanaged(const comm::Mesh& mesh, const zero::Options& options, const std::vector<ParamSpec>& params) {
  const c10::AutoGradMode no_grad(false);
  const at::ScalarType dtype = options.precision.param;
  for (const ParamSpec& spec : params) {
    if (zero::Units::holds(options, spec)) continue;
    if (spec.restore) spec.restore();
    at::Tensor tensor = spec.tensor;
    at::Tensor value = tensor.detach();
    if (const zero::Ranks ranks(mesh, spec.varies); ranks.all() > 1) {
      at::Tensor sent = value.contiguous();
      zero::Ranks same = ranks;
      same.varies_along_model = spec.varies.has(comm::Axis::Tp);
      same.broadcast(sent, 0, "initial value of '" + spec.name + "'");
      value.copy_(sent);
    }
    if (options.cast && at::isFloatingType(value.scalar_type()) && value.scalar_type() != dtype)
      tensor.set_data(value.to(dtype));
  }
}

void cast_back(const std::vector<ParamSpec>& params, const std::vector<at::ScalarType>& dtypes) noexcept {
  const c10::AutoGradMode no_grad(false);
  for (size_t i = 0; i < params.size(); ++i) {
    try {
      at::Tensor tensor = params[i].tensor;
      if (tensor.scalar_type() != dtypes[i]) tensor.set_data(tensor.detach().to(dtypes[i]));
    } catch (const std::exception&) {
      // It has no data, or there is no memory: the others are what they were.
    }
  }
}

void broadcast_buffers(const zero::Ranks& ranks, const std::vector<at::Tensor>& buffers, c10::Device device) {
  const c10::AutoGradMode no_grad(false);
  if (ranks.all() == 1 || buffers.empty()) return;
  std::vector<at::Tensor> bytes;
  bytes.reserve(buffers.size());
  for (const at::Tensor& buffer : buffers)
    bytes.push_back(buffer.detach().contiguous().flatten().view(at::kByte).to(device));
  const at::Tensor all = at::cat(bytes);
  ranks.broadcast(all, 0, "initial values of buffers");
  int64_t begin = 0;
  for (size_t i = 0; i < buffers.size(); ++i) {
    const at::Tensor& buffer = buffers[i];
    // A copy of its own: bytes in the middle of `all` are not aligned for a wider dtype.
    const at::Tensor mine = all.narrow(0, begin, bytes[i].numel()).clone().view(buffer.scalar_type());
    buffer.detach().copy_(mine.view(buffer.sizes()));
    begin += bytes[i].numel();
  }
}

}  // namespace tessera::engine
