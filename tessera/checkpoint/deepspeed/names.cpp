#include <array>
#include <map>
#include <utility>

#include "tessera/checkpoint/deepspeed/names.h"

namespace tessera::checkpoint::deepspeed {

namespace {

constexpr std::array<std::pair<const char*, at::ScalarType>, 12> kStorages{{
    {"DoubleStorage", at::kDouble},
    {"FloatStorage", at::kFloat},
    {"HalfStorage", at::kHalf},
    {"BFloat16Storage", at::kBFloat16},
    {"LongStorage", at::kLong},
    {"IntStorage", at::kInt},
    {"ShortStorage", at::kShort},
    {"CharStorage", at::kChar},
    {"ByteStorage", at::kByte},
    {"BoolStorage", at::kBool},
    {"ComplexFloatStorage", at::kComplexFloat},
    {"ComplexDoubleStorage", at::kComplexDouble},
}};

constexpr std::array<std::pair<const char*, at::ScalarType>, 13> kDtypes{{
    {"float64", at::kDouble},
    {"float32", at::kFloat},
    {"float16", at::kHalf},
    {"bfloat16", at::kBFloat16},
    {"int64", at::kLong},
    {"int32", at::kInt},
    {"int16", at::kShort},
    {"int8", at::kChar},
    {"uint8", at::kByte},
    {"uint16", at::kUInt16},
    {"uint32", at::kUInt32},
    {"uint64", at::kUInt64},
    {"bool", at::kBool},
}};

constexpr std::array<std::pair<const char*, at::ScalarType>, 12> kNumpy{{
    {"f8", at::kDouble},
    {"f4", at::kFloat},
    {"f2", at::kHalf},
    {"b1", at::kBool},
    {"i1", at::kChar},
    {"i2", at::kShort},
    {"i4", at::kInt},
    {"i8", at::kLong},
    {"u1", at::kByte},
    {"u2", at::kUInt16},
    {"u4", at::kUInt32},
    {"u8", at::kUInt64},
}};

using Table = std::map<std::string, Meaning>;

Table make_table() {
  Table table{{"collections.OrderedDict", Meaning::Ordered},
              {"collections.defaultdict", Meaning::DefaultDict},
              {"torch._utils._rebuild_tensor_v2", Meaning::Tensor},
              {"torch._utils._rebuild_parameter", Meaning::Parameter},
              {"torch._utils._rebuild_parameter_with_state", Meaning::Parameter},
              {"torch._tensor._rebuild_from_type_v2", Meaning::FromType},
              {"torch.Size", Meaning::Size},
              {"_codecs.encode", Meaning::Encode},
              {"numpy._core.multiarray.scalar", Meaning::Scalar},
              {"numpy.core.multiarray.scalar", Meaning::Scalar},
              {"numpy._core.multiarray._reconstruct", Meaning::Array},
              {"numpy.core.multiarray._reconstruct", Meaning::Array}};
  for (const char* name : {"torch.Tensor",
                           "torch.nn.parameter.Parameter",
                           "torch.device",
                           "numpy.ndarray",
                           "numpy.dtype",
                           "_io.BytesIO",
                           "deepspeed.utils.tensor_fragment.fragment_address",
                           "deepspeed.runtime.fp16.loss_scaler.LossScaler",
                           "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
                           "deepspeed.runtime.fp16.loss_scaler.LossScalerBase",
                           "deepspeed.runtime.zero.config.ZeroStageEnum",
                           "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
                           "deepspeed.runtime.lr_schedules.WarmupLR",
                           "deepspeed.runtime.lr_schedules.WarmupDecayLR",
                           "deepspeed.runtime.lr_schedules.WarmupCosineLR",
                           "deepspeed.runtime.lr_schedules.OneCycle",
                           "deepspeed.runtime.lr_schedules.LRRangeTest",
                           "torch.optim.lr_scheduler.LambdaLR",
                           "torch.optim.lr_scheduler.StepLR",
                           "torch.optim.lr_scheduler.CosineAnnealingLR",
                           "torch.optim.lr_scheduler.LinearLR",
                           "torch.optim.lr_scheduler.ConstantLR",
                           "torch.optim.lr_scheduler.SequentialLR"})
    table.emplace(name, Meaning::Class);
  for (const std::string module : {"builtins.", "__builtin__."})
    for (const auto& [name, meaning] :
         {std::pair{"set", Meaning::Set}, std::pair{"frozenset", Meaning::FrozenSet}, std::pair{"dict", Meaning::Dict},
          std::pair{"list", Meaning::List}, std::pair{"bytes", Meaning::Bytes}, std::pair{"int", Meaning::Number},
          std::pair{"float", Meaning::Number}})
      table.emplace(module + name, meaning);
  // The functions that torch's pickler in C++ calls with a list, which they return.
  for (const char* kind : {"int", "double", "bool", "tensor"})
    table.emplace(std::string("torch.jit._pickle.build_") + kind + "list", Meaning::Same);
  return table;
}

}  // namespace

Name known_name(std::string module, std::string name) {
  static const Table table = make_table();
  const auto found = table.find(module + "." + name);
  Name known{std::move(module), std::move(name), found == table.end() ? Meaning::Unknown : found->second};
  if (known.module != "torch") return known;
  for (const auto& [text, dtype] : kStorages)
    if (known.name == text) known.meaning = Meaning::Storage, known.dtype = dtype;
  return known;
}

std::optional<at::ScalarType> known_dtype(const std::string& module, const std::string& name) {
  for (const auto& [text, dtype] : kDtypes)
    if (module == "torch" && name == text) return dtype;
  return std::nullopt;
}

const char* dtype_name(at::ScalarType dtype) {
  for (const auto& [text, known] : kDtypes)
    if (known == dtype) return text;
  return nullptr;
}

const char* storage_name(at::ScalarType dtype) {
  for (const auto& [text, known] : kStorages)
    if (known == dtype) return text;
  return nullptr;
}

const char* numpy_code(at::ScalarType dtype) {
  for (const auto& [code, known] : kNumpy)
    if (known == dtype) return code;
  return nullptr;
}

std::optional<at::ScalarType> numpy_dtype(const Value& value) {
  if (!value.is(Kind::Object) || value.object->name() == nullptr || value.object->name()->text() != "numpy.dtype")
    return std::nullopt;
  const Object& object = *value.object;
  if (object.args.items->empty() || !object.args.items->front().is(Kind::Text)) return std::nullopt;
  if (const Value* raw = object.raw()) {
    const bool little =
        raw->is(Kind::Tuple) && raw->items->size() > 1 &&
        ((*raw->items)[1].is_text("<") || (*raw->items)[1].is_text("|") || (*raw->items)[1].is_text("="));
    if (!little) return std::nullopt;
  }
  for (const auto& [code, dtype] : kNumpy)
    if (object.args.items->front().is_text(code)) return dtype;
  return std::nullopt;
}

}  // namespace tessera::checkpoint::deepspeed
