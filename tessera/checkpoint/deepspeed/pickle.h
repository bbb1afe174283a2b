// The pickle inside a file of torch.save, read by a machine that knows the operations torch.save writes and runs nothing: names
// are looked up in a table, objects of classes become records (values.h).
#pragma once

#include <functional>
#include <string>

#include "tessera/checkpoint/deepspeed/values.h"
#include "tessera/checkpoint/reader.h"

namespace tessera::checkpoint::deepspeed {

// What a pickle refers to.
struct Outside {
  std::function<Storage(const Value& id)> storage;
  // A name that is in no table, where objects are refused; throws.
  std::function<void(const Name& name)> refuse;
};

// What was pickled; its parts lie in `values`. Unfit for what is damaged, and for what would take unbounded memory.
Value read_pickle(const std::string& bytes, Objects objects, const Outside& outside, Values& values);

}  // namespace tessera::checkpoint::deepspeed
