#include "tessera/checkpoint/deepspeed/pickle.h"

#include <c10/util/Half.h>

#include <bit>
#include <cstring>
#include <unordered_map>

#include "tessera/checkpoint/deepspeed/names.h"

namespace tessera::checkpoint::deepspeed {

namespace {

constexpr int kLargestKey = 1000;  // parts of a tuple that is a key, with those of tuples in it
constexpr int64_t kMostSize = int64_t{1} << 56;
constexpr size_t kMostDims = 64;
constexpr int64_t kBytesOfValue = 64;  // a made text counts as one value for so many bytes

// The operations of protocols 2 to 5 that torch.save writes, by their byte.
// clang-format off
enum class Op : uint8_t {
  Mark = '(', Stop = '.', Pop = '0', PopMark = '1', None = 'N', True = 0x88, False = 0x89,
  Proto = 0x80, Frame = 0x95,
  Int4 = 'J', Int1 = 'K', Int2 = 'M', Long1 = 0x8a, Long4 = 0x8b, Float = 'G',
  Text4 = 'X', Text1 = 0x8c, Text8 = 0x8d, Bytes4 = 'B', Bytes1 = 'C', Bytes8 = 0x8e,
  EmptyDict = '}', EmptyList = ']', EmptyTuple = ')', EmptySet = 0x8f,
  Tuple = 't', Tuple1 = 0x85, Tuple2 = 0x86, Tuple3 = 0x87, List = 'l',
  Put1 = 'q', Put4 = 'r', Memoize = 0x94, Get1 = 'h', Get4 = 'j',
  Global = 'c', StackGlobal = 0x93, Persistent = 'Q',
  Reduce = 'R', NewObject = 0x81, NewObjectEx = 0x92, Build = 'b',
  SetItem = 's', SetItems = 'u', Append = 'a', Appends = 'e', AddItems = 0x90, FrozenSet = 0x91,
};
// clang-format on

class Machine {
 public:
  Machine(const std::string& bytes, Objects objects, const Outside& outside, Values& values)
      : bytes_(bytes), objects_(objects), outside_(outside), values_(values) {}
  Value run();

 private:
  // ---- the bytes
  const char* take(uint64_t count) {
    if (count > bytes_.size() - at_) unfit("it ends before its end");
    const char* from = bytes_.data() + at_;
    at_ += count;
    return from;
  }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  template <class Length>
  std::string text() {
    const auto length = number<Length>();
    return {take(length), static_cast<size_t>(length)};
  }
  std::string line() {
    const size_t end = bytes_.find('\n', at_);
    if (end == std::string::npos) unfit("it ends before its end");
    const size_t length = end - at_;
    std::string text(take(length), length);
    take(1);
    return text;
  }

  // ---- the stack
  void push(const Value& value) {
    values_.count();
    stack_.push_back(value);
  }
  size_t bottom() const { return marks_.empty() ? 0 : marks_.back(); }
  Value pop() {
    if (stack_.size() <= bottom()) unfit("an operation without a value");
    const Value value = stack_.back();
    stack_.pop_back();
    return value;
  }
  const Value& top() const {
    if (stack_.size() <= bottom()) unfit("an operation without a value");
    return stack_.back();
  }
  Items pop_mark() {
    if (marks_.empty()) unfit("an end without a mark");
    Items items(stack_.begin() + static_cast<int64_t>(marks_.back()), stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }
  Items pop_some(int count) {
    Items items(static_cast<size_t>(count));
    for (int i = count; i > 0; --i)
      items[i - 1] = pop();
    return items;
  }

  bool keeps_objects() const { return objects_ != Objects::Refused; }
  bool step(Op op);
  bool step_plain(Op op);
  void find_name(std::string module, std::string name);
  void push_integer(uint32_t bytes);
  void get(uint32_t place);
  const Value& key(const Value& value) const;
  Items keys(const Value& items) const;
  void set_items(Items pairs);
  void append(Items items);
  void add(Items items);
  void build();
  Value call(const Value& function, const Value& args, bool is_new);
  Value call_known(const Name& function, const Value& args, bool is_new);
  Value make_tensor(const Items& args);
  Value make_scalar(const Value& function, const Value& args, bool is_new);
  Value make_bytes(const Items& args);

  const std::string& bytes_;
  const Objects objects_;
  const Outside& outside_;
  Values& values_;
  size_t at_ = 0;
  std::vector<Value> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint32_t, Value> memo_;  // places are numbers of the file
};

Value Machine::run() {
  while (step(static_cast<Op>(number<uint8_t>()))) {
  }
  const Value value = pop();
  if (!stack_.empty() || !marks_.empty()) unfit("it has more than one value");
  return value;
}

// Runs one operation; false at the pickle's end.
bool Machine::step(Op op) {
  switch (op) {
    case Op::Stop:
      return false;
    case Op::Global: {
      std::string module = line();
      find_name(std::move(module), line());
      return true;
    }
    case Op::StackGlobal: {
      const Value name = pop(), module = pop();
      find_name(text_of(module), text_of(name));
      return true;
    }
    case Op::Persistent:
      push(values_.storage(outside_.storage(pop())));
      return true;
    case Op::Reduce:
    case Op::NewObject: {
      const Value args = pop(), function = pop();
      push(call(function, args, op == Op::NewObject));
      return true;
    }
    case Op::NewObjectEx: {
      const Value more = pop(), args = pop(), function = pop();
      if (!pairs_of(more).empty()) unfit("arguments by name");
      push(call(function, args, true));
      return true;
    }
    case Op::Build:
      build();
      return true;
    case Op::SetItem:
      set_items(pop_some(2));
      return true;
    case Op::SetItems:
      set_items(pop_mark());
      return true;
    case Op::Append:
      append(pop_some(1));
      return true;
    case Op::Appends:
      append(pop_mark());
      return true;
    case Op::AddItems:
      add(pop_mark());
      return true;
    case Op::FrozenSet: {
      const Value items = values_.items(Kind::Tuple, pop_mark());
      push(values_.items(Kind::FrozenSet, keys(items)));
      return true;
    }
    default:
      return step_plain(op);
  }
}

bool Machine::step_plain(Op op) {
  switch (op) {
    case Op::Proto:
      take(1);
      break;
    case Op::Frame:
      take(8);
      break;
    case Op::Mark:
      marks_.push_back(stack_.size());
      values_.count();
      break;
    case Op::Pop:
      if (stack_.size() > bottom())
        pop();
      else
        pop_mark();
      break;
    case Op::PopMark:
      pop_mark();
      break;
    case Op::None:
      push({});
      break;
    case Op::True:
      push(Value::of(true));
      break;
    case Op::False:
      push(Value::of(false));
      break;
    case Op::Int4:
      push(Value::of(int64_t{number<int32_t>()}));
      break;
    case Op::Int1:
      push(Value::of(int64_t{number<uint8_t>()}));
      break;
    case Op::Int2:
      push(Value::of(int64_t{number<uint16_t>()}));
      break;
    case Op::Long1:
      push_integer(number<uint8_t>());
      break;
    case Op::Long4:
      push_integer(number<uint32_t>());
      break;
    case Op::Float:
      push(Value::of(std::bit_cast<double>(__builtin_bswap64(number<uint64_t>()))));
      break;
    case Op::Text4:
      push(values_.text(text<uint32_t>()));
      break;
    case Op::Text1:
      push(values_.text(text<uint8_t>()));
      break;
    case Op::Text8:
      push(values_.text(text<uint64_t>()));
      break;
    case Op::Bytes4:
      push(values_.text(text<uint32_t>(), Kind::Bytes));
      break;
    case Op::Bytes1:
      push(values_.text(text<uint8_t>(), Kind::Bytes));
      break;
    case Op::Bytes8:
      push(values_.text(text<uint64_t>(), Kind::Bytes));
      break;
    case Op::EmptyDict:
      push(values_.items(Kind::Dict));
      break;
    case Op::EmptyList:
      push(values_.items(Kind::List));
      break;
    case Op::EmptyTuple:
      push(values_.items(Kind::Tuple));
      break;
    case Op::EmptySet:
      push(values_.items(Kind::Set));
      break;
    case Op::Tuple:
      push(values_.items(Kind::Tuple, pop_mark()));
      break;
    case Op::Tuple1:
      push(values_.items(Kind::Tuple, pop_some(1)));
      break;
    case Op::Tuple2:
      push(values_.items(Kind::Tuple, pop_some(2)));
      break;
    case Op::Tuple3:
      push(values_.items(Kind::Tuple, pop_some(3)));
      break;
    case Op::List:
      push(values_.items(Kind::List, pop_mark()));
      break;
    case Op::Put1:
      memo_[number<uint8_t>()] = top();
      break;
    case Op::Put4:
      memo_[number<uint32_t>()] = top();
      break;
    case Op::Memoize:
      memo_[static_cast<uint32_t>(memo_.size())] = top();
      break;
    case Op::Get1:
      get(number<uint8_t>());
      break;
    case Op::Get4:
      get(number<uint32_t>());
      break;
    default:
      unfit("operation ", static_cast<int>(op), ", which torch.save does not write");
  }
  return true;
}

void Machine::find_name(std::string module, std::string name) {
  if (const auto dtype = known_dtype(module, name)) return push(Value::of(*dtype));
  Name known = known_name(std::move(module), std::move(name));
  if (known.meaning == Meaning::Unknown && !keeps_objects()) outside_.refuse(known);
  push(values_.name(std::move(known)));
}

void Machine::push_integer(uint32_t bytes) {
  constexpr uint32_t kWord = 8;
  const char* from = take(bytes);
  if (bytes > kWord) return push(values_.text(std::string(from, bytes), Kind::Large));
  int64_t value = bytes > 0 && from[bytes - 1] < 0 ? -1 : 0;  // the sign fills the upper bytes
  std::memcpy(&value, from, bytes);
  push(Value::of(value));
}

void Machine::get(uint32_t place) {
  const auto found = memo_.find(place);
  if (found == memo_.end()) unfit("a value that is not there yet");
  push(found->second);
}

// Checks a key of a dict or set: only plain values, as every later reader must be able to compare keys.
const Value& Machine::key(const Value& value) const {
  std::vector<Value> pending{value};
  int count = 0;
  while (!pending.empty()) {
    const Value part = pending.back();
    pending.pop_back();
    if (++count > kLargestKey) unfit("a key of more than ", kLargestKey, " parts");
    const bool object = part.is(Kind::Object) || part.is(Kind::Name) || part.is(Kind::FrozenSet);
    if (part.is(Kind::Tuple)) {
      if (part.items->size() > kLargestKey) unfit("a key of more than ", kLargestKey, " parts");
      pending.insert(pending.end(), part.items->begin(), part.items->end());
    } else if (part.kind > Kind::Large && !(object && keeps_objects())) {
      unfit(shown(part), " as a key");
    }
  }
  return value;
}

Items Machine::keys(const Value& items) const {
  const Items& all = items.is(Kind::Set) || items.is(Kind::FrozenSet) ? *items.items : items_of(items);
  values_.count(static_cast<int64_t>(all.size()));
  for (const Value& item : all)
    key(item);
  return all;
}

void Machine::set_items(Items pairs) {
  const Value& target = top();
  if (pairs.size() % 2 != 0) unfit("a key without its value");
  for (size_t i = 0; i < pairs.size(); i += 2)
    key(pairs[i]);
  if (target.is(Kind::Object) && keeps_objects()) {
    target.object->steps.push_back({Step::What::Pairs, std::move(pairs)});
    return;
  }
  if (!target.is_dict()) unfit("items of what is no dict");
  target.items->insert(target.items->end(), pairs.begin(), pairs.end());
}

void Machine::append(Items items) {
  const Value& target = top();
  if (target.is(Kind::Object) && keeps_objects()) {
    target.object->steps.push_back({Step::What::Items, std::move(items)});
    return;
  }
  if (!target.is(Kind::List)) unfit("items of what is no list");
  target.items->insert(target.items->end(), items.begin(), items.end());
}

void Machine::add(Items items) {
  const Value& target = top();
  for (const Value& item : items)
    key(item);
  if (target.is(Kind::Object) && keeps_objects()) {
    target.object->steps.push_back({Step::What::Members, std::move(items)});
    return;
  }
  if (!target.is(Kind::Set)) unfit("items of what is no set");
  target.items->insert(target.items->end(), items.begin(), items.end());
}

void Machine::build() {
  const Value state = pop();
  const Value& target = top();
  if (target.is(Kind::Ordered)) return;  // the state is _metadata of a module's state dict
  if (!target.is(Kind::Object)) unfit("a state of ", shown(target));
  target.object->steps.push_back({Step::What::State, {state}});
}

Value Machine::call(const Value& function, const Value& args, bool is_new) {
  if (!args.is(Kind::Tuple)) unfit("a call without arguments");
  if (function.is(Kind::Object) && keeps_objects()) return values_.object({function, args, is_new, {}});
  if (!function.is(Kind::Name)) unfit("a call of what is no function");
  const Name& name = *function.name;
  switch (name.meaning) {
    case Meaning::Unknown:
    case Meaning::Class:
    case Meaning::Array:
      return values_.object({function, args, is_new, {}});
    case Meaning::Scalar:
      return make_scalar(function, args, is_new);
    case Meaning::Number:
    case Meaning::Storage:
      unfit("a call of a type");
    default:
      return call_known(name, args, is_new);
  }
}

Value Machine::call_known(const Name& function, const Value& args, bool is_new) {
  const Items& items = *args.items;
  const auto first = [&] { return items.empty() ? values_.items(Kind::Tuple) : items[0]; };
  switch (function.meaning) {
    case Meaning::Ordered: {
      const Value made = values_.items(Kind::Ordered);
      for (const Value& pair : items_of(first())) {
        if (items_of(pair).size() != 2) unfit("a key without its value");
        values_.count(2);
        made.items->insert(made.items->end(), {key(pair.items->front()), pair.items->back()});
      }
      return made;
    }
    case Meaning::DefaultDict:
    case Meaning::Dict:
      return values_.items(Kind::Dict);
    case Meaning::List:
    case Meaning::Size: {
      const Items copied = items_of(first());
      values_.count(static_cast<int64_t>(copied.size()));
      return values_.items(function.meaning == Meaning::List ? Kind::List : Kind::Tuple, copied);
    }
    case Meaning::Set:
      return values_.items(Kind::Set, keys(first()));
    case Meaning::FrozenSet:
      return values_.items(Kind::FrozenSet, keys(first()));
    case Meaning::Same:
      return at(args, size_t{0});
    case Meaning::Bytes:
      if (!items.empty()) unfit("bytes of something");
      return values_.text("", Kind::Bytes);
    case Meaning::Encode:
      return make_bytes(items);
    case Meaning::Tensor:
      return make_tensor(items);
    case Meaning::Parameter:
      tensor_of(at(args, size_t{0}));
      return items[0];
    case Meaning::FromType: {  // a tensor with attributes of its own, which are left out
      const Value& made_by = at(args, size_t{0});
      const bool known = made_by.is(Kind::Name) && items.size() == 4 &&
                         (made_by.name->meaning == Meaning::Tensor || made_by.name->meaning == Meaning::Parameter);
      if (!known) unfit("a tensor that is not made as tensors are");
      return call(made_by, items[2], is_new);
    }
    default:
      unfit("a call of ", printable(function.text()));
  }
}

Value Machine::make_tensor(const Items& args) {
  if (args.size() < 4 || !args[0].is(Kind::Storage)) unfit("a tensor of something that is no storage");
  TensorRef tensor{args[0].storage, 0, {}, {}};
  const auto number = [](const Value& value) {
    if (!value.is(Kind::Int) || value.number < 0 || value.number >= kMostSize)
      unfit("a tensor of something that is no storage, or of sizes that cannot be");
    return value.number;
  };
  tensor.offset = number(args[1]);
  for (const Value& size : items_of(args[2]))
    tensor.shape.push_back(number(size));
  for (const Value& stride : items_of(args[3]))
    tensor.strides.push_back(number(stride));
  if (tensor.shape.size() != tensor.strides.size() || tensor.shape.size() > kMostDims)
    unfit("a tensor with other numbers of sizes and strides");
  __int128 last = tensor.offset;
  bool empty = false;
  for (size_t dim = 0; dim < tensor.shape.size(); ++dim) {
    last += static_cast<__int128>(tensor.shape[dim] - 1) * tensor.strides[dim];
    empty = empty || tensor.shape[dim] == 0;
  }
  const int64_t held = tensor.storage->numel;
  if (!empty && last >= held) unfit("a tensor is beyond its storage of ", held, " elements");
  if (empty && tensor.offset > held) unfit("a tensor is beyond its storage");
  return values_.tensor(std::move(tensor));
}

template <class T, class Plain>
Value number_from(const std::string& data) {
  T value;
  if (data.size() != sizeof value) unfit("a number of NumPy's of ", data.size(), " bytes");
  std::memcpy(&value, data.data(), sizeof value);
  return Value::of(static_cast<Plain>(value));
}

// A number of NumPy's becomes a number of Python's.
Value Machine::make_scalar(const Value& function, const Value& args, bool is_new) {
  const auto dtype = args.items->size() == 2 ? numpy_dtype(args.items->front()) : std::nullopt;
  if (!dtype || !args.items->back().is(Kind::Bytes)) {
    if (!keeps_objects()) unfit("numbers of NumPy's of a dtype that is not known");
    return values_.object({function, args, is_new, {}});
  }
  const std::string& data = *args.items->back().text;
  switch (*dtype) {
    case at::kDouble:
      return number_from<double, double>(data);
    case at::kFloat:
      return number_from<float, double>(data);
    case at::kHalf:
      return number_from<at::Half, double>(data);
    case at::kBool:
      return Value::of(number_from<uint8_t, int64_t>(data).number != 0);
    case at::kChar:
      return number_from<int8_t, int64_t>(data);
    case at::kShort:
      return number_from<int16_t, int64_t>(data);
    case at::kInt:
      return number_from<int32_t, int64_t>(data);
    case at::kLong:
      return number_from<int64_t, int64_t>(data);
    case at::kByte:
      return number_from<uint8_t, int64_t>(data);
    case at::kUInt16:
      return number_from<uint16_t, int64_t>(data);
    case at::kUInt32:
      return number_from<uint32_t, int64_t>(data);
    default:
      break;
  }
  const Value value = number_from<int64_t, int64_t>(data);  // unsigned: a byte more holds the sign
  return value.number >= 0 ? value : values_.text(data + '\0', Kind::Large);
}

Value Machine::make_bytes(const Items& args) {
  if (args.size() != 2 || !(args[1].is_text("latin1") || args[1].is_text("latin-1"))) unfit("bytes in another coding");
  const std::string& text = text_of(args[0]);
  values_.count(static_cast<int64_t>(text.size()) / kBytesOfValue);
  std::string bytes;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto first = static_cast<uint8_t>(text[i]);
    if (first < 0x80) {
      bytes += text[i];
      continue;
    }
    // A character up to 255, as UTF-8 has it: two bytes.
    const bool good = (first == 0xc2 || first == 0xc3) && i + 1 < text.size() && (text[i + 1] & 0xc0) == 0x80;
    if (!good) unfit("bytes in another coding");
    bytes += static_cast<char>((first & 3) << 6 | (text[++i] & 0x3f));
  }
  return values_.text(std::move(bytes), Kind::Bytes);
}

}  // namespace

Value read_pickle(const std::string& bytes, Objects objects, const Outside& outside, Values& values) {
  return Machine(bytes, objects, outside, values).run();
}

}  // namespace tessera::checkpoint::deepspeed
