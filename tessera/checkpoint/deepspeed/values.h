// Values of a pickle: plain data, tensors as places in a file, and objects of classes as inert records, which nothing imports
// or runs. They lie in a Values, which owns them; a Value is a handle of two words.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/manifest.h"

namespace tessera::checkpoint::deepspeed {

class PtFile;
struct Value;
struct Object;
using Items = std::vector<Value>;
using Shape = std::vector<int64_t>;

// Says what is wrong with a value; the caller that knows the file adds its name.
class Unfit : public std::runtime_error {
  using std::runtime_error::runtime_error;
};
template <class... Parts>
[[noreturn]] void unfit(const Parts&... parts) {
  throw Unfit(c10::str(parts...));
}

// A record of a storage in a file of torch.save.
struct Storage {
  const PtFile* file = nullptr;
  Block block;
  at::ScalarType dtype = at::kByte;
  int64_t numel = 0;
};

struct TensorRef {
  const Storage* storage = nullptr;
  int64_t offset = 0;  // the first element's place, in elements of the storage
  Shape shape, strides;

  at::ScalarType dtype() const { return storage->dtype; }
  int64_t itemsize() const { return static_cast<int64_t>(c10::elementSize(dtype())); }
  int64_t begin() const {
    return storage->block.bytes.begin + offset * itemsize();
  }  // the first element's offset in the file, in bytes
  int64_t numel() const;
  bool is_contiguous() const;
};

// A contiguous tensor to write: its elements come in order, in 1-D tensors of its dtype.
struct Streamed {
  using Sink = std::function<void(const at::Tensor& chunk)>;
  at::ScalarType dtype = at::kFloat;
  Shape shape;
  std::function<void(const Sink& sink)> chunks;
};

// What a known name in a file of torch.save means to the reader.
enum class Meaning : uint8_t {
  Unknown,
  Class,  // its objects are inert records
  Ordered,
  DefaultDict,
  Dict,
  List,
  Set,
  FrozenSet,
  Bytes,
  Number,
  Size,
  Encode,
  Tensor,
  Parameter,
  FromType,
  Array,
  Scalar,
  Storage,
  Same
};
struct Name {
  std::string module, name;
  Meaning meaning = Meaning::Unknown;
  at::ScalarType dtype = at::kByte;  // a storage's dtype

  std::string text() const { return module + "." + name; }
};

enum class Kind : uint8_t {
  None,
  Bool,
  Int,
  Float,
  Dtype,
  Text,
  Bytes,
  Large,  // an integer of more than 64 bits: two's complement, the lowest byte first
  Tuple,
  List,
  Set,
  FrozenSet,
  Dict,
  Ordered,  // items: key, value, key, value
  Name,
  Object,
  Storage,
  Tensor,
  Streamed,
};

struct Value {
  Kind kind = Kind::None;
  union {
    int64_t number = 0;  // Bool too
    double real;
    at::ScalarType dtype;
    std::string* text;
    Items* items;
    Name* name;
    Object* object;
    Storage* storage;
    TensorRef* tensor;
    Streamed* streamed;
    const void* node;
  };

  static Value of(bool flag);
  static Value of(int64_t number);
  static Value of(double number);
  static Value of(at::ScalarType dtype);

  bool is(Kind of) const { return kind == of; }
  bool is_dict() const { return kind == Kind::Dict || kind == Kind::Ordered; }
  bool is_list() const { return kind == Kind::List || kind == Kind::Tuple; }
  bool is_number() const { return kind == Kind::Int || kind == Kind::Float; }
  bool is_node() const { return kind >= Kind::Text; }
  bool is_text(std::string_view expected) const { return kind == Kind::Text && *text == expected; }
};

// What a pickle does to an object once it is made.
struct Step {
  enum class What : uint8_t { State, Items, Pairs, Members } what = What::State;
  Items values;
};
struct Object {
  Value callable;  // a Name, or what another call gives
  Value args;      // a tuple
  bool is_new = false;
  std::vector<Step> steps;

  const Name* name() const { return callable.is(Kind::Name) ? callable.name : nullptr; }
  // The attribute, where the object's state is a dict or a tuple with dicts; null where there is none.
  const Value* attribute(std::string_view key) const;
  // All attributes, key, value, key, value, with texts as keys.
  Items attributes() const;
  // The last state that holds no attributes; null where there is none.
  const Value* raw() const;
};

class Values {
 public:
  // The most values of one file: a file with more is no checkpoint, Unfit.
  static constexpr int64_t kMost = int64_t{1} << 25;

  Value text(std::string text, Kind kind = Kind::Text);
  Value items(Kind kind, Items items = {});
  Value name(Name name);
  Value object(Object object);
  Value storage(Storage storage);
  Value tensor(TensorRef tensor);
  Value streamed(Streamed tensor);
  // A list of numbers or of texts.
  Value list(const Shape& numbers);
  Value list(const std::vector<std::string>& texts);
  // Appends dict[key], a key that the dict does not have yet.
  void put(const Value& dict, const std::string& key, const Value& value);
  // Counts `more` values towards kMost: what is made of earlier values counts too.
  void count(int64_t more = 1);

 private:
  int64_t count_ = 0;
  std::deque<std::string> texts_;
  std::deque<Items> items_;
  std::deque<Name> names_;
  std::deque<Object> objects_;
  std::deque<Storage> storages_;
  std::deque<TensorRef> tensors_;
  std::deque<Streamed> streamed_;
};

// ---- what a value must be; Unfit where it is not

// The dict's value under the key; null where there is none.
const Value* find(const Value& dict, std::string_view key);
const Value* find(const Value& dict, int64_t key);
const Value& at(const Value& dict, std::string_view key);
const Value& at(const Value& list, size_t index);
const Items& items_of(const Value& list);  // the items of a list or tuple
const Items& pairs_of(const Value& dict);
const std::string& text_of(const Value& value);
const TensorRef& tensor_of(const Value& value);
Shape shape_of(const Value& value);
bool has(const Value& dict, std::string_view key);
// The number that a plain number, a text of digits or a member of an enumeration stands for, from 0 to `most`.
int64_t number_of(const Value& value, int64_t most);
double real_of(const Value& value);
// The value as an error shows it, short.
std::string shown(const Value& value);
// A text of a file as an error shows it: its bytes may be in no known encoding.
std::string printable(std::string text);

int64_t numel_of(const Shape& shape);  // Unfit beyond 2^56
// The dims from the slowest to the fastest in memory; false where elements do not lie one after the other.
bool dense_order(const TensorRef& tensor, std::vector<int64_t>& order);

}  // namespace tessera::checkpoint::deepspeed
