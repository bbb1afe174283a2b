// ParamSpec: a parameter as a front end hands it over.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>

#include "tessera/comm/mesh.h"
#include "tessera/shard/cut.h"

namespace tessera::zero {

// Index in the list that an engine was built from: the one number of a parameter, for front ends, hooks and states alike.
using ParamId = int;

// Order matters: it is the order of the flat space.
struct ParamSpec {
  std::string name = {};   // as in named_parameters()
  at::Tensor tensor = {};  // a leaf; the engine moves its storage into a flat buffer (shard/storage.h)
  int group = -1;          // index of its optimizer group; -1: not optimized (broadcast and cast only)
  std::string unit = {};   // parameters with one unit name are gathered, reduced and freed together
  // Collective, called once before its unit is built: gives a tensor that was partitioned before (early_params.h) its
  // values, equal on all ranks. Empty: the tensor has values; rank 0's hold.
  std::function<void()> restore = {};
  // Dtype that the gradient and, where partitioned, gathered values travel in; unset: Options::communication, and the
  // parameter's own dtype. Float, Half or BFloat16.
  std::optional<at::ScalarType> comm = {};
  // The axes along which the parameter differs, as `name` on other ranks is another slice or another expert: nothing of it is
  // exchanged along them. All ranks say the same.
  comm::Axes varies = {};
  // Which elements of a whole the parameter is; null: all. Random bits follow the numbers of the whole, so that results do not
  // depend on the cut; the tensor must be contiguous then.
  shard::CutPtr cut = {};
  int joins = -1;  // without a group: the one that it joins when it requires a gradient (joining.h); -1: none
};

// Throws a value error for a complex parameter: no precision trains that.
void check_real(const ParamSpec& param);

}  // namespace tessera::zero
