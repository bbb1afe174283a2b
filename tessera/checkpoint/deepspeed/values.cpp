#include "tessera/checkpoint/deepspeed/values.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>

namespace tessera::checkpoint::deepspeed {

namespace {

constexpr int64_t kMostElements = int64_t{1} << 56;

bool is_of_dicts(const Value& state) {
  const auto fits = [](const Value& part) { return part.is(Kind::None) || part.is_dict(); };
  return state.is(Kind::Tuple) ? std::ranges::all_of(*state.items, fits) : fits(state);
}

template <class F>
void each_dict(const Value& state, const F& f) {
  if (state.is_dict()) f(*state.items);
  if (state.is(Kind::Tuple))
    for (const Value& part : *state.items)
      if (part.is_dict()) f(*part.items);
}

const char* kind_name(const Value& value) {
  switch (value.kind) {
    case Kind::None:
      return "None";
    case Kind::Bool:
      return "bool";
    case Kind::Int:
    case Kind::Large:
      return "int";
    case Kind::Float:
      return "float";
    case Kind::Dtype:
      return "dtype";
    case Kind::Text:
      return "str";
    case Kind::Bytes:
      return "bytes";
    case Kind::Tuple:
      return "tuple";
    case Kind::List:
      return "list";
    case Kind::Set:
    case Kind::FrozenSet:
      return "set";
    case Kind::Dict:
    case Kind::Ordered:
      return "dict";
    case Kind::Name:
      return "name";
    case Kind::Storage:
      return "storage";
    case Kind::Tensor:
    case Kind::Streamed:
      return "tensor";
    case Kind::Object:
      return "object";
  }
  return "value";
}

template <class T>
Value kept(Kind kind, T* Value::* where, std::deque<T>& all, T item) {
  Value value;
  value.kind = kind;
  value.*where = &all.emplace_back(std::move(item));
  return value;
}

}  // namespace

int64_t TensorRef::numel() const {
  int64_t numel = 1;
  for (const int64_t size : shape)
    if (__builtin_mul_overflow(numel, size, &numel)) numel = INT64_MAX;
  return std::ranges::find(shape, 0) == shape.end() ? numel : 0;
}

bool TensorRef::is_contiguous() const {
  std::vector<int64_t> order;
  return numel() == 0 || (dense_order(*this, order) && std::ranges::is_sorted(order));
}

bool dense_order(const TensorRef& tensor, std::vector<int64_t>& order) {
  const auto larger = [&](int64_t dim) { return tensor.shape[dim] > 1; };
  order.resize(tensor.shape.size());
  std::iota(order.begin(), order.end(), 0);
  const std::vector<int64_t> usual = order;
  const auto rank = [&](int64_t dim) { return larger(dim) ? -tensor.strides[dim] : 0; };
  std::ranges::stable_sort(order, [&](int64_t a, int64_t b) { return rank(a) < rank(b); });
  // Dims of size 1 may stand anywhere: if the others are in order, the usual order is kept.
  std::vector<int64_t> kept;
  std::ranges::copy_if(order, std::back_inserter(kept), larger);
  if (std::ranges::is_sorted(kept)) order = usual;
  int64_t expected = 1;
  for (auto dim = order.rbegin(); dim != order.rend(); ++dim) {
    if (tensor.shape[*dim] != 1 && tensor.strides[*dim] != expected) return false;
    if (__builtin_mul_overflow(expected, tensor.shape[*dim], &expected)) return false;
  }
  return true;
}

int64_t numel_of(const Shape& shape) {
  TensorRef all;
  all.shape = shape;
  const int64_t numel = all.numel();
  if (numel > kMostElements) unfit("a shape of more than 2^56 elements");
  return numel;
}

Value Value::of(bool flag) {
  Value value;
  value.kind = Kind::Bool;
  value.number = flag ? 1 : 0;
  return value;
}
Value Value::of(int64_t number) {
  Value value;
  value.kind = Kind::Int;
  value.number = number;
  return value;
}
Value Value::of(double number) {
  Value value;
  value.kind = Kind::Float;
  value.real = number;
  return value;
}
Value Value::of(at::ScalarType dtype) {
  Value value;
  value.kind = Kind::Dtype;
  value.dtype = dtype;
  return value;
}

const Value* Object::attribute(std::string_view key) const {
  const Value* found = nullptr;
  for (const Step& step : steps)
    if (step.what == Step::What::State && is_of_dicts(step.values[0]))
      each_dict(step.values[0], [&](const Items& items) {
        for (size_t i = 0; i < items.size(); i += 2)
          if (items[i].is_text(key)) found = &items[i + 1];
      });
  return found;
}

Items Object::attributes() const {
  Items all;
  for (const Step& step : steps)
    if (step.what == Step::What::State && is_of_dicts(step.values[0]))
      each_dict(step.values[0], [&](const Items& items) {
        for (size_t i = 0; i < items.size(); i += 2)
          if (items[i].is(Kind::Text)) all.insert(all.end(), {items[i], items[i + 1]});
      });
  return all;
}

const Value* Object::raw() const {
  const Value* found = nullptr;
  for (const Step& step : steps)
    if (step.what == Step::What::State && !is_of_dicts(step.values[0])) found = step.values.data();
  return found;
}

void Values::count(int64_t more) {
  count_ += more;
  if (count_ > kMost) unfit("more than ", kMost, " values");
}

Value Values::text(std::string text, Kind kind) {
  count();
  return kept(kind, &Value::text, texts_, std::move(text));
}

Value Values::items(Kind kind, Items items) {
  count();
  return kept(kind, &Value::items, items_, std::move(items));
}

Value Values::name(Name name) {
  count();
  return kept(Kind::Name, &Value::name, names_, std::move(name));
}

Value Values::object(Object object) {
  count();
  return kept(Kind::Object, &Value::object, objects_, std::move(object));
}

Value Values::storage(Storage storage) {
  count();
  return kept(Kind::Storage, &Value::storage, storages_, std::move(storage));
}

Value Values::tensor(TensorRef tensor) {
  count();
  return kept(Kind::Tensor, &Value::tensor, tensors_, std::move(tensor));
}

Value Values::streamed(Streamed tensor) {
  count();
  return kept(Kind::Streamed, &Value::streamed, streamed_, std::move(tensor));
}

Value Values::list(const Shape& numbers) {
  const Value list = items(Kind::List);
  for (const int64_t number : numbers)
    list.items->push_back(Value::of(number));
  return list;
}

Value Values::list(const std::vector<std::string>& texts) {
  const Value list = items(Kind::List);
  for (const std::string& one : texts)
    list.items->push_back(text(one));
  return list;
}

void Values::put(const Value& dict, const std::string& key, const Value& value) {
  dict.items->push_back(text(key));
  dict.items->push_back(value);
}

const Value* find(const Value& dict, std::string_view key) {
  const Items& items = pairs_of(dict);
  for (size_t i = items.size(); i > 0; i -= 2)
    if (items[i - 2].is_text(key)) return &items[i - 1];
  return nullptr;
}

const Value* find(const Value& dict, int64_t key) {
  const Items& items = pairs_of(dict);
  for (size_t i = items.size(); i > 0; i -= 2)
    if (items[i - 2].is(Kind::Int) && items[i - 2].number == key) return &items[i - 1];
  return nullptr;
}

bool has(const Value& dict, std::string_view key) {
  return find(dict, key) != nullptr;
}

const Value& at(const Value& dict, std::string_view key) {
  const Value* found = find(dict, key);
  if (found == nullptr) unfit("there is no '", key, "'");
  return *found;
}

const Value& at(const Value& list, size_t index) {
  const Items& items = items_of(list);
  if (index >= items.size()) unfit("a list has ", items.size(), " items where more are needed");
  return items[index];
}

const Items& items_of(const Value& list) {
  if (!list.is_list()) unfit("a ", kind_name(list), " in the place of a list");
  return *list.items;
}

const Items& pairs_of(const Value& dict) {
  if (!dict.is_dict()) unfit("a ", kind_name(dict), " in the place of a dict");
  return *dict.items;
}

const std::string& text_of(const Value& value) {
  if (!value.is(Kind::Text)) unfit("a ", kind_name(value), " in the place of a str");
  return *value.text;
}

const TensorRef& tensor_of(const Value& value) {
  if (!value.is(Kind::Tensor)) unfit("a ", kind_name(value), " in the place of a tensor");
  return *value.tensor;
}

Shape shape_of(const Value& value) {
  constexpr int64_t kMostSize = int64_t{1} << 48;
  Shape shape;
  for (const Value& size : items_of(value)) {
    if (!size.is(Kind::Int) || size.number < 0 || size.number >= kMostSize)
      unfit(shown(size), " is no size of a shape");
    shape.push_back(size.number);
  }
  return shape;
}

int64_t number_of(const Value& given, int64_t most) {
  Value value = given;
  if (value.is(Kind::Object)) value = at(value.object->args, size_t{0});
  int64_t number = -1;
  if (value.is(Kind::Int) || value.is(Kind::Bool)) {
    number = value.number;
  } else if (value.is(Kind::Float)) {
    constexpr double kLargest = 9e18;
    if (std::isfinite(value.real) && std::abs(value.real) < kLargest) number = static_cast<int64_t>(value.real);
  } else if (value.is(Kind::Text)) {
    const char* end = value.text->data() + value.text->size();
    const auto [last, error] = std::from_chars(value.text->data(), end, number);
    if (error != std::errc() || last != end) number = -1;
  } else if (!value.is(Kind::Large)) {
    unfit("a ", kind_name(value), " in the place of a number");
  }
  if (number < 0 || number > most) unfit(shown(value), " is no number that can be");
  return number;
}

double real_of(const Value& value) {
  if (value.is(Kind::Float)) return value.real;
  if (!value.is(Kind::Int) && !value.is(Kind::Bool)) unfit("a ", kind_name(value), " in the place of a number");
  return static_cast<double>(value.number);
}

std::string printable(std::string text) {
  for (char& c : text)
    if (c < ' ' || c > '~') c = '?';
  return text;
}

std::string shown(const Value& value) {
  constexpr size_t kLongest = 40;
  switch (value.kind) {
    case Kind::None:
      return "None";
    case Kind::Bool:
      return value.number != 0 ? "True" : "False";
    case Kind::Int:
      return std::to_string(value.number);
    case Kind::Float:
      return c10::str(value.real);
    case Kind::Text:
      return "'" + printable(value.text->substr(0, kLongest)) + "'";
    case Kind::Name:
      return "'" + printable(value.name->text()) + "'";
    default:
      return std::string("a ") + kind_name(value);
  }
}

}  // namespace tessera::checkpoint::deepspeed
