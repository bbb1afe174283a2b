#include "tests/kernels/ptx/ptx_instructions.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <concepts>
#include <limits>
#include <map>
#include <stdexcept>
#include <type_traits>
#include <utility>

namespace tessera::kernels::ptx {
namespace {

using Table = std::map<std::pair<std::string, Braces>, Operation>;

template <class T>
using BitsOf = std::conditional_t<std::same_as<T, float>, uint32_t, uint64_t>;  // of a float or double

// A register's slot holds its value in the low bits; nothing reads the others.
template <class T>
constexpr uint8_t bits_of = std::same_as<T, bool> ? 1 : 8 * sizeof(T);
template <class T>
T from_slot(uint64_t slot) {
  if constexpr (std::floating_point<T>) {
    return std::bit_cast<T>(static_cast<BitsOf<T>>(slot));
  } else {
    return static_cast<T>(slot);
  }
}
template <class T>
uint64_t to_slot(T value) {
  if constexpr (std::floating_point<T>) {
    return std::bit_cast<BitsOf<T>>(value);
  } else {
    return static_cast<uint64_t>(value);
  }
}

template <class F, class Result, class... Sources, size_t... k>
void compute(uint64_t* registers, const uint16_t* slots, std::index_sequence<k...>) {
  registers[slots[0]] = to_slot(static_cast<Result>(F{}(from_slot<Sources>(registers[slots[k + 1]])...)));
}

template <class F, class Result, class... Sources>
void add_function(Table& table, const std::string& name, Braces braces, Result (F::*)(Sources...) const) {
  Operation row;
  row.operands = 1 + sizeof...(Sources);
  row.bits = {bits_of<Result>, bits_of<Sources>...};
  row.compute = [](uint64_t* registers, const uint16_t* slots) {
    compute<F, Result, Sources...>(registers, slots, std::index_sequence_for<Sources...>{});
  };
  table.emplace(std::pair(name, braces), row);
}

// `f`, a lambda without captures, gives the destination from the sources; its types are those of the operands.
template <class F>
void add(Table& table, const std::string& name, F, Braces braces = Braces::None) {
  add_function(table, name, braces, &F::operator());
}

// A shift by the width or more leaves zeros, or signs.
template <class T>
T shifted_left(T a, uint32_t by) {
  return by < bits_of<T> ? static_cast<T>(a << by) : T{0};
}
template <class T>
T shifted_right(T a, uint32_t by) {
  return static_cast<T>(a >> std::min<uint32_t>(by, bits_of<T> - 1) >> (by < bits_of<T> ? 0 : 1));
}

// `b` with the low `width` bits of `a` from bit `at` on; both counts have 8 bits.
template <class T>
T inserted(T a, T b, uint32_t at, uint32_t width) {
  const T ones = shifted_right(static_cast<T>(~T{0}), bits_of<T> - std::min<uint32_t>(width % 256, bits_of<T>));
  const T mask = shifted_left(ones, at % 256);
  return static_cast<T>((b & ~mask) | (shifted_left(a, at % 256) & mask));
}

template <class T>
T checked(T divisor) {
  if (divisor == 0) throw std::runtime_error("divides by zero");
  return divisor;
}

template <class T>
void add_comparisons(Table& table, const std::string& type) {
  add(table, "setp.eq." + type, [](T a, T b) -> bool { return a == b; });
  add(table, "setp.ne." + type, [](T a, T b) -> bool { return a < b || a > b; });  // ordered: false for a NaN
  add(table, "setp.lt." + type, [](T a, T b) -> bool { return a < b; });
  add(table, "setp.le." + type, [](T a, T b) -> bool { return a <= b; });
  add(table, "setp.gt." + type, [](T a, T b) -> bool { return a > b; });
  add(table, "setp.ge." + type, [](T a, T b) -> bool { return a >= b; });
}

// Integers wrap around: sums and products are those of the unsigned type U, of which W has twice the bits.
template <class T, class W>
void add_integers(Table& table, const std::string& type) {
  using U = std::make_unsigned_t<T>;
  add_comparisons<T>(table, type);
  add(table, "mov." + type, [](T a) -> T { return a; });
  add(table, "selp." + type, [](T a, T b, bool p) -> T { return p ? a : b; });
  add(table, "add." + type, [](U a, U b) -> U { return static_cast<U>(uint64_t{a} + b); });
  add(table, "sub." + type, [](U a, U b) -> U { return static_cast<U>(uint64_t{a} - b); });
  add(table, "mul.lo." + type, [](U a, U b) -> U { return static_cast<U>(uint64_t{a} * b); });
  add(table, "mad.lo." + type, [](U a, U b, U c) -> U { return static_cast<U>(uint64_t{a} * b + c); });
  add(table, "min." + type, [](T a, T b) -> T { return a < b ? a : b; });
  add(table, "max." + type, [](T a, T b) -> T { return a > b ? a : b; });
  add(table, "shr." + type, [](T a, uint32_t by) -> T { return shifted_right(a, by); });
  if constexpr (std::same_as<T, U>) {
    add(table, "div." + type, [](T a, T b) -> T { return static_cast<T>(a / checked(b)); });
    add(table, "rem." + type, [](T a, T b) -> T { return static_cast<T>(a % checked(b)); });
  } else {
    add(table, "neg." + type, [](U a) -> U { return static_cast<U>(0 - uint64_t{a}); });
  }
  if constexpr (sizeof(W) <= sizeof(uint64_t)) {
    add(table, "mul.wide." + type, [](T a, T b) -> W { return W{a} * W{b}; });
    add(table, "mul.hi." + type, [](T a, T b) -> T { return static_cast<T>(W{a} * W{b} >> bits_of<T>); });
  }
}

template <class T>
void add_bits(Table& table, const std::string& type) {
  add(table, "mov." + type, [](T a) -> T { return a; });
  add(table, "selp." + type, [](T a, T b, bool p) -> T { return p ? a : b; });
  add(table, "setp.eq." + type, [](T a, T b) -> bool { return a == b; });
  add(table, "setp.ne." + type, [](T a, T b) -> bool { return a != b; });
  add(table, "and." + type, [](T a, T b) -> T { return a & b; });
  add(table, "or." + type, [](T a, T b) -> T { return a | b; });
  add(table, "xor." + type, [](T a, T b) -> T { return a ^ b; });
  add(table, "not." + type, [](T a) -> T { return static_cast<T>(~a); });
  add(table, "shl." + type, [](T a, uint32_t by) -> T { return shifted_left(a, by); });
  add(table, "shr." + type, [](T a, uint32_t by) -> T { return shifted_right(a, by); });
  if constexpr (sizeof(T) > 2) {
    add(table, "bfi." + type, [](T a, T b, uint32_t at, uint32_t width) -> T { return inserted(a, b, at, width); });
  }
}

// A register of type T from two halves, and the halves from one.
template <class T, class Half>
void add_halves(Table& table, const std::string& name) {
  const auto join = [](Half low, Half high) -> T { return low | static_cast<T>(T{high} << bits_of<Half>); };
  add(table, name, join, Braces::Sources);
  Operation row;
  row.operands = 3;
  row.results = 2;
  row.bits = {bits_of<Half>, bits_of<Half>, bits_of<T>};
  row.compute = [](uint64_t* registers, const uint16_t* slots) {
    const auto whole = from_slot<T>(registers[slots[2]]);
    registers[slots[0]] = to_slot(static_cast<Half>(whole));
    registers[slots[1]] = to_slot(static_cast<Half>(whole >> bits_of<Half>));
  };
  table.emplace(std::pair(name, Braces::Results), row);
}

// A shift takes 32 bits out of two words.
uint64_t both(uint32_t low, uint32_t high) {
  return uint64_t{high} << 32 | low;
}
void add_funnel_shifts(Table& table) {
  add(table, "shf.l.wrap.b32", [](uint32_t low, uint32_t high, uint32_t by) -> uint32_t {
    return static_cast<uint32_t>(both(low, high) << (by % 32) >> 32);
  });
  add(table, "shf.r.wrap.b32", [](uint32_t low, uint32_t high, uint32_t by) -> uint32_t {
    return static_cast<uint32_t>(both(low, high) >> (by % 32));
  });
}

// A NaN that is computed has these bits, whatever the operands' are; one of 64 bits has some operand's.
float computed(float value) {
  return std::isnan(value) ? std::bit_cast<float>(0x7fffffffu) : value;
}
double computed(double value) {
  return value;
}

// Only what rounds to nearest by itself and keeps subnormals: ptxas may fuse an `add.f32` without a rounding.
template <class T>
void add_floats(Table& table, const std::string& type) {
  using Bits = BitsOf<T>;
  constexpr Bits sign = Bits{1} << (bits_of<T> - 1);
  add_comparisons<T>(table, type);
  add(table, "setp.equ." + type, [](T a, T b) -> bool { return !(a < b || a > b); });
  add(table, "setp.neu." + type, [](T a, T b) -> bool { return a != b; });
  add(table, "setp.ltu." + type, [](T a, T b) -> bool { return !(a >= b); });
  add(table, "setp.leu." + type, [](T a, T b) -> bool { return !(a > b); });
  add(table, "setp.gtu." + type, [](T a, T b) -> bool { return !(a <= b); });
  add(table, "setp.geu." + type, [](T a, T b) -> bool { return !(a < b); });
  add(table, "setp.num." + type, [](T a, T b) -> bool { return a == a && b == b; });
  add(table, "setp.nan." + type, [](T a, T b) -> bool { return a != a || b != b; });
  add(table, "mov." + type, [](Bits a) -> Bits { return a; });
  add(table, "selp." + type, [](Bits a, Bits b, bool p) -> Bits { return p ? a : b; });
  add(table, "neg." + type, [](Bits a) -> Bits { return a ^ sign; });
  add(table, "abs." + type, [](Bits a) -> Bits { return a & ~sign; });
  add(table, "add.rn." + type, [](T a, T b) -> T { return computed(a + b); });
  add(table, "sub.rn." + type, [](T a, T b) -> T { return computed(a - b); });
  add(table, "mul.rn." + type, [](T a, T b) -> T { return computed(a * b); });
  add(table, "div.rn." + type, [](T a, T b) -> T { return computed(a / b); });
  add(table, "fma.rn." + type, [](T a, T b, T c) -> T { return computed(std::fma(a, b, c)); });
  add(table, "sqrt.rn." + type, [](T a) -> T { return computed(std::sqrt(a)); });
}

// Towards zero, to the nearest value that T has; a NaN gives 0.
template <class T>
T truncated(float value) {
  static_assert(sizeof(T) <= 4);  // all of them are doubles
  if (std::isnan(value)) return 0;
  constexpr double least = std::numeric_limits<T>::min(), most = std::numeric_limits<T>::max();
  return static_cast<T>(std::min(std::max(double{value}, least), most));
}

template <class To, class From>
void add_conversion(Table& table, const std::string& to, const std::string& from) {
  add(table, "cvt." + to + "." + from, [](From a) -> To { return static_cast<To>(a); });
}
template <class From>
void add_conversions(Table& table, const std::string& from) {
  add_conversion<uint16_t, From>(table, "u16", from);
  add_conversion<uint32_t, From>(table, "u32", from);
  add_conversion<uint64_t, From>(table, "u64", from);
  add_conversion<int16_t, From>(table, "s16", from);
  add_conversion<int32_t, From>(table, "s32", from);
  add_conversion<int64_t, From>(table, "s64", from);
  add(table, "cvt.rn.f32." + from, [](From a) -> float { return static_cast<float>(a); });
}

void add_memory(Table& table, const std::string& type, int bytes) {
  const std::pair<const char*, int> vectors[] = {{"", 1}, {".v2", 2}, {".v4", 4}};
  for (const auto& [vector, parts] : vectors) {
    Operation row;
    row.bytes = static_cast<uint8_t>(bytes);
    row.parts = static_cast<uint8_t>(parts);
    const std::string end = std::string(vector) + "." + type;
    row.kind = Kind::Load;
    table.emplace(std::pair("ld.global" + end, Braces::None), row);
    row.space = Space::Param;
    table.emplace(std::pair("ld.param" + end, Braces::None), row);
    row.kind = Kind::Store;
    row.space = Space::Global;
    table.emplace(std::pair("st.global" + end, Braces::None), row);
  }
}

Table make_table() {
  Table table;
  add_integers<uint16_t, uint32_t>(table, "u16");
  add_integers<uint32_t, uint64_t>(table, "u32");
  add_integers<int16_t, int32_t>(table, "s16");
  add_integers<int32_t, int64_t>(table, "s32");
  struct None {
    uint64_t more[2];  // 128 bits
  };
  add_integers<uint64_t, None>(table, "u64");
  add_integers<int64_t, None>(table, "s64");
  add_bits<uint16_t>(table, "b16");
  add_bits<uint32_t>(table, "b32");
  add_bits<uint64_t>(table, "b64");
  add_halves<uint32_t, uint16_t>(table, "mov.b32");
  add_halves<uint64_t, uint32_t>(table, "mov.b64");
  add_funnel_shifts(table);
  add(table, "mov.pred", [](bool a) -> bool { return a; });
  add(table, "not.pred", [](bool a) -> bool { return !a; });
  add(table, "and.pred", [](bool a, bool b) -> bool { return a && b; });
  add(table, "or.pred", [](bool a, bool b) -> bool { return a || b; });
  add(table, "xor.pred", [](bool a, bool b) -> bool { return a != b; });
  add_floats<float>(table, "f32");
  add_floats<double>(table, "f64");
  add(table, "cvt.f64.f32", [](float a) -> double { return a; });
  add(table, "cvt.rn.f32.f64", [](double a) -> float { return computed(static_cast<float>(a)); });
  add_conversions<uint16_t>(table, "u16");
  add_conversions<uint32_t>(table, "u32");
  add_conversions<uint64_t>(table, "u64");
  add_conversions<int16_t>(table, "s16");
  add_conversions<int32_t>(table, "s32");
  add_conversions<int64_t>(table, "s64");
  add(table, "cvt.rzi.u32.f32", [](float a) -> uint32_t { return truncated<uint32_t>(a); });
  add(table, "cvt.rzi.s32.f32", [](float a) -> int32_t { return truncated<int32_t>(a); });
  add(table, "cvta.to.global.u64", [](uint64_t a) -> uint64_t { return a; });  // one address space
  for (const auto& [bits, bytes] : {std::pair{"8", 1}, {"16", 2}, {"32", 4}, {"64", 8}}) {
    for (const char* letter : {"u", "b"})
      add_memory(table, std::string(letter) + bits, bytes);
  }
  add_memory(table, "f32", 4);
  add_memory(table, "f64", 8);
  const std::pair<const char*, Kind> jumps[] = {
      {"bra", Kind::Branch}, {"bra.uni", Kind::Branch}, {"ret", Kind::Return}};
  for (const auto& [name, kind] : jumps)
    table.emplace(std::pair(name, Braces::None), Operation{.kind = kind});
  return table;
}

}  // namespace

const Operation* find_operation(const std::string& name, Braces braces) {
  static const Table table = make_table();
  const auto row = table.find({name, braces});
  return row == table.end() ? nullptr : &row->second;
}

}  // namespace tessera::kernels::ptx
