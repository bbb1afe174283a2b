// Transformations of torch.func (grad, vmap, jvp, jacrev, hessian, ...) that are under way on this thread.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace tessera::transforms {

// Whether operators that run now leave graphs behind that no hook sees: tensors of a transformation wrap those that have graphs.
// `recording`: there is a graph outside of all transformations, too.
bool hide_graph(bool recording);

// While this object lives operators do what they do outside of all transformations, which would wrap the tensors that they make.
// For work on an engine's own tensors, which switches nothing that shall outlast it: at its end all keys of the dispatcher are as
class Suspended {
  c10::impl::ExcludeDispatchKeyGuard keys_{c10::DispatchKeySet(
      {c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
};

// Suspends torch's Python modes too, of which one may make tensors without memory (FakeTensorMode). For what Python's garbage
// collector ends, at any place.
class Unobserved {
  Suspended transforms_;
  c10::impl::ExcludeDispatchKeyGuard keys_{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

}  // namespace tessera::transforms
