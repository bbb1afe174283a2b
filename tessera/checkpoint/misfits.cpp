#include "tessera/checkpoint/misfits.h"

#include "tessera/base/error.h"

namespace tessera::checkpoint {

std::string misfit(const at::Tensor& value, const at::Tensor& own) {
  if (value.is_meta()) return "is on the meta device there, and has no values";
  const auto is_dense = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && !tensor.is_quantized();
  };
  if (!is_dense(value) && is_dense(own)) return "is sparse or quantized there; make it dense";
  return misfit(value.scalar_type(), own);
}

std::string misfit(at::ScalarType dtype, const at::Tensor& own) {
  constexpr at::ScalarType kPacked = at::ScalarType::Float4_e2m1fn_x2;  // torch converts it to nothing
  if ((dtype == kPacked) != (own.scalar_type() == kPacked))
    return c10::str("is of ", dtype, " there and of ", own.scalar_type(), " here");
  return at::isComplexType(dtype) && !own.is_complex() ? "is complex there and real here" : "";
}

void Misfits::add(const std::string& name, const std::string& why) {
  if (!why.empty()) text_ += "\n  '" + name + "' " + why;
}

void Misfits::list(const char* what, const std::vector<std::string>& names) {
  if (names.empty()) return;
  text_ += std::string("\n  ") + what;
  for (const std::string& name : names)
    text_ += " '" + name + "'";
}

void Misfits::check() const {
  TESSERA_CHECK_VALUE(text_.empty(), "engine.load_module_state_dict", "what is to be loaded does not fit:", text_);
}

}  // namespace tessera::checkpoint
