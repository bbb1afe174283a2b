// The names that files of torch.save hold, and what they mean to the reader. A name that is not listed is never given a meaning.
#pragma once

#include <optional>
#include <string>

#include "tessera/checkpoint/deepspeed/values.h"

namespace tessera::checkpoint::deepspeed {

Name known_name(std::string module, std::string name);
// The dtype that a name stands for, such as torch.float32; none for another name.
std::optional<at::ScalarType> known_dtype(const std::string& module, const std::string& name);
// Names of the dtype, of its storage and of NumPy's dtype in such files; null where there is none.
const char* dtype_name(at::ScalarType dtype);
const char* storage_name(at::ScalarType dtype);
const char* numpy_code(at::ScalarType dtype);
// The dtype of a pickled numpy.dtype, where its numbers are plain little-endian ones.
std::optional<at::ScalarType> numpy_dtype(const Value& value);

}  // namespace tessera::checkpoint::deepspeed
