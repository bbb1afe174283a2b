#include "tessera/checkpoint/deepspeed/pickle_writer.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "tessera/checkpoint/deepspeed/names.h"
#include "tessera/checkpoint/deepspeed/pt_file.h"

namespace tessera::checkpoint::deepspeed {

namespace {

constexpr int kDeepest = 400;
constexpr const char *kArray = "numpy.ndarray", *kStream = "io.BytesIO", *kClass = "__class__";

bool is_unsigned(at::ScalarType dtype) {
  return dtype == at::kUInt16 || dtype == at::kUInt32 || dtype == at::kUInt64;
}

// The tensor of a pickled NumPy array (version, shape, dtype, Fortran's order or not, bytes); undefined for an unknown dtype.
at::Tensor array_of(const Object& object) {
  const Value* state = object.raw();
  if (state == nullptr || !state->is(Kind::Tuple) || state->items->size() != 5) return {};
  const Items& parts = *state->items;
  const auto dtype = numpy_dtype(parts[2]);
  if (!dtype || !parts[4].is(Kind::Bytes)) return {};
  Shape shape = shape_of(parts[1]);
  const std::string& data = *parts[4].text;
  if (numel_of(shape) * static_cast<int64_t>(c10::elementSize(*dtype)) != static_cast<int64_t>(data.size()))
    unfit("an array of NumPy's of ", data.size(), " bytes in shape ", at::IntArrayRef(shape));
  at::Tensor bytes = at::empty({static_cast<int64_t>(data.size())}, at::TensorOptions(at::kByte));
  if (!data.empty()) std::memcpy(bytes.mutable_data_ptr(), data.data(), data.size());
  const at::Tensor flat = bytes.view(*dtype);
  const bool fortran = parts[3].is(Kind::Bool) && parts[3].number != 0;
  if (!fortran) return flat.view(shape);
  std::ranges::reverse(shape);
  std::vector<int64_t> dims;
  for (size_t dim = shape.size(); dim > 0; --dim)
    dims.push_back(static_cast<int64_t>(dim) - 1);
  return flat.view(shape).permute(dims).contiguous();
}

Streamed streamed_of(const at::Tensor& tensor) {
  return {tensor.scalar_type(), tensor.sizes().vec(), [tensor](const Streamed::Sink& sink) {
            if (tensor.numel() > 0) sink(tensor.reshape({-1}));
          }};
}

class Writer {
 public:
  explicit Writer(Style style) : style_(style) {}
  Written run(const Value& value) {
    op("\x80\x02");
    write(value);
    op(".");
    return std::move(written_);
  }

 private:
  void op(std::string_view bytes) { written_.pickle += bytes; }
  template <class T>
  void number(T value) {
    char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    written_.pickle.append(bytes, sizeof value);
  }
  void global(const std::string& module, const std::string& name) { op("c" + module + "\n" + name + "\n"); }
  void text(std::string_view text) {
    if (text.size() > UINT32_MAX) unfit("a text of more than 4 GiB");
    op("X");
    number(static_cast<uint32_t>(text.size()));
    op(text);
  }
  void integer(int64_t value);
  void keep(const void* node);
  bool is_kept(const void* node);

  void write(const Value& value);
  void write_node(const Value& value);
  void write_bytes(const Value& value);
  void write_tuple(const Value& value);
  void write_list(const Value& value);
  void write_set(const Value& value);
  void write_dict(const Value& value);
  void write_object(const Value& value);
  void write_known(const Value& value, const Name& name);
  void write_as_it_came(const Value& value);
  void write_tensor(const void* node, Streamed tensor);
  void write_pairs(const Items& items);
  bool write_marked(const Value& dict);
  void write_array(const Value& value, const TensorRef& tensor);
  void write_stream(const void* node, const Value& bytes, const Value& place);

  const Style style_;
  Written written_;
  std::unordered_map<const void*, uint32_t> memo_;
  Values made_;  // values that the writer makes itself, kept because memo_ has their addresses
  int depth_ = 0;
};

void Writer::keep(const void* node) {
  const auto place = static_cast<uint32_t>(memo_.size());
  memo_.emplace(node, place);
  op("r");
  number(place);
}

// Whether the node was written before; if so, writes a reference to it.
bool Writer::is_kept(const void* node) {
  const auto found = memo_.find(node);
  if (found == memo_.end()) return false;
  op("j");
  number(found->second);
  return true;
}

void Writer::integer(int64_t value) {
  if (value >= 0 && value <= UINT8_MAX) {
    op("K");
    number(static_cast<uint8_t>(value));
  } else if (std::in_range<int32_t>(value)) {
    op("J");
    number(static_cast<int32_t>(value));
  } else {
    op("\x8a\x08");
    number(value);
  }
}

void Writer::write(const Value& value) {
  switch (value.kind) {
    case Kind::None:
      return op("N");
    case Kind::Bool:
      return op(value.number != 0 ? "\x88" : "\x89");
    case Kind::Int:
      return integer(value.number);
    case Kind::Float:
      op("G");
      return number(__builtin_bswap64(std::bit_cast<uint64_t>(value.real)));
    case Kind::Dtype:
      return global("torch", dtype_name(value.dtype));
    default:
      break;
  }
  if (is_kept(value.node)) return;
  if (++depth_ > kDeepest) unfit("values nested too deep");
  write_node(value);
  --depth_;
}

void Writer::write_node(const Value& value) {
  switch (value.kind) {
    case Kind::Text:
      text(*value.text);
      return keep(value.node);
    case Kind::Large:
      if (value.text->size() > UINT8_MAX) unfit("an integer of ", value.text->size(), " bytes");
      op("\x8a");
      number(static_cast<uint8_t>(value.text->size()));
      op(*value.text);
      return keep(value.node);
    case Kind::Bytes:
      return write_bytes(value);
    case Kind::Tuple:
      return write_tuple(value);
    case Kind::List:
      return write_list(value);
    case Kind::Set:
    case Kind::FrozenSet:
      return write_set(value);
    case Kind::Dict:
    case Kind::Ordered:
      return write_dict(value);
    case Kind::Object:
      return write_object(value);
    case Kind::Streamed:
      return write_tensor(value.node, *value.streamed);
    case Kind::Tensor: {
      const TensorRef& tensor = *value.tensor;
      if (tensor.numel() > tensor.storage->numel) tensor.storage->file->read(tensor);  // says why it is refused
      return write_tensor(value.node, {tensor.dtype(), tensor.shape, [&tensor](const Streamed::Sink& sink) {
                                         const at::Tensor read = tensor.storage->file->read(tensor);
                                         if (read.numel() > 0) sink(read.view({-1}));
                                       }});
    }
    case Kind::Name:
      if (style_.objects == Objects::Refused) unfit("the name of a function or a class in the place of a value");
      if (style_.objects == Objects::Kept) return global(value.name->module, value.name->name);
      op("}(");
      text(kClass);
      text(value.name->text());
      return op("u");
    default:
      unfit(shown(value), " in the place of a value");
  }
}

// Bytes as torch.load(weights_only=True) takes them: a text of characters up to 255 and the call that encodes it as latin1.
void Writer::write_bytes(const Value& value) {
  if (value.text->empty()) {
    global("__builtin__", "bytes");
    op(")R");
    return keep(value.node);
  }
  std::string coded;
  for (const char c : *value.text) {
    const auto byte = static_cast<uint8_t>(c);
    if (byte >= 0x80) coded += static_cast<char>(0xc0 | byte >> 6);
    coded += byte >= 0x80 ? static_cast<char>(0x80 | (byte & 0x3f)) : c;
  }
  global("_codecs", "encode");
  text(coded);
  text("latin1");
  op("\x86R");
  keep(value.node);
}

void Writer::write_tuple(const Value& value) {
  if (value.items->empty()) return op(")");
  op("(");
  for (const Value& item : *value.items)
    write(item);
  op("t");
  keep(value.node);
}

void Writer::write_list(const Value& value) {
  op("]");
  keep(value.node);
  if (value.items->empty()) return;
  op("(");
  for (const Value& item : *value.items)
    write(item);
  op("e");
}

void Writer::write_set(const Value& value) {
  global("__builtin__", value.is(Kind::Set) ? "set" : "frozenset");
  op("](");
  for (const Value& item : *value.items)
    write(item);
  op("e\x85R");
  keep(value.node);
}

void Writer::write_pairs(const Items& items) {
  if (items.empty()) return;
  op("(");
  for (size_t i = 0; i < items.size(); i += 2) {
    const Value& key = items[i];
    if (style_.objects != Objects::Kept && (key.is(Kind::Object) || key.is(Kind::Name))) continue;
    write(key);
    write(items[i + 1]);
  }
  op("u");
}

void Writer::write_dict(const Value& value) {
  if (style_.of_deepspeed && write_marked(value)) return;
  if (value.is(Kind::Ordered)) {
    global("collections", "OrderedDict");
    op(")R");
  } else {
    op("}");
  }
  keep(value.node);
  write_pairs(*value.items);
}

void Writer::write_object(const Value& value) {
  const Object& object = *value.object;
  const Name* name = object.name();
  if (name != nullptr && name->meaning != Meaning::Unknown && name->meaning != Meaning::Scalar)
    return write_known(value, *name);
  if (style_.objects == Objects::Refused)
    unfit("an object of '", name == nullptr ? "an object's class" : printable(name->text()), "'");
  if (style_.objects == Objects::Kept) return write_as_it_came(value);
  op("}");
  keep(value.node);
  op("(");
  text(kClass);
  text(name == nullptr ? "" : name->text());
  op("u");
}

void Writer::write_known(const Value& value, const Name& name) {
  const Object& object = *value.object;
  if (name.meaning == Meaning::Array) {
    const at::Tensor array = array_of(object);
    if (!array.defined() && style_.objects == Objects::Kept) return write_as_it_came(value);
    if (!array.defined() && style_.objects == Objects::Refused)
      unfit("numbers of NumPy's of a dtype that is not known");
    op("}");
    keep(value.node);
    op("(");
    text(array.defined() ? kArray : kClass);
    if (array.defined())
      write_tensor(nullptr, streamed_of(array));
    else
      text(kArray);
    return op("u");
  }
  if (name.text() == "_io.BytesIO" && object.raw() != nullptr) {
    op("}");
    keep(value.node);
    op("(");
    text(kStream);
    op("(");
    write(at(*object.raw(), size_t{0}));
    write(at(*object.raw(), size_t{1}));
    return op("tu");
  }
  if (style_.of_deepspeed || name.text() == "torch.device" ||
      (name.module == "numpy" && style_.objects == Objects::Kept))
    return write_as_it_came(value);
  op("}");
  keep(value.node);
  op("(");
  text(kClass);
  text(name.text());
  op("u");
  write_pairs(object.attributes());
}

void Writer::write_as_it_came(const Value& value) {
  const Object& object = *value.object;
  const auto callable = [&](const Value& called) {
    if (called.is(Kind::Name))
      global(called.name->module, called.name->name);
    else
      write(called);
  };
  callable(object.callable);
  write(object.args);
  op(object.is_new ? "\x81" : "R");
  keep(value.node);
  for (const Step& step : object.steps) {
    if (step.what == Step::What::State) {
      write(step.values[0]);
      op("b");
    } else if (step.what == Step::What::Pairs) {
      write_pairs(step.values);
    } else {
      if (step.what == Step::What::Members) unfit("members of an object");
      op("(");
      for (const Value& item : step.values)
        write(item);
      op("e");
    }
  }
}

// Writes a tensor of any dtype. Torch has no class of storages for unsigned dtypes but uint8: their storage is one of bytes.
void Writer::write_tensor(const void* node, Streamed tensor) {
  const bool untyped = is_unsigned(tensor.dtype);
  const char* kind = untyped ? "UntypedStorage" : storage_name(tensor.dtype);
  TESSERA_CHECK_VALUE(kind != nullptr && !(untyped && style_.of_deepspeed), "checkpoint", "there is a tensor of dtype ",
                      "torch.", c10::getDtypeNames(tensor.dtype).first,
                      ", which DeepSpeed's files are not written with here; save with \"checkpoint\": {\"format\": "
                      "\"tessera\"}");
  global("torch._utils", untyped ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2");
  op("((");
  text("storage");
  global(untyped ? "torch.storage" : "torch", kind);
  text(std::to_string(written_.storages.size()));
  text("cpu");
  const int64_t numel = numel_of(tensor.shape);
  integer(untyped ? numel * static_cast<int64_t>(c10::elementSize(tensor.dtype)) : numel);
  op("tQK");
  number(uint8_t{0});
  op("(");
  for (const int64_t size : tensor.shape)
    integer(size);
  op("t(");
  for (size_t dim = 0; dim < tensor.shape.size(); ++dim) {
    int64_t stride = 1;
    for (size_t inner = dim + 1; inner < tensor.shape.size(); ++inner)
      stride *= std::max<int64_t>(tensor.shape[inner], 1);
    integer(stride);
  }
  op("t\x89");
  global("collections", "OrderedDict");
  op(")R");
  if (untyped) global("torch", dtype_name(tensor.dtype));
  op("tR");
  if (node != nullptr) keep(node);
  written_.storages.push_back(std::move(tensor));
}

// Writes the array or the stream that a dict with a blob's mark stands for; false for any other dict.
bool Writer::write_marked(const Value& dict) {
  if (dict.items->size() != 2) return false;
  const Value &key = dict.items->front(), &held = dict.items->back();
  if (key.is_text(kArray) && held.is(Kind::Tensor) && numpy_code(held.tensor->dtype()) != nullptr) {
    write_array(dict, *held.tensor);
    return true;
  }
  if (key.is_text(kStream) && held.is(Kind::Tuple) && held.items->size() == 2 && held.items->front().is(Kind::Bytes)) {
    write_stream(dict.node, held.items->front(), held.items->back());
    return true;
  }
  return false;
}

// Writes an array under the names that every version of NumPy can load.
void Writer::write_array(const Value& value, const TensorRef& tensor) {
  const at::Tensor array = tensor.storage->file->read(tensor);
  std::string data(array.nbytes(), '\0');
  if (!data.empty()) std::memcpy(data.data(), array.const_data_ptr(), data.size());
  global("numpy.core.multiarray", "_reconstruct");
  op("(");
  global("numpy", "ndarray");
  op("K");
  number(uint8_t{0});
  op("\x85");
  write_bytes(made_.text("b", Kind::Bytes));
  op("tR");
  keep(value.node);
  op("(K");
  number(uint8_t{1});
  op("(");
  for (const int64_t size : tensor.shape)
    integer(size);
  op("t");
  const std::string code = numpy_code(tensor.dtype());
  const bool one_byte = array.element_size() == 1;
  global("numpy", "dtype");
  op("(");
  text(code);
  op("\x89\x88tR(K");
  number(uint8_t{3});
  text(one_byte ? "|" : "<");
  op("NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK");
  number(uint8_t{0});
  op("tb\x89");
  write_bytes(made_.text(std::move(data), Kind::Bytes));
  op("tb");
}

void Writer::write_stream(const void* node, const Value& bytes, const Value& place) {
  global("_io", "BytesIO");
  op(")\x81");
  keep(node);
  op("(");
  write(bytes);
  write(place);
  op("Ntb");
}

}  // namespace

Written write_pickle(const Value& value, Style style) {
  return Writer(style).run(value);
}

}  // namespace tessera::checkpoint::deepspeed
