#include "tessera/base/transforms.h"

#include <ATen/functorch/DynamicLayer.h>

#include <algorithm>

namespace tessera::transforms {

bool record_graph() {
  const auto& layers = at::functorch::getDynamicLayerStack();
  return std::any_of(layers.begin(), layers.end(),
                     [](const auto& layer) { return layer.key() == at::functorch::TransformType::Grad; });
}

}  // namespace tessera::transforms
