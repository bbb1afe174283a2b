#include "tessera/checkpoint/deepspeed/ivalues.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>

namespace tessera::checkpoint::deepspeed {
namespace {

constexpr int kDeepestValue = 200;           // nesting; a value that holds itself has no end
constexpr int64_t kMost = int64_t{1} << 22;  // values: one that stands in several places is one for each of them

class Converter {
 public:
  explicit Converter(const PtFile& file) : file_(file) {}

  c10::IValue convert(const Value& value, int depth = 0) {
    if (depth > kDeepestValue) unfit("is nested too deep, or holds itself");
    if (++count_ > kMost) unfit("has too many values");
    switch (value.kind) {
      case Kind::None:
        return {};
      case Kind::Bool:
        return value.number != 0;
      case Kind::Int:
        return value.number;
      case Kind::Float:
        return value.real;
      case Kind::Dtype:
        return static_cast<int64_t>(value.dtype);
      case Kind::Text:
      case Kind::Bytes:
        return *value.text;
      case Kind::Tensor:
        return file_.read(*value.tensor);
      case Kind::Tuple:
        return c10::ivalue::Tuple::create(parts_of(value, depth));
      case Kind::List:
      case Kind::Set:
      case Kind::FrozenSet:
        return list_of(value, depth);
      case Kind::Dict:
      case Kind::Ordered:
        return dict_of(value, depth);
      case Kind::Large:
        unfit("is an integer of more than 64 bits");
      default:
        unfit("is ", shown(value));
    }
  }

 private:
  std::vector<c10::IValue> parts_of(const Value& value, int depth) {
    std::vector<c10::IValue> parts;
    for (const Value& item : *value.items)
      parts.push_back(convert(item, depth + 1));
    return parts;
  }

  c10::IValue list_of(const Value& value, int depth) {
    c10::impl::GenericList list(c10::AnyType::get());
    for (c10::IValue& part : parts_of(value, depth))
      list.push_back(std::move(part));
    return list;
  }

  c10::IValue dict_of(const Value& value, int depth) {
    c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
    const Items& pairs = pairs_of(value);
    for (size_t i = 0; i + 1 < pairs.size(); i += 2) {
      const Kind kind = pairs[i].kind;
      if (kind != Kind::Text && kind != Kind::Bool && kind != Kind::Int && kind != Kind::Float)
        unfit("has a key that is neither a text nor a number: ", shown(pairs[i]));
      dict.insert(convert(pairs[i], depth + 1), convert(pairs[i + 1], depth + 1));
    }
    return dict;
  }

  const PtFile& file_;
  int64_t count_ = 0;
};

}  // namespace

std::map<std::string, c10::IValue> ivalues_of(const PtFile& file, std::vector<std::string>& left_out) {
  std::map<std::string, c10::IValue> values;
  if (!file.value().is_dict()) file.fail("is damaged: it is no table");
  const Items& pairs = *file.value().items;
  for (size_t i = 0; i + 1 < pairs.size(); i += 2) {
    if (!pairs[i].is(Kind::Text)) continue;
    try {
      values.emplace(*pairs[i].text, Converter(file).convert(pairs[i + 1]));
    } catch (const Unfit& why) {
      left_out.push_back(c10::str("'", printable(*pairs[i].text), "' ", why.what()));
    }
  }
  return values;
}

}  // namespace tessera::checkpoint::deepspeed
