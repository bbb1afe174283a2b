#include "tessera/base/transforms.h"

#include <ATen/functorch/DynamicLayer.h>

#include <algorithm>

namespace tessera::transforms {

bool hide_graph(bool recording) {
  const auto& layers = at::functorch::getDynamicLayerStack();
  return std::any_of(layers.begin(), layers.end(), [&](const auto& layer) {
    return recording || layer.key() == at::functorch::TransformType::Grad;  // which records one of its own
  });
}

}  // namespace tessera::transforms
