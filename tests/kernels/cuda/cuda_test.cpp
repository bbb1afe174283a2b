// The CUDA kernels, as the library's table has them, give the bits of the reference. Built twice: with CUDA's runtime,
// skipped where no device can be used, and with that of host/, where the kernels are C++ for the host.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "tessera/kernels/cuda/cuda.h"
#include "tessera/kernels/table.h"
#include "tests/kernels/forms.h"
#include "tests/kernels/kernel_data.h"

namespace tessera::kernels {
namespace {

using testing::Buffer;
using testing::Form;
using testing::forms;
using testing::kDTypes;
using testing::put;

const DeviceTable& cuda_table() {
  return *tessera_device_table();
}

class Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string why = cuda_table().why_unusable();
    if (!why.empty()) GTEST_SKIP() << why;
  }
};

// A host buffer's copy on the device, for as long as this lives; `back` brings it into the buffer.
class OnDevice {
 public:
  OnDevice(Buffer& host, DType dtype, int64_t n) : OnDevice(host.data(), static_cast<size_t>(n) * size_of(dtype)) {}
  explicit OnDevice(std::vector<double>& host) : OnDevice(host.data(), host.size() * sizeof(double)) {}
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { cudaFree(data_); }

  void* data() const { return data_; }
  double* doubles() const { return static_cast<double*>(data_); }
  void back() const {
    if (bytes_ == 0) return;
    EXPECT_EQ(cudaMemcpy(host_, data_, bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
  }

 private:
  OnDevice(void* host, size_t bytes) : host_(host), bytes_(bytes) {
    if (bytes_ == 0) return;
    EXPECT_EQ(cudaMalloc(&data_, bytes_), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, host_, bytes_, cudaMemcpyHostToDevice), cudaSuccess);
  }

  void* host_;
  size_t bytes_;
  void* data_ = nullptr;
};

const int64_t kSizes[] = {0, 1, 31, 257, 4099};

struct Case {
  const char* name;
  std::function<void(const UpdateRange&)> reference, device;
};

template <class Rule>
Case make_case(const char* name, const Rule& rule, void (*Table::*entry)(const Rule&, const UpdateRange&, float),
               void (*DeviceTable::*on_device)(const Rule&, const UpdateRange&, float, void*)) {
  return {name, [=](const UpdateRange& r) { (reference_table().*entry)(rule, r, -0.37f); },
          [=](const UpdateRange& r) { (cuda_table().*on_device)(rule, r, -0.37f, nullptr); }};
}

std::vector<Case> cases() {
  AdamRule adamw{1e-3, 0.9, 0.999, 1e-8, 0.1}, l2{1e-3, 0.3, 0.95, 1e-6, 0.1, false};
  adamw.bias1 = 1 - 0.9;
  adamw.sqrt_bias2 = std::sqrt(1 - 0.999);
  return {make_case("adamw", adamw, &Table::adam, &DeviceTable::adam),
          make_case("adam with l2", l2, &Table::adam, &DeviceTable::adam),
          make_case("sgd", SgdRule{0.1, 0, 0, 0.01}, &Table::sgd, &DeviceTable::sgd),
          make_case("momentum", SgdRule{0.1, 0.9, 0.1, 0.01}, &Table::sgd, &DeviceTable::sgd),
          make_case("nesterov", SgdRule{0.1, 0.9, 0, 0, true, false}, &Table::sgd, &DeviceTable::sgd),
          make_case("lion", LionRule{1e-4, 0.9, 0.99, 0.1}, &Table::lion, &DeviceTable::lion),
          make_case("adagrad", AdagradRule{1e-2, 1e-10, 0.01}, &Table::adagrad, &DeviceTable::adagrad)};
}

TEST_F(Cuda, UpdatesGiveTheBitsOfTheReference) {
  for (const Case& rule : cases()) {
    for (const Form& form : forms()) {
      for (DType grad_dtype : kDTypes) {
        for (int64_t n : kSizes) {
          SCOPED_TRACE(std::string(rule.name) + ", " + form.name() + ", n " + std::to_string(n));
          Buffer master(DType::F32, n), weight(form.master.weight_dtype, n), residual(DType::BF16, n),
              state0(form.state_dtype, n), state1(form.state_dtype, n), grad(grad_dtype, n);
          master.fill_random(1).sprinkle(2);
          weight.fill_random(3).sprinkle(4);
          state0.fill_random(5, true).sprinkle(6);
          state1.fill_random(7, true).sprinkle(8);
          grad.fill_random(9).sprinkle(10);
          if (form.master.residual) reference_table().split(weight.data(), residual.data(), master.floats(), n);
          for (int64_t i = 0; form.master.adopts && i < n; ++i)  // every third was written to
            if (i % 3 != 0) put(weight.data(), form.master.weight_dtype, i, master.at(i));
          Buffer* buffers[] = {&master, &weight, &residual, &state0, &state1};
          std::vector<Buffer> actual;
          for (const Buffer* buffer : buffers)
            actual.push_back(*buffer);
          const OnDevice on_device[] = {{actual[0], DType::F32, n},
                                        {actual[1], form.master.weight_dtype, n},
                                        {actual[2], DType::BF16, n},
                                        {actual[3], form.state_dtype, n},
                                        {actual[4], form.state_dtype, n}};
          const OnDevice device_grad(grad, grad_dtype, n);
          const auto range = [&](auto at, const void* grads) {
            UpdateRange r;
            r.n = n;
            if (form.master.master) r.master = static_cast<float*>(at(0));
            if (form.master.weight) r.weight = at(1);
            if (form.master.residual) r.residual = at(2);
            r.weight_dtype = form.master.weight_dtype;
            r.adopts = form.master.adopts;
            r.state0 = at(3);
            r.state1 = at(4);
            r.state_dtype = form.state_dtype;
            r.grad = grads;
            r.grad_dtype = grad_dtype;
            r.rounding = form.rounding;
            r.random = {5, 6, (uint64_t{1} << 34) - static_cast<uint64_t>(n / 2)};
            return r;
          };
          rule.reference(range([&](int k) { return buffers[k]->data(); }, grad.data()));
          rule.device(range([&](int k) { return on_device[k].data(); }, device_grad.data()));
          for (int k = 0; k < 5; ++k) {
            on_device[k].back();
            actual[k].expect_same(*buffers[k]);
          }
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_F(Cuda, ElementwiseGivesTheBitsOfTheReference) {
  const RandomKey random{1, 2, (uint64_t{1} << 34) - 100};
  for (DType to : kDTypes) {
    for (DType from : kDTypes) {
      for (int64_t n : kSizes) {
        for (float scale : {1.0f, 0.3f}) {
          Buffer src(from, n), expected(to, n);
          src.fill_random(1).sprinkle(2);
          expected.fill_random(3).sprinkle(4);
          Buffer actual = expected;
          const OnDevice in(src, from, n), out(actual, to, n);
          reference_table().scaled_add(expected.data(), to, src.data(), from, scale, n);
          cuda_table().scaled_add(out.data(), to, in.data(), from, scale, n, nullptr);
          out.back();
          actual.expect_same(expected);
          reference_table().scaled_add_stochastic(expected.data(), to, src.data(), from, scale, n, random);
          cuda_table().scaled_add_stochastic(out.data(), to, in.data(), from, scale, n, random, nullptr);
          out.back();
          actual.expect_same(expected);
          reference_table().scaled_copy_stochastic(expected.data(), to, src.data(), from, scale, n, random);
          cuda_table().scaled_copy_stochastic(out.data(), to, in.data(), from, scale, n, random, nullptr);
          out.back();
          actual.expect_same(expected);
          reference_table().scaled_copy(expected.data(), to, src.data(), from, scale, n);
          cuda_table().scaled_copy(out.data(), to, in.data(), from, scale, n, nullptr);
          out.back();
          actual.expect_same(expected, to == from && scale == 1.0f);
          if (HasFailure()) return;
        }
      }
    }
  }
}

void expect_split_and_join(int64_t n) {
  const Table& reference = reference_table();
  Buffer whole(DType::F32, n), weight(DType::BF16, n), residual(DType::BF16, n), joined(DType::F32, n);
  whole.fill_random(1).sprinkle(2);
  Buffer weight2 = weight, residual2 = residual, joined2 = joined;
  reference.split(weight.data(), residual.data(), whole.floats(), n);
  reference.join(joined.floats(), weight.data(), residual.data(), n);
  const OnDevice in(whole, DType::F32, n), upper(weight2, DType::BF16, n), low(residual2, DType::BF16, n),
      out(joined2, DType::F32, n);
  cuda_table().split(upper.data(), low.data(), static_cast<const float*>(in.data()), n, nullptr);
  cuda_table().join(static_cast<float*>(out.data()), upper.data(), low.data(), n, nullptr);
  upper.back();
  low.back();
  out.back();
  weight2.expect_same(weight, true);
  residual2.expect_same(residual, true);
  joined2.expect_same(joined, true);
}

TEST_F(Cuda, SplitAndJoinGiveTheBitsOfTheReference) {
  for (int64_t n : kSizes)
    expect_split_and_join(n);
}

// Every sum's bits; two NaNs count as equal.
void expect_same_sums(const std::vector<double>& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t k = 0; k < actual.size(); ++k) {
    const bool same = std::bit_cast<uint64_t>(actual[k]) == std::bit_cast<uint64_t>(expected[k]);
    EXPECT_TRUE(same || (std::isnan(actual[k]) && std::isnan(expected[k])))
        << "sum " << k << ": " << actual[k] << " is not " << expected[k];
  }
}

// Of a buffer's blocks; the room for lanes and sums has a number behind it that nobody may touch.
void expect_sums_of_squares(Buffer& src, DType dtype, int64_t n) {
  constexpr double untouched = -7;
  std::vector<double> sums(sum_blocks(n) + 1, untouched), lanes(sum_blocks(n) * kSumLanes + 1, untouched), expected;
  for (int64_t at = 0; at < n; at += kSumBlock) {
    const char* block = static_cast<const char*>(src.data()) + at * static_cast<int64_t>(size_of(dtype));
    expected.push_back(reference_table().sum_of_squares(block, dtype, std::min(kSumBlock, n - at)));
  }
  expected.push_back(untouched);
  const OnDevice in(src, dtype, n), room(lanes), out(sums);
  cuda_table().sum_of_squares(in.data(), dtype, n, room.doubles(), out.doubles(), nullptr);
  room.back();
  out.back();
  expect_same_sums(sums, expected);
  EXPECT_EQ(lanes.back(), untouched);
}

TEST_F(Cuda, SumsOfSquaresGiveTheBitsOfTheReference) {
  constexpr float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> denormals = {1e-45f, -1e-39f, 6e-8f, -6.1e-5f, -0.0f};
  const std::vector<float> hard[] = {{-0.0f}, denormals, {1.0f, inf, -2.0f}, {-inf}, {1.0f, std::nanf("")}, {3e38f}};
  for (DType dtype : kDTypes) {
    for (int64_t n : {0, 1, 31, 32, 33, 224, 225, 256, 257, 4095, 4096, 4097, 3 * 4096 + 5}) {
      SCOPED_TRACE("type " + std::to_string(static_cast<int>(dtype)) + ", n " + std::to_string(n));
      Buffer src(dtype, n);
      expect_sums_of_squares(src.fill_random(1), dtype, n);
      expect_sums_of_squares(src.sprinkle(2), dtype, n);
      for (const std::vector<float>& values : hard)
        expect_sums_of_squares(src.fill(values), dtype, n);
      if (HasFailure()) return;
    }
  }
}

// One value that is not finite shows in its own block only.
TEST_F(Cuda, SumsOfSquaresAreOfTheirBlock) {
  const int64_t n = 3 * kSumBlock;
  for (int64_t at : {kSumBlock - 1, kSumBlock, 2 * kSumBlock - 1}) {
    Buffer src(DType::BF16, n);
    src.fill_random(1);
    testing::put(src.data(), DType::BF16, at, std::nanf(""));
    expect_sums_of_squares(src, DType::BF16, n);
  }
}

}  // namespace
}  // namespace tessera::kernels
