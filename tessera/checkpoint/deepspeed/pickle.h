// The pickle inside a file of torch.save, read by a machine that knows the operations torch.save writes and runs nothing: names
// are looked up in a table, objects of classes become records (values.h).
#pragma once

#include <functional>
#include <string>

#include "tessera/checkpoint/deepspeed/values.h"
#include "tessera/checkpoint/reader.h"

namespace tessera::checkpoint::deepspeed {

// What a pickle refers to and does not hold.
struct Outside {
  std::function<Storage(const Value& id)> storage;
  // Called where objects are refused, for a name that is in no table; throws.
  std::function<void(const Name& name)> refuse;
};

// Returns the pickled value; its parts lie in `values`. Unfit for a pickle that is damaged or would take unbounded memory.
Value read_pickle(const std::string& bytes, Objects objects, const Outside& outside, Values& values);

}  // namespace tessera::checkpoint::deepspeed
