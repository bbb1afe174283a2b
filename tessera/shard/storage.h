// Storage of parameters inside a flat buffer.
//
// Note [Parameter storage]
//   A parameter of a unit keeps a StorageImpl of its own, with its own size and offset 0, whose data pointer lies in the
//   unit's flat buffer. So torch.save, deepcopy and safetensors see one tensor of its own bytes, aliases saved by
//   autograd share the StorageImpl, and moving the pointer moves them all (stage 3). The StorageImpl holds a reference
//   to the buffer: a parameter outlives its engine.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <string>
#include <vector>

#include "tessera/shard/layout.h"

namespace tessera::shard {

// A reference to a storage that others may keep alive.
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// Shape of a parameter and the order of its elements in a flat buffer, which stay what they were when it was first bound:
// a user's module.to(memory_format=...) must not reorder what optimizer states stand beside.
struct Form {
  std::vector<int64_t> sizes,
      strides;  // strides of `param` where it is dense and non-overlapping, else contiguous ones
  Form() = default;
  Form(const at::Tensor& param);  // NOLINT(google-explicit-constructor): a tensor as it lies now
  bool operator==(const Form&) const = default;
};

// Note [Keys of parameters]
//   A front end may put the dispatch key kOwnKey, which torch leaves to others, and a BackendMeta on a parameter, so that the
//   dispatcher shows it each operator that takes this parameter (nn/cut_layers.h). Both lie in the TensorImpl, whose key
//   set_data() replaces: who gives a parameter other data does it by this function.
inline constexpr c10::DispatchKey kOwnKey = c10::DispatchKey::DeferredInit;
// Calls param.set_data(value); the key and the meta stay.
void set_data(at::Tensor& param, const at::Tensor& value);
// Does the same; from here on `param` has the key, and `meta`.
void set_keyed_data(at::Tensor& param, const at::Tensor& value, c10::intrusive_ptr<c10::BackendMeta> meta);

// Makes `param` live at flat[range] as `form`, with the dtype of `flat`, without touching the bytes there. Keeps the
// tensor's identity; does not bump its version.
void bind(at::Tensor& param, const at::Tensor& flat, Range range, const Form& form);

// True while `param`'s data still is flat[range]; false after a user's `p.data = t` or module.to(...).
bool is_bound(const at::Tensor& param, const at::Tensor& flat, Range range, const Form& form);

// flat[range] with sizes and strides of `form`. An ordinary view of `flat`.
at::Tensor view_as_param(const at::Tensor& flat, Range range, const Form& form);

// `tensor`, whose sizes are those of `form`, as contiguous memory in its order (1-D view if possible, else a copy).
at::Tensor flatten_like_param(const at::Tensor& tensor, const Form& form);

// Note [Released parameters]
//   Between uses a parameter of stage 3 keeps shape, dtype and StorageImpl; only the data pointer is null, and torch's
//   own flag makes every access to the data throw `message`. So an alias that autograd saved (W.t(), a view) becomes
//   readable again with the parameter itself, and nothing is copied out of the bucket.

// Gives `param` a StorageImpl of its own with the dtype of `flat_options` and no data. Returns that; it lives as long as
// the parameter, unless the user replaces it (p.data = t).
c10::StorageImpl* make_released(at::Tensor& param, const Form& form, const at::TensorOptions& flat_options,
                                const std::string& message);
// Points the storage at `data`, which the caller keeps alive until released.
void point(c10::StorageImpl& storage, void* data);
// Points the storage of `param` at flat[range.begin], which it keeps alive from here on. Aliases follow.
void rebind(const at::Tensor& param, const at::Tensor& flat, Range range);
void release(c10::StorageImpl& storage, const std::string& message);
// Releases the storage with the message that it was last released with.
void release_again(c10::StorageImpl& storage);
// The storage a parameter has now.
c10::StorageImpl* storage_of(const at::Tensor& param);
WeakStorage weak_storage_of(const at::Tensor& param);

// Note [Memory that somebody else holds]
//   `p.data, q.data = q.data, p.data` gives the storage of p, whose memory is the unit's, to q: another parameter, that of
//   another engine, an average of the weights. In plain PyTorch both keep the values that they have then. So before a
//   parameter with other data comes back to its place in the unit, a storage that somebody still holds there moves to memory
//   of its own, with its values; all that share the storage follow. Addresses that somebody took (NumPy) stay valid.

// Moves the storage of a parameter that has other data now, where the storage still lives, to memory of its own.
void move_out(const WeakStorage& storage);

}  // namespace tessera::shard
