// Values as a pickle that torch.load opens, and the storages of its tensors.
#pragma once

#include <string>
#include <vector>

#include "tessera/checkpoint/deepspeed/values.h"
#include "tessera/checkpoint/reader.h"

namespace tessera::checkpoint::deepspeed {

// Note [Values that are no plain data]
//   A blob of a checkpoint of ours is read by torch.load(weights_only=True): arrays of NumPy and streams of io are dicts of one
//   key there, {"numpy.ndarray": tensor} and {"io.BytesIO": (bytes, position)}, and records of DeepSpeed's classes dicts with
//   their name under "__class__". A file for DeepSpeed has the arrays and streams themselves.
struct Style {
  // How objects of unknown classes are written: Inert as dicts with the class's name, Refused as an error, Kept as they came,
  // which only a reader that is told to trust the file runs.
  Objects objects = Objects::Refused;
  bool of_deepspeed = false;
};

struct Written {
  std::string pickle;
  std::vector<Streamed> storages;  // by key: a storage's key is its number
};
// Unfit for a value that cannot be written. A tensor is read when its storage's chunks are asked for.
Written write_pickle(const Value& value, Style style);

}  // namespace tessera::checkpoint::deepspeed
