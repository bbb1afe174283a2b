#include "tessera/engine/inputs.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <regex>

namespace tessera::engine {
namespace {

constexpr size_t kNamed = 3;  // inputs that a line names

}  // namespace

std::string explain_inputs(const std::string& error, const InputTerms& engine, const std::vector<Input>& inputs,
                           const InputWords& words) {
  static const std::regex of_inputs("dtype|scalar type|type \\(|same type|device", std::regex::icase);
  if (!std::regex_search(error, of_inputs)) return {};
  const auto named = [&](at::ScalarType dtype) { return words.dtypes + std::string(c10::getDtypeNames(dtype).first); };
  std::vector<std::string> wrong;
  bool elsewhere = false;
  for (const Input& input : inputs) {
    const bool other = input.device != engine.device;
    const bool cast =
        engine.dtype && at::isFloatingType(input.dtype) && input.dtype != *engine.dtype && !engine.autocasts;
    elsewhere = elsewhere || other;
    if (other || cast)
      wrong.push_back(c10::str("input ", input.place, " is ", named(input.dtype), " on ", input.device));
  }
  if (wrong.empty()) return {};
  const std::string more = wrong.size() > kNamed ? c10::str(" and ", wrong.size() - kNamed, " more") : "";
  wrong.resize(std::min(wrong.size(), kNamed));
  return c10::str("[engine.forward] the engine has ", engine.dtype ? named(*engine.dtype) : "no parameters", " on ",
                  engine.device, "; ", c10::Join(", ", wrong), more, ": ", words.cast,
                  elsewhere ? c10::str(", or move them with .to(", words.device, ")") : "",
                  engine.dtype == at::kHalf ? ", or set fp16.auto_cast in the configuration" : "");
}

}  // namespace tessera::engine
