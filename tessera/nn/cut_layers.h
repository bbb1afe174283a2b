// Layers of torch::nn whose weight is a slice: what the operators that take such a weight do instead.
//
// Note [Cut layers of torch]
//   A torch::nn::Linear is held in a typed member, its forward is not virtual, and there is no hook: neither the module nor its
//   call can be replaced. What all ways to use its weight have in common is that the weight itself comes to torch's dispatcher.
//   So a parameter that is cut has a dispatch key of its own (Note [Keys of parameters] in shard/storage.h), above autograd and
//   autocast, and a CutParam that says how layers use it. Kernels of that key take the operators of which linear and embedding
//   layers are made (F::linear is t() and then addmm or matmul, and += of the bias) and do what parallel/layers.h does. That
//   holds wherever the model is called, in a replay of a backward too, and for F::linear(x, layer->weight) as for the layer.
//
//   Any other operator sees a slice where the model's code means the whole. Products with it are errors at once. Others get an alias
//   of it whose gradient is an error that names the operator, so that a value may be looked at, but not trained through.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "tessera/parallel/layers.h"
#include "tessera/shard/cut.h"

namespace tessera::nn {

class SequenceCut;
class SummedParams;

// How a layer uses a parameter, and which ranks have what of it.
struct CutLayer {
  enum class Kind : uint8_t { Column, Row, SharedTail /* whole: parallel::share_outputs */, Embedding, Vocabulary };
  Kind kind = Kind::Column;
  parallel::Region region;  // label: path of the module
  // Null: activations outside are whole. Else they are cut along the sequence while sequence->is_on(), and then `cut_region` holds.
  std::shared_ptr<const SequenceCut> sequence;
  parallel::Region cut_region = {};
  int64_t total = 0;        // of the dim that is cut
  parallel::Ranges ranges;  // this rank's ranges
  parallel::Sizes sizes;    // [rank]
  bool gather = false;      // all outputs on every rank
  parallel::Sizes tail;     // see parallel::Decision
  shard::Range own_use;
  int64_t padding = -1;                  // of an embedding, in the whole's numbers; -1: none
  std::string rule;                      // the rule that took the layer
  std::shared_ptr<SummedParams> summed;  // Row
};
using CutLayerPtr = std::shared_ptr<const CutLayer>;

// The note that lies on a parameter of cut layers.
struct CutParam : c10::BackendMeta {
  std::string name;       // the parameter's first name
  shard::CutPtr cut;      // null: the parameter is whole, but used as its layer says
  CutLayerPtr linear;     // how a linear layer uses it as a weight; null: such a use is an error
  CutLayerPtr embedding;  // how an embedding uses it
  CutLayerPtr bias;       // the layer to whose outputs it is added

  const CutLayerPtr& layer() const { return linear ? linear : embedding ? embedding : bias; }
};
using CutParamPtr = c10::intrusive_ptr<CutParam>;

// The note of a tensor; null for other tensors.
const CutParam* cut_param(const at::Tensor& tensor);
// Gives `param` this data and note from now on.
void set_cut(at::Tensor& param, const at::Tensor& value, CutParamPtr note);
CutParamPtr cut_note(const at::Tensor& tensor);  // null for other tensors
// Gives `param` its key and note again, where somebody gave it data without the key (p.data = t). Local.
void keep_cut(at::Tensor& param, const CutParamPtr& note);

}  // namespace tessera::nn
