// What a program in Python has saved, as values of C++.
#pragma once

#include <ATen/core/ivalue.h>

#include <map>
#include <string>
#include <vector>

#include "tessera/checkpoint/deepspeed/pt_file.h"

namespace tessera::checkpoint::deepspeed {

// The values by key of a file that holds a dict; other keys than texts are left out. Lists and sets are lists, dicts of any order are
// dicts, bytes are texts, a torch.Size is a list of numbers, a dtype its number. What C++ has no value for is named in `left_out`, with
// the reason: objects of classes, integers of more than 64 bits, dicts with other keys than texts and numbers. IoError where the file is
// damaged.
std::map<std::string, c10::IValue> ivalues_of(const PtFile& file, std::vector<std::string>& left_out);

}  // namespace tessera::checkpoint::deepspeed
