// Transformations of torch.func (grad, vmap, jvp, jacrev, hessian, ...) that are under way on this thread.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace tessera::transforms {

// Whether operators that run now leave graphs behind that no hook sees: tensors of a transformation wrap those that have graphs.
// `recording`: there is a graph outside of all transformations, too.
bool hide_graph(bool recording);

// Lets operators run as outside of all transformations, which would wrap the tensors that they make, while it lives. It is for
// work on an engine's own tensors, which must not switch anything for longer: afterwards the dispatcher's keys are as before.
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
