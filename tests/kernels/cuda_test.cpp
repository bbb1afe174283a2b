// The CUDA kernels give the bits of the reference. Linked twice: with CUDA's runtime, skipped where no device can be
// used, and with that of ptx/, whose device is a machine for their PTX.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

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

class Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string why = cuda::why_unusable();
    if (!why.empty()) GTEST_SKIP() << why;
  }
};

// A host buffer's copy on the device, for as long as this lives; `back` brings it into the buffer.
class OnDevice {
 public:
  OnDevice(Buffer& host, DType dtype, int64_t n) : host_(host), bytes_(static_cast<size_t>(n) * size_of(dtype)) {
    if (bytes_ == 0) return;
    EXPECT_EQ(cudaMalloc(&data_, bytes_), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, host.data(), bytes_, cudaMemcpyHostToDevice), cudaSuccess);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { cudaFree(data_); }

  void* data() const { return data_; }
  void back() const {
    if (bytes_ == 0) return;
    EXPECT_EQ(cudaMemcpy(host_.data(), data_, bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
  }

 private:
  Buffer& host_;
  size_t bytes_;
  void* data_ = nullptr;
};

const int64_t kSizes[] = {0, 1, 31, 257, 4099};

struct Case {
  const char* name;
  std::function<void(const UpdateRange&)> reference, device;
};

template <class Rule>
Case make_case(const char* name, const Rule& rule, void (*Table::*entry)(const Rule&, const UpdateRange&, float)) {
  return {name, [=](const UpdateRange& r) { (reference_table().*entry)(rule, r, -0.37f); },
          [=](const UpdateRange& r) { cuda::update(rule, r, -0.37f, nullptr); }};
}

std::vector<Case> cases() {
  AdamRule adamw{1e-3, 0.9, 0.999, 1e-8, 0.1}, l2{1e-3, 0.3, 0.95, 1e-6, 0.1, false};
  adamw.bias1 = 1 - 0.9;
  adamw.sqrt_bias2 = std::sqrt(1 - 0.999);
  return {make_case("adamw", adamw, &Table::adam),
          make_case("adam with l2", l2, &Table::adam),
          make_case("sgd", SgdRule{0.1, 0, 0, 0.01}, &Table::sgd),
          make_case("momentum", SgdRule{0.1, 0.9, 0.1, 0.01}, &Table::sgd),
          make_case("nesterov", SgdRule{0.1, 0.9, 0, 0, true, false}, &Table::sgd),
          make_case("lion", LionRule{1e-4, 0.9, 0.99, 0.1}, &Table::lion),
          make_case("adagrad", AdagradRule{1e-2, 1e-10, 0.01}, &Table::adagrad)};
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
          cuda::scaled_add(out.data(), to, in.data(), from, scale, n, nullptr);
          out.back();
          actual.expect_same(expected);
          reference_table().scaled_add_stochastic(expected.data(), to, src.data(), from, scale, n, random);
          cuda::scaled_add_stochastic(out.data(), to, in.data(), from, scale, n, random, nullptr);
          out.back();
          actual.expect_same(expected);
          reference_table().scaled_copy_stochastic(expected.data(), to, src.data(), from, scale, n, random);
          cuda::scaled_copy_stochastic(out.data(), to, in.data(), from, scale, n, random, nullptr);
          out.back();
          actual.expect_same(expected);
          reference_table().scaled_copy(expected.data(), to, src.data(), from, scale, n);
          cuda::scaled_copy(out.data(), to, in.data(), from, scale, n, nullptr);
          out.back();
          actual.expect_same(expected, to == from && scale == 1.0f);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_F(Cuda, SplitAndJoinGiveTheBitsOfTheReference) {
  for (int64_t n : kSizes) {
    Buffer whole(DType::F32, n), weight(DType::BF16, n), residual(DType::BF16, n), joined(DType::F32, n);
    whole.fill_random(1).sprinkle(2);
    Buffer weight2 = weight, residual2 = residual, joined2 = joined;
    reference_table().split(weight.data(), residual.data(), whole.floats(), n);
    reference_table().join(joined.floats(), weight.data(), residual.data(), n);
    const OnDevice in(whole, DType::F32, n), upper(weight2, DType::BF16, n), low(residual2, DType::BF16, n),
        out(joined2, DType::F32, n);
    cuda::split(upper.data(), low.data(), static_cast<const float*>(in.data()), n, nullptr);
    cuda::join(static_cast<float*>(out.data()), upper.data(), low.data(), n, nullptr);
    upper.back();
    low.back();
    out.back();
    weight2.expect_same(weight, true);
    residual2.expect_same(residual, true);
    joined2.expect_same(joined, true);
  }
}

}  // namespace
}  // namespace tessera::kernels
