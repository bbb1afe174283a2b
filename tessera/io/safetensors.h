// The header of a safetensors file: 8 bytes, its length N (little-endian); N bytes of JSON; then the tensors' bytes without
// gaps. Format: https://huggingface.co/docs/safetensors.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/io/file.h"

namespace tessera::io {

struct TensorEntry {
  std::string name;
  at::ScalarType dtype = at::kFloat;  // Undefined: one that torch does not have, of any size
  std::vector<int64_t> shape;         // of torch's elements; the file's where dtype is Undefined
  int64_t begin = 0, end = 0;         // bytes in the file
  std::string unknown = {};           // the format's word, where dtype is Undefined
  bool operator==(const TensorEntry&) const = default;
};

struct SafeTensors {
  std::vector<TensorEntry> tensors;
  std::map<std::string, std::string> metadata;
};

// F4 are two values in a byte, which are one element of torch (Float4_e2m1fn_x2): the last dim of a shape in a file counts values.

// Gives every entry its bytes, one after the other in order, and returns the header that the file begins with. Value error
// for a dtype that the format does not know, a name that is there twice or is the format's own, and texts that are no UTF-8.
std::string layout_safetensors(SafeTensors& file);
// Reads and checks the header, where dtypes may be unknown: bounds, gaps, overlaps, sizes that do not fit shape and dtype, a length beyond the file or 100 MB,
// text that is no JSON. IoError that names the file and the tensor.
SafeTensors read_safetensors(const File& file);

// The format's word, "BF16" for bfloat16; null for a dtype that the format does not know.
const char* safetensors_dtype(at::ScalarType dtype);
std::optional<at::ScalarType> dtype_of(const std::string& safetensors_dtype);

}  // namespace tessera::io
