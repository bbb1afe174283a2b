// The tensors inside whatever a module's forward returns.
//
// Tensors, optionals, pairs, tuples, ranges (vector, array, map) and nestings of them are known; numbers, enums and
// strings hold none. For a struct of your own write, in its namespace,
//   void collect_tensors(const MyOutput& output, std::vector<at::Tensor>& tensors);
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <ranges>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

namespace tessera::nn {
namespace detail {

template <class T>
concept HasOwnCollect = requires(const T& value, std::vector<at::Tensor>& out) { collect_tensors(value, out); };
template <class T>
concept TupleLike = requires { std::tuple_size<T>::value; };
template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};
template <class T>
inline constexpr bool kUnknown = false;

}  // namespace detail

// Appends the tensors of `value` to `out`, in order.
template <class T>
void append_tensors(const T& value, std::vector<at::Tensor>& out) {
  if constexpr (detail::HasOwnCollect<T>) {
    collect_tensors(value, out);
  } else if constexpr (std::is_convertible_v<const T&, at::Tensor>) {
    out.push_back(value);
  } else if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_convertible_v<const T&, std::string>) {
    // holds no tensor
  } else if constexpr (detail::IsOptional<T>::value) {
    if (value) {
      append_tensors(*value, out);
    }
  } else if constexpr (detail::TupleLike<T>) {
    std::apply([&](const auto&... items) { (append_tensors(items, out), ...); }, value);
  } else if constexpr (std::ranges::range<const T>) {
    for (const auto& item : value) {
      append_tensors(item, out);
    }
  } else {
    static_assert(detail::kUnknown<T>,
                  "write collect_tensors(const T&, std::vector<at::Tensor>&) for this output type");
  }
}

}  // namespace tessera::nn
