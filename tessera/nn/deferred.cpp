#include "tessera/nn/deferred.h"

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::nn {
namespace deferred {

// A tensor on the meta device, when an operator took or gave it.
struct MetaTensor {
  c10::Storage storage;  // kept, so that no other gets its address
  std::vector<int64_t> sizes, strides;
  int64_t offset;
  at::ScalarType dtype;

  explicit MetaTensor(const at::Tensor& t)
      : storage(t.storage()),
        sizes(t.sizes().vec()),
        strides(t.strides().vec()),
        offset(t.storage_offset()),
        dtype(t.scalar_type()) {}
  const void* key() const { return storage.unsafeGetStorageImpl(); }
};

// An argument: a value, or tensors, each of them on the meta device, or one that had values already.
using Item = std::variant<at::Tensor, MetaTensor>;
struct OpArgument {
  enum class Kind : uint8_t { Value, Tensor, Tensors, OptionalTensors } kind = Kind::Value;
  c10::IValue value;
  std::vector<Item> items;
};

struct Operation {
  c10::OperatorHandle op;
  std::vector<OpArgument> arguments;
  std::vector<MetaTensor> results;  // tensors, in their order
};

// Of a storage: the numbers of the operations that use it, and the tensors over it that the program holds in the end.
struct Use {
  std::vector<size_t> numbers;
  std::vector<at::Tensor> holders;
};

}  // namespace deferred

namespace {

using deferred::Item;
using deferred::MetaTensor;
using deferred::OpArgument;
using deferred::Operation;
using deferred::Use;
using torch::jit::Stack;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;
// What is kept elsewhere meanwhile: tensors that no operator uses before so many others, where those that are whole are larger together.
constexpr size_t kSoon = 32;
constexpr int64_t kOpenBytes = 8 << 20;

template <class F>
void each_tensor(const c10::IValue& value, const F& call) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) call(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorVector())
      call(t);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
      if (t && t->defined()) call(*t);
  }
}

// The value with f(tensor) for each of its tensors.
template <class F>
c10::IValue mapped(const c10::IValue& value, const F& f) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector())
      list.push_back(f(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
      list.push_back(t && t->defined() ? std::optional(f(*t)) : t);
    return list;
  }
  return value;
}

// Of the same form, without memory.
at::Tensor without_memory(const at::Tensor& t) {
  if (t.is_meta()) return t;
  at::Tensor meta = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta).pinned_memory(false));
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

at::Tensor kept_value(const at::Tensor& t) {
  const at::NoGradGuard no_grad;
  at::Tensor copy = t.detach().clone();  // the program may write, or free what it lies in, before run()
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

// What these do is to the tensor object, and the object has it already.
bool is_of_objects(std::string_view name) {
  constexpr std::array<std::string_view, 4> kNames{"aten::set_data", "aten::set_", "aten::requires_grad_",
                                                   "aten::retain_grad"};
  return std::ranges::find(kNames, name) != kNames.end();
}

}  // namespace

struct Deferred::Tape {
  std::vector<Operation> operations;
  // Weak: torch's factory functions make another TensorImpl of a tensor that somebody else holds.
  std::vector<WeakTensor> made;
  std::unordered_set<const void*> known;  // TensorImpls of `made`

  void call(const c10::OperatorHandle& op, Stack* stack);
  void give_memory_free_arguments(const c10::FunctionSchema& schema, Stack* stack, size_t first, bool factory) const;
  std::unordered_map<const void*, Use> uses(const std::vector<at::Tensor>& held) const;
};

struct Recorder {
  static thread_local Deferred::Tape* tape;
  static void call(const c10::OperatorHandle& op, Stack* stack) {
    const c10::impl::ExcludeDispatchKeyGuard apart(kKey);
    tape->call(op, stack);
  }
};
thread_local Deferred::Tape* Recorder::tape = nullptr;

namespace {

OpArgument argument_of(const c10::IValue& value) {
  OpArgument argument;
  using Kind = OpArgument::Kind;
  if (value.isTensor() && value.toTensor().defined()) argument.kind = Kind::Tensor;
  if (value.isTensorList()) argument.kind = Kind::Tensors;
  if (value.isOptionalTensorList()) argument.kind = Kind::OptionalTensors;
  if (argument.kind == Kind::Value) {
    argument.value = value;
    return argument;
  }
  const auto add = [&](const at::Tensor& t) {
    argument.items.push_back(!t.defined() ? Item(t) : t.is_meta() ? Item(MetaTensor(t)) : Item(kept_value(t)));
  };
  if (argument.kind == Kind::OptionalTensors) {
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
      add(t.value_or(at::Tensor()));
  } else if (argument.kind == Kind::Tensors) {
    for (const at::Tensor& t : value.toTensorVector())
      add(t);
  } else {
    add(value.toTensor());
  }
  return argument;
}

}  // namespace

void Deferred::Tape::call(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const auto& declared = schema.arguments();
  const size_t first = stack->size() - declared.size();
  bool factory = false, meta = false, has_tensors = false;
  for (size_t i = 0; i < declared.size(); ++i) {
    factory = factory || declared[i].name() == "device";
    each_tensor((*stack)[first + i], [&](const at::Tensor& t) {
      has_tensors = true;
      meta = meta || t.is_meta();
    });
  }
  if (!factory && !meta) return op.callBoxed(stack);

  for (size_t i = 0; i < declared.size(); ++i) {
    const auto* alias = declared[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    each_tensor((*stack)[first + i], [&](const at::Tensor& t) {
      TESSERA_CHECK(
          t.is_meta(), "construction", schema.name(),
          " writes values that are not computed yet to a tensor that has values already: make that one inside "
          "build(), too, by torch's factory functions");
    });
  }
  Operation operation{op, {}, {}};
  for (size_t i = 0; i < declared.size(); ++i)
    operation.arguments.push_back(argument_of((*stack)[first + i]));
  give_memory_free_arguments(schema, stack, first, factory);
  op.callBoxed(stack);

  for (const c10::IValue& result : *stack) {
    each_tensor(result, [&](const at::Tensor& t) {
      if (!t.is_meta()) return;
      operation.results.emplace_back(t);
      if (known.insert(t.unsafeGetTensorImpl()).second) made.emplace_back(t.getIntrusivePtr());
    });
  }
  if (is_of_objects(schema.name()) || (operation.results.empty() && !schema.is_mutable())) return;
  operations.push_back(std::move(operation));
}

void Deferred::Tape::give_memory_free_arguments(const c10::FunctionSchema& schema, Stack* stack, size_t first,
                                                bool factory) const {
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    const std::string& name = schema.arguments()[i].name();
    if (factory && name == "device")
      value = c10::Device(c10::kMeta);
    else if (factory && name == "pin_memory")
      value = c10::IValue();
    else
      value = mapped(value, without_memory);
  }
}

// By storage.
std::unordered_map<const void*, Use> Deferred::Tape::uses(const std::vector<at::Tensor>& held) const {
  std::unordered_map<const void*, Use> found;
  const auto use = [&](const MetaTensor& meta, size_t number) {
    auto& numbers = found[meta.key()].numbers;
    if (numbers.empty() || numbers.back() != number) numbers.push_back(number);
  };
  for (size_t i = 0; i < operations.size(); ++i) {
    for (const OpArgument& argument : operations[i].arguments)
      for (const Item& item : argument.items)
        if (const auto* meta = std::get_if<MetaTensor>(&item)) use(*meta, i);
    for (const MetaTensor& meta : operations[i].results)
      use(meta, i);
  }
  std::unordered_set<const void*> seen;
  const auto hold = [&](const at::Tensor& t) {
    if (!t.defined() || !t.is_meta() || !seen.insert(t.unsafeGetTensorImpl()).second) return;
    if (const auto at = found.find(t.storage().unsafeGetStorageImpl()); at != found.end())
      at->second.holders.push_back(t);
  };
  for (const WeakTensor& weak : made)
    if (auto impl = weak.lock(); impl.defined()) hold(at::Tensor(std::move(impl)));
  std::ranges::for_each(held, hold);
  return found;
}

namespace {

at::Tensor tensor_over(const c10::Storage& storage, const MetaTensor& meta) {
  const auto options = at::TensorOptions().dtype(meta.dtype).device(storage.device());
  return at::empty({0}, options).set_(storage, meta.offset, meta.sizes, meta.strides);
}

c10::Storage memory_like(const c10::Storage& meta, c10::Device device) {
  return at::empty({static_cast<int64_t>(meta.nbytes())}, at::TensorOptions().dtype(at::kByte).device(device))
      .storage();
}

// One run of what was recorded.
class Run {
 public:
  Run(const std::vector<Operation>& operations, std::unordered_map<const void*, Use> uses,
      const Deferred::Keeper& keeper, std::optional<c10::Device> device)
      : operations_(operations), uses_(std::move(uses)), keeper_(keeper), device_(device) {}

  void operator()() {
    for (size_t i = 0; i < operations_.size(); ++i) {
      now_ = i;
      call(operations_[i]);
      settle(operations_[i]);
    }
  }

 private:
  // A storage with memory, or one that was put away.
  struct Live {
    c10::Storage memory;  // null: the keeper has its tensor
    std::optional<MetaTensor> kept;
    size_t next = 0;  // in Use::numbers
  };

  void call(const Operation& operation);
  void settle(const Operation& operation);
  void put(const void* key);
  const at::Tensor* kept(const void* key) const;
  at::Tensor value_of(const MetaTensor& meta);
  c10::IValue value_of(const OpArgument& argument);
  size_t next_use(const void* key) const {
    const auto& numbers = uses_.at(key).numbers;
    const size_t next = live_.at(key).next;
    return next < numbers.size() ? numbers[next] : operations_.size() + kSoon + 1;
  }

  const std::vector<Operation>& operations_;
  std::unordered_map<const void*, Use> uses_;
  const Deferred::Keeper& keeper_;
  std::optional<c10::Device> device_;
  size_t now_ = 0;
  std::unordered_map<const void*, Live> live_;
  std::vector<const void*> whole_;  // of those that the keeper keeps, the oldest first
  int64_t whole_bytes_ = 0;
};

// The tensor of the storage that the keeper has; null: none.
const at::Tensor* Run::kept(const void* key) const {
  const auto& holders = uses_.at(key).holders;
  const auto found = std::ranges::find_if(holders, keeper_.keeps);
  return found == holders.end() ? nullptr : &*found;
}

at::Tensor Run::value_of(const MetaTensor& meta) {
  const auto found = live_.find(meta.key());
  TESSERA_CHECK(found != live_.end(), "construction",
                "a tensor of the meta device that was not made inside build() is used there: it has no values");
  Live& live = found->second;
  if (!live.memory) {  // operators see what they saw before, whatever the keeper made of it
    const at::Tensor& param = *kept(meta.key());
    keeper_.take(param);
    live.memory = memory_like(meta.storage, c10::kCPU);
    tensor_over(live.memory, *live.kept).copy_(param.detach());
    whole_.push_back(meta.key());
    whole_bytes_ += static_cast<int64_t>(meta.storage.nbytes());
  }
  return tensor_over(live.memory, meta);
}

c10::IValue Run::value_of(const OpArgument& argument) {
  const auto tensor = [&](const Item& item) {
    const auto* meta = std::get_if<MetaTensor>(&item);
    return meta != nullptr ? value_of(*meta) : std::get<at::Tensor>(item);
  };
  if (argument.kind == OpArgument::Kind::Tensor) return tensor(argument.items.front());
  if (argument.kind == OpArgument::Kind::Tensors) {
    c10::List<at::Tensor> list;
    for (const Item& item : argument.items)
      list.push_back(tensor(item));
    return list;
  }
  if (argument.kind == OpArgument::Kind::OptionalTensors) {
    c10::List<std::optional<at::Tensor>> list;
    for (const Item& item : argument.items) {
      const at::Tensor t = tensor(item);
      list.push_back(t.defined() ? std::optional(t) : std::nullopt);
    }
    return list;
  }
  return argument.value;
}

void Run::call(const Operation& operation) {
  Stack stack;
  for (const OpArgument& argument : operation.arguments)
    stack.push_back(value_of(argument));
  operation.op.callBoxed(&stack);
  size_t next = 0;
  for (const c10::IValue& result : stack) {
    each_tensor(result, [&](const at::Tensor& t) {
      const MetaTensor& meta = operation.results.at(next++);
      const auto [at, is_new] = live_.try_emplace(meta.key());
      Live& live = at->second;
      if (is_new) live.memory = t.storage();
      const bool same = t.sizes() == meta.sizes && t.strides() == meta.strides && t.storage_offset() == meta.offset;
      TESSERA_CHECK(same && t.storage().is_alias_of(live.memory), "construction", operation.op.schema().name(),
                    " makes another tensor with memory than without: call it outside build(), and give build() the "
                    "device rather than a module's to()");
      if (!is_new || kept(meta.key()) == nullptr) return;
      whole_.push_back(meta.key());
      whole_bytes_ += static_cast<int64_t>(meta.storage.nbytes());
    });
  }
}

// Gives the storage's tensors their memory, or values; the keeper's goes to the keeper.
void Run::put(const void* key) {
  Live& live = live_.at(key);
  const at::Tensor* const param = kept(key);
  const bool again = live.kept.has_value();
  if (param != nullptr && !again) live.kept.emplace(*param);
  c10::Storage memory = live.memory;
  if (device_ && memory.device() != *device_) {
    memory = memory_like(memory, *device_);
    const MetaTensor bytes(
        at::empty({static_cast<int64_t>(memory.nbytes())}, at::TensorOptions().dtype(at::kByte).device(at::kMeta)));
    tensor_over(memory, bytes).copy_(tensor_over(live.memory, bytes));
  }
  for (const at::Tensor& t : uses_.at(key).holders) {
    if (t.is_meta())
      t.unsafeGetTensorImpl()->shallow_copy_from(tensor_over(memory, MetaTensor(t)).getIntrusivePtr());
    else if (&t == param)
      t.detach().copy_(tensor_over(memory, *live.kept));
  }
  live.memory = c10::Storage();
  if (param == nullptr) return;
  memory = c10::Storage();
  keeper_.put(*param);
  if (std::erase(whole_, key) > 0) whole_bytes_ -= static_cast<int64_t>(live.kept->storage.nbytes());
}

void Run::settle(const Operation& operation) {
  std::vector<const void*> used;
  const auto add = [&](const MetaTensor& meta) {
    if (std::ranges::find(used, meta.key()) == used.end()) used.push_back(meta.key());
  };
  for (const OpArgument& argument : operation.arguments)
    for (const Item& item : argument.items)
      if (const auto* meta = std::get_if<MetaTensor>(&item)) add(*meta);
  std::ranges::for_each(operation.results, add);
  for (const void* key : used) {
    if (++live_.at(key).next < uses_.at(key).numbers.size()) continue;
    put(key);
    live_.erase(key);
  }
  const auto can_wait = [&](const void* key) { return next_use(key) > now_ + kSoon; };
  while (whole_bytes_ > kOpenBytes) {
    const auto oldest = std::ranges::find_if(whole_, can_wait);
    if (oldest == whole_.end()) return;
    put(*oldest);
  }
}

}  // namespace

Deferred::Deferred() : tape_(std::make_unique<Tape>()) {}
Deferred::~Deferred() = default;

struct Deferred::Recording::Guard {
  c10::impl::IncludeDispatchKeyGuard included{kKey};
};

Deferred::Recording::Recording(Deferred& deferred) {
  TESSERA_CHECK(Recorder::tape == nullptr, "construction", "build() is running on this thread already");
  Recorder::tape = deferred.tape_.get();
  guard_ = std::make_unique<Guard>();
}

Deferred::Recording::~Recording() {
  guard_.reset();
  Recorder::tape = nullptr;
}

void Deferred::explain(c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  if (text.find("eta tensors") == std::string::npos && text.find("not allocated yet") == std::string::npos &&
      text.find("'Meta' backend") == std::string::npos)
    return;
  error.add_context(
      "[construction] inside build() tensors have no values yet, so a constructor cannot read them; make such a piece "
      "outside, and partition() it");
}

void Deferred::run(const Keeper& keeper, const std::vector<at::Tensor>& held, std::optional<c10::Device> device) {
  const at::NoGradGuard no_grad;
  auto uses = tape_->uses(held);
  tape_->made.clear();
  Run(tape_->operations, std::move(uses), keeper, device)();
  tape_->operations.clear();
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&Recorder::call>());
}

}  // namespace tessera::nn
