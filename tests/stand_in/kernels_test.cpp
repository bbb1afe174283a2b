// The table of the stand-in accelerator: the reference's bits, from and to memory of the device.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/kernels/table.h"
#include "tests/kernels/forms.h"
#include "tests/kernels/kernel_data.h"
#include "tests/kernels/split_and_join.h"
#include "tests/stand_in/memory.h"
#include "tests/stand_in/stand_in.h"
#include "tests/support/errors.h"

namespace tessera::stand_in {
namespace {

using namespace kernels;
using kernels::testing::Buffer;
using kernels::testing::Form;
using kernels::testing::kDTypes;
using tessera::testing::error_of;

void* const kStream = stream_handle(0);
const DeviceTable& device = *tessera_device_table();
const Table& reference = reference_table();

// A host buffer's copy on the device; `back` brings it into the buffer.
class OnDevice {
 public:
  OnDevice(Buffer& host, DType dtype, int64_t n)
      : view_(at::from_blob(host.data(), {n * static_cast<int64_t>(size_of(dtype))}, at::kByte)),
        copy_(view_.to(at::kPrivateUse1)) {}

  void* data() const { return copy_.data_ptr(); }
  void back() const { view_.copy_(copy_); }

 private:
  at::Tensor view_, copy_;
};

template <class Rule>
void expect_update(const char* name, const Rule& rule, void (*Table::*expected)(const Rule&, const UpdateRange&, float),
                   void (*DeviceTable::*actual)(const Rule&, const UpdateRange&, float, void*)) {
  const int64_t before = tessera_stand_in_launches_of(name);
  constexpr int64_t n = 257;
  for (const Form& form : kernels::testing::forms()) {
    SCOPED_TRACE(std::string(name) + ", " + form.name());
    const DType types[] = {DType::F32,       form.master.weight_dtype, DType::BF16,
                           form.state_dtype, form.state_dtype,         DType::F16};
    std::vector<Buffer> host;
    for (unsigned k = 0; k < 6; ++k)
      host.push_back(Buffer(types[k], n).fill_random(k, true).sprinkle(10 + k));
    std::vector<Buffer> copies = host;
    std::vector<OnDevice> there;
    for (int k = 0; k < 6; ++k)
      there.emplace_back(copies[k], types[k], n);
    const auto range = [&](auto& at) {
      UpdateRange r;
      r.n = n;
      if (form.master.master) r.master = static_cast<float*>(at[0].data());
      if (form.master.weight) r.weight = at[1].data();
      if (form.master.residual) r.residual = at[2].data();
      r.weight_dtype = form.master.weight_dtype;
      r.state0 = at[3].data();
      r.state1 = at[4].data();
      r.state_dtype = form.state_dtype;
      r.grad = at[5].data();
      r.grad_dtype = DType::F16;
      r.rounding = form.rounding;
      r.random = {5, 6, 7};
      return r;
    };
    (reference.*expected)(rule, range(host), -0.37f);
    (device.*actual)(rule, range(there), -0.37f, kStream);
    for (int k = 0; k < 6; ++k) {
      there[k].back();
      copies[k].expect_same(host[k]);
    }
  }
  EXPECT_EQ(tessera_stand_in_launches_of(name) - before, std::ssize(kernels::testing::forms()));
}

TEST(StandInKernels, Updates) {
  expect_update("adam", AdamRule{1e-3, 0.9, 0.999, 1e-8, 0.1}, &Table::adam, &DeviceTable::adam);
  expect_update("sgd", SgdRule{0.1, 0.9, 0.1, 0.01}, &Table::sgd, &DeviceTable::sgd);
  expect_update("lion", LionRule{1e-4, 0.9, 0.99, 0.1}, &Table::lion, &DeviceTable::lion);
  expect_update("adagrad", AdagradRule{1e-2, 1e-10, 0.01}, &Table::adagrad, &DeviceTable::adagrad);
}

TEST(StandInKernels, Elementwise) {
  const RandomKey random{1, 2, 3};
  constexpr int64_t n = 257;
  const int64_t before = tessera_stand_in_launches();
  for (DType to : kDTypes) {
    for (DType from : kDTypes) {
      Buffer src(from, n), expected(to, n);
      src.fill_random(1).sprinkle(2);
      expected.fill_random(3).sprinkle(4);
      Buffer actual = expected;
      const OnDevice in(src, from, n), out(actual, to, n);
      const auto compare = [&] {
        out.back();
        actual.expect_same(expected);
      };
      reference.scaled_add(expected.data(), to, src.data(), from, 0.3f, n);
      device.scaled_add(out.data(), to, in.data(), from, 0.3f, n, kStream);
      compare();
      reference.scaled_add_stochastic(expected.data(), to, src.data(), from, 0.3f, n, random);
      device.scaled_add_stochastic(out.data(), to, in.data(), from, 0.3f, n, random, kStream);
      compare();
      reference.scaled_copy(expected.data(), to, src.data(), from, 0.3f, n);
      device.scaled_copy(out.data(), to, in.data(), from, 0.3f, n, kStream);
      compare();
      reference.scaled_copy_stochastic(expected.data(), to, src.data(), from, 0.7f, n, random);
      device.scaled_copy_stochastic(out.data(), to, in.data(), from, 0.7f, n, random, kStream);
      compare();
    }
  }
  EXPECT_EQ(tessera_stand_in_launches() - before, 4 * 9);
}

TEST(StandInKernels, SplitAndJoin) {
  kernels::testing::expect_split_and_join<OnDevice>(device, kStream, 257);
}

TEST(StandInKernels, SumsOfBlocks) {
  for (int64_t n : {int64_t{0}, int64_t{1}, kSumBlock, 2 * kSumBlock + 3}) {
    for (DType dtype : kDTypes) {
      Buffer src(dtype, n);
      src.fill_random(1);
      const OnDevice in(src, dtype, n);
      const at::TensorOptions doubles(at::Device(at::kPrivateUse1));
      const at::Tensor lanes = at::zeros({sum_blocks(n) * kSumLanes}, doubles.dtype(at::kDouble));
      const at::Tensor sums = at::zeros({sum_blocks(n)}, doubles.dtype(at::kDouble));
      device.sum_of_squares(in.data(), dtype, n, static_cast<double*>(lanes.data_ptr()),
                            static_cast<double*>(sums.data_ptr()), kStream);
      const at::Tensor actual = sums.cpu();
      for (int64_t b = 0; b < sum_blocks(n); ++b) {
        const char* block = static_cast<const char*>(src.data()) + b * kSumBlock * size_of(dtype);
        const double expected = reference.sum_of_squares(block, dtype, std::min(kSumBlock, n - b * kSumBlock));
        EXPECT_EQ(actual[b].item<double>(), expected);
      }
    }
  }
}

TEST(StandInKernels, WhatADeviceWouldRefuse) {
  const at::Tensor t = at::ones({8}, at::kPrivateUse1);
  auto* p = static_cast<float*>(t.data_ptr());
  float host[2] = {};
  const auto copy = [&](void* dst, void* stream) {
    return error_of([&] { device.scaled_copy(dst, DType::F32, p, DType::F32, 1, 2, stream); });
  };
  EXPECT_EQ(copy(p + 4, kStream), "");
  EXPECT_HAS(copy(p + 4, nullptr), "scaled_copy: not the stream");
  EXPECT_HAS(copy(host, kStream), "a host pointer");
  EXPECT_HAS(copy(reinterpret_cast<char*>(p) + 2, kStream), "not aligned");
  EXPECT_HAS(copy(at::ones({2}, at::Device(at::kPrivateUse1, 1)).data_ptr(), kStream), "another device");
  {
    const c10::DeviceGuard guard(at::Device(at::kPrivateUse1, 1));
    EXPECT_HAS(copy(p + 4, kStream), "not the stream");
  }
  const int64_t before = tessera_stand_in_launches();
  tessera_stand_in_fail_next_launch();
  EXPECT_HAS(copy(p + 4, kStream), "the launch failed");
  EXPECT_EQ(tessera_stand_in_launches(), before);
  EXPECT_EQ(copy(p + 4, kStream), "");
  EXPECT_EQ(tessera_stand_in_launches(), before + 1);
  EXPECT_EQ(tessera_stand_in_launches_of("nothing"), -1);
  EXPECT_EQ(device.version, kDeviceTableVersion);
  EXPECT_EQ(device.why_unusable(), "");
}

}  // namespace
}  // namespace tessera::stand_in
