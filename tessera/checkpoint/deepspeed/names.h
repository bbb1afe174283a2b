// The names that files of torch.save hold, and what they mean here. No other is ever given a meaning.
#pragma once

#include <optional>
#include <string>

#include "tessera/checkpoint/deepspeed/values.h"

namespace tessera::checkpoint::deepspeed {

Name known_name(std::string module, std::string name);
// torch.float32 and the like, which are values.
std::optional<at::ScalarType> known_dtype(const std::string& module, const std::string& name);
// The other way; null where there is none.
const char* dtype_name(at::ScalarType dtype);
const char* storage_name(at::ScalarType dtype);
const char* numpy_code(at::ScalarType dtype);
// Of an object numpy.dtype of plain little-endian numbers.
std::optional<at::ScalarType> numpy_dtype(const Value& value);

}  // namespace tessera::checkpoint::deepspeed
