// Files that torch.load opens, written without having their tensors in memory: data.pkl first, then every storage in pieces as they
// come.
#pragma once

#include <string>

#include "tessera/checkpoint/deepspeed/pickle_writer.h"

namespace tessera::checkpoint::deepspeed {

// Writes the file through to the disk. Unfit for a value that cannot be written.
void write_pt(const std::string& path, const Value& value, Style style);
// Returns the file's bytes.
std::string pt_bytes(const Value& value, Style style);

}  // namespace tessera::checkpoint::deepspeed
