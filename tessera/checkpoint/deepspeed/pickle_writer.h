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
  // Of classes that are not known: as dicts with their name, an error, or as they came, which only a reader that is told to
  // trust them runs.
  Objects objects = Objects::Refused;
  bool of_deepspeed = false;
};

struct Written {
  std::string pickle;
  std::vector<Streamed> storages;  // by key, which is their number
};
// Unfit for what cannot be written. Tensors are read when their storage's chunks are asked for.
Written write_pickle(const Value& value, Style style);

}  // namespace tessera::checkpoint::deepspeed
