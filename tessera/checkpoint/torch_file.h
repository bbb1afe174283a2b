// Files of torch.save(): numbers, texts, lists, dicts and tensors, as Python and C++ read them.
#pragma once

#include <ATen/core/ivalue.h>

#include <functional>
#include <string>

namespace tessera::checkpoint {

class Reader;

// Writes the bytes of such a file, first to last; torch.load(weights_only=True) takes them. An error of `write` comes at the end.
void write_torch_file(const c10::IValue& value, const std::function<void(const void* bytes, size_t size)>& write);
// Returns such a file in memory. Value error that says `what` where a value holds an object, which is no data.
std::string to_torch_file(const c10::IValue& value, const std::string& what);
// Reads such a file. IoError that says `what` where it is damaged, or holds objects: nothing of a file is run.
c10::IValue from_torch_file(const std::string& bytes, const std::string& what);

// A dict that a front end has saved; None where there is no such blob. IoError where it is damaged.
c10::IValue dict_of_blob(const Reader& reader, const std::string& name);

}  // namespace tessera::checkpoint
