// The machine that runs the CUDA kernels in the tests: every class of instruction on a known answer, and what it refuses.
#include "tests/kernels/ptx/ptx_machine.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace tessera::kernels::ptx {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
constexpr uint32_t kComputedNan = 0x7fffffff;

constexpr uint64_t bits(float value) {
  return std::bit_cast<uint32_t>(value);
}
constexpr uint64_t bits(double value) {
  return std::bit_cast<uint64_t>(value);
}

// An entry k(out, a, b, c) of 64-bit parameters whose registers 1 to 3 of every type hold a, b, c.
std::string entry(const std::string& code) {
  std::string text =
      ".version 9.0\n.target sm_90\n.address_size 64\n"
      ".visible .entry k(.param .u64 out, .param .u64 a, .param .align 8 .b8 b[8], .param .u64 c)\n"
      ".maxntid 64, 1, 1\n{\n"
      ".reg .pred %p<8>;\n.reg .b16 %rs<8>;\n.reg .b32 %r<8>;\n.reg .f32 %f<8>;\n.reg .f64 %fd<8>;\n.reg .b64 %rd<8>;\n"
      "ld.param.u64 %rd0, [out];\n";
  for (const auto& [number, name] : {std::pair{"1", "a"}, {"2", "b"}, {"3", "c"}}) {
    for (const auto& [load, where] :
         {std::pair{"u64", "%rd"}, {"u32", "%r"}, {"f32", "%f"}, {"f64", "%fd"}, {"u16", "%rs"}})
      text += std::string("ld.param.") + load + " " + where + number + ", [" + name + "];\n";
    text += std::string("setp.ne.u64 %p") + number + ", %rd" + number + ", 0;\n";
  }
  return text + code + "\nret;\n}\n";
}

// What `code` leaves in register 7 of the type: "rd", "r", "f", "fd", "rs" or "p".
uint64_t result(const std::string& code, const std::string& type, uint64_t a = 0, uint64_t b = 0, uint64_t c = 0) {
  const std::string store = type == "p"    ? "selp.u64 %rd7, 1, 0, %p7;\nst.global.u64 [%rd0], %rd7;"
                            : type == "f"  ? "st.global.f32 [%rd0], %f7;"
                            : type == "fd" ? "st.global.f64 [%rd0], %fd7;"
                            : type == "r"  ? "st.global.u32 [%rd0], %r7;"
                            : type == "rs" ? "st.global.u16 [%rd0], %rs7;"
                                           : "st.global.u64 [%rd0], %rd7;";
  const Program program = parse(entry(code + "\n" + store), "snippet");
  Memory memory;
  void* out = memory.allocate(8);
  std::memset(out, 0, 8);
  const void* arguments[] = {&out, &a, &b, &c};
  run(program, program.entries.at("k"), {1, 1}, arguments, memory);
  uint64_t value = 0;
  std::memcpy(&value, out, 8);
  return value;
}

struct Snippet {
  const char* code;
  const char* type;
  uint64_t a, b, c, expected;
};

void expect_results(const std::vector<Snippet>& snippets) {
  for (const Snippet& s : snippets) {
    EXPECT_EQ(result(s.code, s.type, s.a, s.b, s.c), s.expected)
        << s.code << " of " << s.a << ", " << s.b << ", " << s.c;
  }
}

TEST(PtxMachine, IntegersWrapAround) {
  constexpr uint64_t most = ~uint64_t{0};
  expect_results({
      {"add.s32 %r7, %r1, %r2;", "r", 0xffffffff, 2, 0, 1},
      {"add.s16 %rs7, %rs1, 112;", "rs", 0xffff, 0, 0, 111},
      {"add.u64 %rd7, %rd1, %rd2;", "rd", most, 2, 0, 1},
      {"sub.s64 %rd7, %rd1, %rd2;", "rd", 1, 2, 0, most},
      {"sub.s32 %r7, 126, %r2;", "r", 0, 127, 0, 0xffffffff},
      {"neg.s32 %r7, %r1;", "r", 0x80000000, 0, 0, 0x80000000},
      {"mul.lo.s64 %rd7, %rd1, %rd2;", "rd", most, 3, 0, most - 2},
      {"mul.lo.u32 %r7, %r1, %r2;", "r", 0x10001, 0x10001, 0, 0x20001},
      {"mad.lo.s32 %r7, %r1, %r2, %r3;", "r", 0xffffffff, 5, 7, 2},
      {"mul.wide.u32 %rd7, %r1, %r2;", "rd", 0xffffffff, 0xffffffff, 0, 0xfffffffe00000001},
      {"mul.wide.s32 %rd7, %r1, 4;", "rd", 0xffffffff, 0, 0, most - 3},
      {"mul.wide.u16 %r7, %rs1, %rs2;", "r", 0xffff, 0xffff, 0, 0xfffe0001},
      {"mul.hi.u32 %r7, %r1, %r2;", "r", 0xffffffff, 0xffffffff, 0, 0xfffffffe},
      {"mul.hi.s32 %r7, %r1, %r2;", "r", 0xffffffff, 2, 0, 0xffffffff},
      {"div.u64 %rd7, %rd1, %rd2;", "rd", most, 16, 0, most >> 4},
      {"div.u32 %r7, %r1, %r2;", "r", 0xfffffff0, 16, 0, 0x0fffffff},
      {"rem.u32 %r7, %r1, %r2;", "r", 0xffffffff, 16, 0, 15},
      {"min.s32 %r7, %r1, %r2;", "r", 0xffffffff, 1, 0, 0xffffffff},
      {"min.u32 %r7, %r1, %r2;", "r", 0xffffffff, 1, 0, 1},
      {"max.s64 %rd7, %rd1, -2;", "rd", most, 0, 0, most},
  });
}

TEST(PtxMachine, BitsAndShifts) {
  expect_results({
      {"and.b32 %r7, %r1, -2147483648;", "r", 0xffffffff, 0, 0, 0x80000000},
      {"and.b16 %rs7, %rs1, 31;", "rs", 0xffff, 0, 0, 31},
      {"or.b64 %rd7, %rd1, %rd2;", "rd", 0xf0, 0x0f, 0, 0xff},
      {"xor.b32 %r7, %r1, 0xff;", "r", 0x0f, 0, 0, 0xf0},
      {"not.b16 %rs7, %rs1;", "rs", 0x00ff, 0, 0, 0xff00},
      {"not.b64 %rd7, %rd1;", "rd", 0, 0, 0, ~uint64_t{0}},
      {"shl.b32 %r7, %r1, %r2;", "r", 3, 31, 0, 0x80000000},
      {"shl.b32 %r7, %r1, %r2;", "r", 3, 32, 0, 0},  // the width and more clear every bit
      {"shl.b32 %r7, %r1, %r2;", "r", 3, 0xffffffff, 0, 0},
      {"shl.b64 %rd7, %rd1, 63;", "rd", 3, 0, 0, uint64_t{1} << 63},
      {"shr.u32 %r7, %r1, %r2;", "r", 0x80000000, 31, 0, 1},
      {"shr.u32 %r7, %r1, %r2;", "r", 0x80000000, 32, 0, 0},
      {"shr.s32 %r7, %r1, %r2;", "r", 0x80000000, 40, 0, 0xffffffff},
      {"shr.u16 %rs7, %rs1, 10;", "rs", 0xfc00, 0, 0, 63},
      {"shr.u64 %rd7, %rd1, %r2;", "rd", uint64_t{1} << 63, 62, 0, 2},
      {"shr.u64 %rd7, %rd1, %r2;", "rd", uint64_t{1} << 63, 64, 0, 0},
      {"mov.b32 %r7, {%rs1, %rs2};", "r", 0x1234, 0xabcd, 0, 0xabcd1234},
      {"mov.b64 %rd7, {%r1, %r2};", "rd", 1, 2, 0, 0x200000001},
      {"mov.b32 {%rs6, %rs7}, %r1;", "rs", 0xabcd1234, 0, 0, 0xabcd},
      {"mov.b64 {%r7, %r6}, %rd1;", "r", 0x200000001, 0, 0, 1},
      {"shf.l.wrap.b32 %r7, %r1, %r2, 8;", "r", 0x12345678, 0x9abcdef0, 0, 0xbcdef012},
      {"shf.l.wrap.b32 %r7, %r1, %r2, 32;", "r", 0x12345678, 0x9abcdef0, 0, 0x9abcdef0},
      {"shf.r.wrap.b32 %r7, %r1, %r2, 40;", "r", 0x12345678, 0x9abcdef0, 0, 0xf0123456},
      {"bfi.b32 %r7, %r1, %r2, 8, 4;", "r", 0xfb, 0, 0, 0xb00},
      {"bfi.b32 %r7, %r1, %r2, 28, 8;", "r", 0xab, 0x11111111, 0, 0xb1111111},  // above the width nothing is kept
      {"bfi.b32 %r7, %r1, %r2, %r3, 0;", "r", 0xab, 0x11, 4, 0x11},
      {"bfi.b64 %rd7, %rd1, %rd2, 12, 52;", "rd", 3, 0xfff00f, 0, 0x300f},
      {"bfi.b64 %rd7, %rd1, %rd2, 0, %r3;", "rd", 3, ~uint64_t{0}, 64, 3},
  });
}

TEST(PtxMachine, MovesSelectionsAndPredicates) {
  expect_results({
      {"mov.b32 %r7, %f1;", "r", bits(1.0f), 0, 0, 0x3f800000},
      {"mov.f32 %f7, 0f7FC00001;", "f", 0, 0, 0, 0x7fc00001},  // a NaN as it is
      {"mov.f64 %fd7, 0dFFF0000000000001;", "fd", 0, 0, 0, 0xfff0000000000001},
      {"mov.u16 %rs7, -1;", "rs", 0, 0, 0, 0xffff},
      {"selp.b32 %r7, 5, %r2, %p1;", "r", 1, 6, 0, 5},
      {"selp.f32 %f7, %f1, %f2, %p3;", "f", bits(1.0f), bits(2.0f), 0, bits(2.0f)},
      {"selp.f64 %fd7, %fd1, %fd2, %p3;", "fd", bits(1.0), bits(2.0), 1, bits(1.0)},
      {"setp.eq.s16 %p7, %rs1, %rs2;", "p", 0x10001, 1, 0, 1},
      {"setp.lt.s64 %p7, %rd1, %rd2;", "p", ~uint64_t{0}, 0, 0, 1},
      {"setp.lt.u64 %p7, %rd1, %rd2;", "p", ~uint64_t{0}, 0, 0, 0},
      {"setp.gt.u32 %p7, %r1, 2139095040;", "p", 0x80000000, 0, 0, 1},
      {"setp.ge.s32 %p7, %r1, 0;", "p", 0x80000000, 0, 0, 0},
      {"and.pred %p7, %p1, %p2;", "p", 1, 0, 0, 0},
      {"or.pred %p7, %p1, %p2;", "p", 1, 0, 0, 1},
      {"xor.pred %p7, %p1, %p2;", "p", 1, 1, 0, 0},
      {"mov.pred %p6, 0;\nnot.pred %p7, %p6;", "p", 0, 0, 0, 1},
      {"mov.u32 %r7, 1;\n@%p1 mov.u32 %r7, 2;", "r", 1, 0, 0, 2},
      {"mov.u32 %r7, 1;\n@!%p1 mov.u32 %r7, 2;", "r", 1, 0, 0, 1},
      {"{\n.reg .b32 %r1;\nmov.u32 %r1, 9;\n}\nmov.u32 %r7, %r1;", "r", 4, 0, 0, 4},  // a scope's own register
  });
}

TEST(PtxMachine, FloatsRoundToNearestAndKeepSubnormals) {
  const float tiny = 1e-45f, third = 1.0f / 3;
  expect_results({
      {"add.rn.f32 %f7, %f1, %f2;", "f", bits(1.0f), bits(0x1p-24f), 0, bits(1.0f)},  // a tie, to even
      {"add.rn.f32 %f7, %f1, %f2;", "f", bits(1.0f), bits(0x1.8p-24f), 0, bits(1.0f + 0x1p-23f)},
      {"sub.rn.f32 %f7, %f1, %f2;", "f", bits(0x1.1p-126f), bits(0x1p-126f), 0, bits(0x1p-130f)},
      {"mul.rn.f32 %f7, %f1, 0f3F000000;", "f", bits(0x1p-148f), 0, 0, bits(tiny)},
      {"mul.rn.f32 %f7, %f1, %f2;", "f", bits(3e38f), bits(-2.0f), 0, bits(-kInf)},
      {"div.rn.f32 %f7, %f1, %f2;", "f", bits(1.0f), bits(3.0f), 0, bits(third)},
      {"div.rn.f32 %f7, %f1, %f2;", "f", bits(-1.0f), bits(0.0f), 0, bits(-kInf)},
      {"sqrt.rn.f32 %f7, %f1;", "f", bits(2.0f), 0, 0, bits(std::sqrt(2.0f))},
      {"sqrt.rn.f32 %f7, %f1;", "f", bits(-0.0f), 0, 0, bits(-0.0f)},
      // Rounded once: a * a - 1 is exact here, and by two roundings it is not.
      {"fma.rn.f32 %f7, %f1, %f1, %f2;", "f", bits(1 + 0x1p-12f), bits(-1.0f), 0, bits(0x1p-11f + 0x1p-24f)},
      {"neg.f32 %f7, %f1;", "f", bits(0.0f), 0, 0, bits(-0.0f)},
      {"abs.f32 %f7, %f1;", "f", bits(-kInf), 0, 0, bits(kInf)},
  });
}

TEST(PtxMachine, DoublesRoundToNearestAndKeepSubnormals) {
  const double inf = kInf;
  expect_results({
      {"add.rn.f64 %fd7, %fd1, %fd2;", "fd", bits(1.0), bits(0x1p-53), 0, bits(1.0)},  // a tie, to even
      {"add.rn.f64 %fd7, %fd1, %fd2;", "fd", bits(1.0), bits(0x1.8p-53), 0, bits(1.0 + 0x1p-52)},
      {"sub.rn.f64 %fd7, %fd1, %fd2;", "fd", bits(0x1.1p-1022), bits(0x1p-1022), 0, bits(0x1p-1026)},
      {"mul.rn.f64 %fd7, %fd1, 0d3FE8000000000000;", "fd", bits(0x1p-1073), 0, 0, bits(0x1p-1073)},  // a tie
      {"mul.rn.f64 %fd7, %fd1, %fd2;", "fd", bits(1e308), bits(-10.0), 0, bits(-inf)},
      {"mul.rn.f64 %fd7, %fd1, %fd1;", "fd", bits(double{1e-45f}), 0, 0, bits(0x1p-298)},
      {"div.rn.f64 %fd7, %fd1, %fd2;", "fd", bits(1.0), bits(3.0), 0, bits(1.0 / 3)},
      {"sqrt.rn.f64 %fd7, %fd1;", "fd", bits(2.0), 0, 0, bits(std::sqrt(2.0))},
      {"fma.rn.f64 %fd7, %fd1, %fd1, %fd2;", "fd", bits(1 + 0x1p-27), bits(-1.0), 0, bits(0x1p-26 + 0x1p-54)},
      {"neg.f64 %fd7, %fd1;", "fd", bits(0.0), 0, 0, bits(-0.0)},
      {"abs.f64 %fd7, %fd1;", "fd", bits(-inf), 0, 0, bits(inf)},
  });
  EXPECT_TRUE(std::isnan(std::bit_cast<double>(result("sub.rn.f64 %fd7, %fd1, %fd1;", "fd", bits(inf)))));
}

TEST(PtxMachine, ComputedNansHaveTheSameBits) {
  for (const char* code : {"add.rn.f32 %f7, %f1, %f2;", "sub.rn.f32 %f7, %f1, %f1;", "mul.rn.f32 %f7, %f1, 0f00000000;",
                           "div.rn.f32 %f7, %f1, %f1;", "fma.rn.f32 %f7, %f1, %f3, %f2;", "sqrt.rn.f32 %f7, %f2;"}) {
    EXPECT_EQ(result(code, "f", bits(kInf), bits(-kInf), bits(1.0f)), kComputedNan) << code;
    EXPECT_EQ(result(code, "f", 0xff800001, 0xff800001, 0xff800001), kComputedNan) << code;
  }
}

TEST(PtxMachine, ComparisonsOfFloats) {
  // For a < b, a == b, a > b, and where one is a NaN.
  const std::pair<const char*, std::array<int, 4>> comparisons[] = {
      {"eq", {0, 1, 0, 0}},  {"ne", {1, 0, 1, 0}},  {"lt", {1, 0, 0, 0}},  {"le", {1, 1, 0, 0}},  {"gt", {0, 0, 1, 0}},
      {"ge", {0, 1, 1, 0}},  {"equ", {0, 1, 0, 1}}, {"neu", {1, 0, 1, 1}}, {"ltu", {1, 0, 0, 1}}, {"leu", {1, 1, 0, 1}},
      {"gtu", {0, 0, 1, 1}}, {"geu", {0, 1, 1, 1}}, {"num", {1, 1, 1, 0}}, {"nan", {0, 0, 0, 1}}};
  const std::pair<float, float> values[] = {{-1.0f, 1.0f}, {0.0f, -0.0f}, {kInf, 1.0f}, {kNan, 1.0f}};
  for (const auto& [name, expected] : comparisons) {
    for (size_t k = 0; k < std::size(values); ++k) {
      const std::string code = std::string("setp.") + name + ".f32 %p7, %f1, %f2;";
      EXPECT_EQ(result(code, "p", bits(values[k].first), bits(values[k].second)), expected[k]) << code << " " << k;
      const std::string of_doubles = std::string("setp.") + name + ".f64 %p7, %fd1, %fd2;";
      const uint64_t first = bits(double{values[k].first}), second = bits(double{values[k].second});
      EXPECT_EQ(result(of_doubles, "p", first, second), expected[k]) << of_doubles << " " << k;
    }
  }
}

TEST(PtxMachine, Conversions) {
  expect_results({
      {"cvt.u32.u16 %r7, %rs1;", "r", 0xffff, 0, 0, 0xffff},
      {"cvt.s32.s16 %r7, %rs1;", "r", 0xffff, 0, 0, 0xffffffff},
      {"cvt.u16.u32 %rs7, %r1;", "rs", 0x12345, 0, 0, 0x2345},
      {"cvt.u64.u32 %rd7, %r1;", "rd", 0xffffffff, 0, 0, 0xffffffff},
      {"cvt.s64.s32 %rd7, %r1;", "rd", 0xffffffff, 0, 0, ~uint64_t{0}},
      {"cvt.s64.s32 %rd7, %rd1;", "rd", 0x1fffffffe, 0, 0, ~uint64_t{1}},
      {"cvt.u32.u16 %r7, %r1;", "r", 0x12345, 0, 0, 0x2345},
      {"cvt.u32.u64 %r7, %rd1;", "r", 0x100000002, 0, 0, 2},
      {"cvt.rn.f32.u16 %f7, %rs1;", "f", 1023, 0, 0, bits(1023.0f)},
      {"cvt.rn.f32.u32 %f7, %r1;", "f", 0x1000001, 0, 0, bits(0x1p24f)},  // a tie, to even
      {"cvt.rn.f32.s32 %f7, %r1;", "f", 0xffffffff, 0, 0, bits(-1.0f)},
      {"cvt.rzi.u32.f32 %r7, %f1;", "r", bits(2.99f), 0, 0, 2},
      {"cvt.rzi.u32.f32 %r7, %f1;", "r", bits(-1.5f), 0, 0, 0},
      {"cvt.rzi.u32.f32 %r7, %f1;", "r", bits(1e10f), 0, 0, 0xffffffff},
      {"cvt.rzi.u32.f32 %r7, %f1;", "r", bits(kNan), 0, 0, 0},
      {"cvt.rzi.s32.f32 %r7, %f1;", "r", bits(-1.5f), 0, 0, 0xffffffff},
      {"cvt.rzi.s32.f32 %r7, %f1;", "r", bits(kNan), 0, 0, 0},
      {"cvt.rzi.s32.f32 %r7, %f1;", "r", bits(-kInf), 0, 0, 0x80000000},
      {"cvt.f64.f32 %fd7, %f1;", "fd", bits(-1e-45f), 0, 0, bits(-0x1p-149)},
      {"cvt.f64.f32 %fd7, %f1;", "fd", bits(kInf), 0, 0, bits(double{kInf})},
      {"cvt.rn.f32.f64 %f7, %fd1;", "f", bits(1 + 0x1p-24), 0, 0, bits(1.0f)},  // a tie, to even
      {"cvt.rn.f32.f64 %f7, %fd1;", "f", bits(1e300), 0, 0, bits(kInf)},
      {"cvt.rn.f32.f64 %f7, %fd1;", "f", bits(double{kNan}), 0, 0, kComputedNan},
      {"cvta.to.global.u64 %rd7, %rd1;", "rd", 77, 0, 0, 77},
  });
}

TEST(PtxMachine, ParametersAndMemory) {
  expect_results({
      {"ld.param.v2.u8 {%rs6, %rs7}, [a];", "rs", 0xccbbaa, 0, 0, 0xbb},  // zeros above what is loaded
      {"ld.param.v2.f32 {%f6, %f7}, [b];", "f", 0, bits(2.0f) << 32, 0, bits(2.0f)},
      {"ld.param.f64 %fd7, [c];", "fd", 0, 0, bits(0.1), bits(0.1)},
      {"st.global.f64 [%rd0], %fd2;\nld.global.f64 %fd7, [%rd0];", "fd", 0, bits(0.1), 0, bits(0.1)},
      {"ld.param.u16 %rs7, [a+2];", "rs", 0xabcd1234, 0, 0, 0xabcd},
      {"mov.b64 %rd4, b;\nld.param.u32 %r7, [%rd4+-8];", "r", 5, 6, 0, 5},  // a is before b
      {"st.global.u8 [%rd0+1], 0x1ff;\nld.global.u16 %rs7, [%rd0];", "rs", 0, 0, 0, 0xff00},
      {"st.global.u16 [%rd0+2], %r1;\nld.global.u32 %r7, [%rd0];", "r", 0x12345678, 0, 0, 0x56780000},
      {"st.global.v2.f32 [%rd0], {%f1, %f2};\nld.global.b64 %rd7, [%rd0];", "rd", 1, 2, 0, 0x200000001},
  });
}

// out[i] is i + 100 for odd i and 3 i for even ones, i of [0, n), by threads that go round.
const char* const kStride = R"(
.entry k(.param .u32 n, .param .align 8 .b8 out[8])
{
  .reg .pred %p<3>;
  .reg .b32 %r<6>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [out];
  ld.param.u32 %r5, [n];
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mad.lo.s32 %r0, %r1, %r2, %r3;  // i
  mov.u32 %r4, %nctaid.x;
  mul.lo.u32 %r4, %r4, %r2;
$head:
  setp.ge.u32 %p1, %r0, %r5;
  @%p1 bra $end;
  mul.wide.u32 %rd3, %r0, 4;
  add.s64 %rd3, %rd1, %rd3;
  and.b32 %r1, %r0, 1;
  setp.eq.u32 %p2, %r1, 0;
  @!%p2 bra $odd;
  mul.lo.u32 %r2, %r0, 3;
  bra.uni $store;
$odd:
  add.u32 %r2, %r0, 100;
$store:
  st.global.u32 [%rd3], %r2;
  add.u32 %r0, %r0, %r4;
  bra.uni $head;
$end:
  ret;
}
)";

TEST(PtxMachine, BranchesPartAndLoopsGoRound) {
  const Program program = parse(kStride, "stride");
  for (const Grid grid : {Grid{1, 1}, Grid{3, 8}, Grid{7, 16}}) {
    constexpr uint32_t n = 50;
    Memory memory;
    auto* out = static_cast<uint32_t*>(memory.allocate(4 * n));
    const void* arguments[] = {&n, &out};
    run(program, program.entries.at("k"), grid, arguments, memory);
    for (uint32_t i = 0; i < n; ++i)
      EXPECT_EQ(out[i], i % 2 != 0 ? i + 100 : 3 * i) << grid.blocks << " blocks";
  }
}

// The error's text, empty where there is none.
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

struct Refused {
  const char *code, *why;
};

// What the error says, behind the place.
void expect_refused(const std::vector<Refused>& snippets) {
  for (const auto& [code, why] : snippets) {
    const std::string error = error_of([&] { result(code, "rd"); });
    EXPECT_NE(error.find(why), std::string::npos) << code << " gave: " << error;
    EXPECT_EQ(error.rfind("snippet:", 0), 0u) << error;
    EXPECT_NE(error.find(code), std::string::npos) << error;
  }
}

TEST(PtxMachine, RefusesAccessesOutsideOfMemory) {
  expect_refused({
      {"ld.global.u32 %r7, [%rd0+8];", "outside of the memory"},
      {"ld.global.u64 %rd7, [%rd0+-8];", "outside of the memory"},
      {"st.global.u8 [%rd0+8], 0;", "outside of the memory"},
      {"st.global.u32 [%rd1], 0;", "outside of the memory"},  // a is no address
      {"ld.global.u32 %r7, [%rd0+2];", "not aligned to 4"},
      {"ld.global.f64 %fd7, [%rd0+4];", "not aligned to 8"},
      {"st.global.v2.f32 [%rd0+4], {%f1, %f2};", "not aligned to 8"},
      {"ld.param.u64 %rd7, [c+8];", "outside of the parameters"},
      {"div.u32 %r7, %r1, 0;", "divides by zero"},
  });
}

TEST(PtxMachine, MemoryEndsWhenReleased) {
  Memory memory;
  auto* block = static_cast<char*>(memory.allocate(6));
  EXPECT_TRUE(memory.holds(block, 6) && memory.holds(block + 5, 1));
  EXPECT_FALSE(memory.holds(block + 5, 2) || memory.holds(block - 1, 1) || memory.holds(block, size_t{0} - 1));
  EXPECT_FALSE(memory.release(block + 1));
  EXPECT_TRUE(memory.release(block));
  EXPECT_FALSE(memory.holds(block, 1) || memory.release(block));
}

TEST(PtxMachine, RefusesWhatItDoesNotKnow) {
  expect_refused({
      {"frob.b32 %r7, %r1;", "unknown instruction frob.b32"},
      {"add.f32 %f7, %f1, %f2;", "unknown instruction add.f32"},  // may be fused
      {"add.f64 %fd7, %fd1, %fd2;", "unknown instruction add.f64"},
      {"add.rn.ftz.f32 %f7, %f1, %f2;", "unknown instruction add.rn.ftz.f32"},
      {"div.approx.f32 %f7, %f1, %f2;", "unknown instruction div.approx.f32"},
      {"rcp.approx.ftz.f64 %fd7, %fd1;", "unknown instruction rcp.approx.ftz.f64"},
      {"ld.volatile.global.u32 %r7, [%rd0];", "unknown instruction ld.volatile.global.u32"},
      {"add.s32 %r7, %rs1, %r2;", "%rs1 has another width"},
      {"add.rn.f64 %fd7, %f1, %fd2;", "%f1 has another width"},
      {"cvt.u64.u32 %rd7, %rs1;", "%rs1 has another width"},
      {"cvt.s64.s32 %r7, %r1;", "%r7 has another width"},
      {"add.s32 %r7, %r1, %r99;", "no register %r99"},
      {"add.s32 %r7, %r1;", "expected ,"},
      {"mov.u32 %r7, %laneid;", "no register %laneid"},
      {"mov.u32 %r7, 12z;", "no number: 12z"},
      {"mov.f64 %fd7, 0d3FF0;", "no number: 0d3FF0"},
      {"bra $nowhere;", "'bra $nowhere;': no label $nowhere"},
      {".shared .b32 tile;", "unknown instruction .shared"},
  });
  EXPECT_NE(error_of([] { parse(".entry k()\n{\n}\n", "empty"); }).find("runs on"), std::string::npos);
  EXPECT_NE(error_of([] { parse(".global .b32 x;\n", "global"); }).find("unknown directive .global"),
            std::string::npos);
  EXPECT_NE(error_of([] { parse_file("no such file"); }).find("cannot read"), std::string::npos);
}

}  // namespace
}  // namespace tessera::kernels::ptx
