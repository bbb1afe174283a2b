// The CUDA kernels, as the library's table has them, give the bits of the reference. Built twice: with CUDA's runtime,
// skipped where no device can be used, and with that of host/, where the kernels are C++ for the host.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>

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
const int64_t kLarge = 20011;  // several ranges where these are compiled for the host

// What one rule does to ranges, which get hyperparameters of their own by turns.
struct Case {
  const char* name;
  std::function<void(const std::vector<UpdateRange>&)> reference, device;
};

template <class Rule>
std::vector<UpdateSegment<Rule>> segments_of(const std::vector<Rule>& rules, const std::vector<UpdateRange>& ranges) {
  std::vector<UpdateSegment<Rule>> segments;
  for (const UpdateRange& range : ranges) {
    const size_t i = segments.size();
    segments.push_back({rules[i % rules.size()], range, i % 3 == 0 ? -0.37f : 0.11f});
    segments.back().range.random.step += i % 2;
  }
  return segments;
}

template <class Rule>
Case make_case(const char* name, const std::vector<Rule>& rules,
               void (*Table::*entry)(const Rule&, const UpdateRange&, float),
               void (*DeviceTable::*on_device)(const UpdateSegment<Rule>*, int64_t, void*)) {
  return {name,
          [=](const std::vector<UpdateRange>& ranges) {
            for (const auto& segment : segments_of(rules, ranges))
              (reference_table().*entry)(segment.rule, segment.range, segment.grad_scale);
          },
          [=](const std::vector<UpdateRange>& ranges) {
            const auto segments = segments_of(rules, ranges);
            (cuda_table().*on_device)(segments.data(), static_cast<int64_t>(segments.size()), nullptr);
          }};
}

AdamRule adamw() {
  AdamRule rule{1e-3, 0.9, 0.999, 1e-8, 0.1};
  rule.bias1 = 1 - 0.9;
  rule.sqrt_bias2 = std::sqrt(1 - 0.999);
  return rule;
}

std::vector<Case> cases() {
  const std::vector<AdamRule> adams{adamw(), {1e-3, 0.3, 0.95, 1e-6, 0.1, false}};
  const std::vector<SgdRule> sgds{
      {0.1, 0, 0, 0.01}, {0.1, 0.9, 0.1, 0.01}, {0.1, 0.9, 0, 0, true, false}, {0.1, 0.9, 0.1, 0, false, true}};
  return {make_case<AdamRule>("adam", adams, &Table::adam, &DeviceTable::adam),
          make_case<SgdRule>("sgd", sgds, &Table::sgd, &DeviceTable::sgd),
          make_case<LionRule>("lion", {{1e-4, 0.9, 0.99, 0.1}}, &Table::lion, &DeviceTable::lion),
          make_case<AdagradRule>("adagrad", {{1e-2, 1e-10, 0.01}}, &Table::adagrad, &DeviceTable::adagrad)};
}

// The streams of an update twice: for the reference, and on the device.
class Streams {
 public:
  Streams(const Form& form, DType grad_dtype, int64_t n)
      : form_(form),
        grad_dtype_(grad_dtype),
        n_(n),
        grad_(grad_dtype, n),
        expected_{{DType::F32, n},
                  {form.master.weight_dtype, n},
                  {DType::BF16, n},
                  {form.state_dtype, n},
                  {form.state_dtype, n}} {
    Buffer &master = expected_[0], &weight = expected_[1];
    master.fill_random(1).sprinkle(2);
    weight.fill_random(3).sprinkle(4);
    expected_[3].fill_random(5, true).sprinkle(6);
    expected_[4].fill_random(7, true).sprinkle(8);
    grad_.fill_random(9).sprinkle(10);
    if (form.master.residual) reference_table().split(weight.data(), expected_[2].data(), master.floats(), n);
    for (int64_t i = 0; form.master.adopts && i < n; ++i)  // every third was written to
      if (i % 3 != 0) put(weight.data(), form.master.weight_dtype, i, master.at(i));
    actual_ = expected_;
    for (size_t k = 0; k < expected_.size(); ++k)
      device_.push_back(std::make_unique<OnDevice>(actual_[k], dtype(k), n));
    device_grad_ = std::make_unique<OnDevice>(grad_, grad_dtype, n);
  }

  UpdateRange reference() {
    return range([&](size_t k) { return expected_[k].data(); }, grad_.data());
  }
  UpdateRange on_device() const {
    return range([&](size_t k) { return device_[k]->data(); }, device_grad_->data());
  }
  void expect_same() {
    for (size_t k = 0; k < expected_.size(); ++k) {
      device_[k]->back();
      actual_[k].expect_same(expected_[k]);
    }
  }

 private:
  DType dtype(size_t k) const {
    const DType dtypes[] = {DType::F32, form_.master.weight_dtype, DType::BF16, form_.state_dtype, form_.state_dtype};
    return dtypes[k];
  }
  template <class At>
  UpdateRange range(const At& at, const void* grads) const {
    UpdateRange r;
    r.n = n_;
    if (form_.master.master) r.master = static_cast<float*>(at(0));
    if (form_.master.weight) r.weight = at(1);
    if (form_.master.residual) r.residual = at(2);
    r.weight_dtype = form_.master.weight_dtype;
    r.adopts = form_.master.adopts;
    r.state0 = at(3);
    r.state1 = at(4);
    r.state_dtype = form_.state_dtype;
    r.grad = grads;
    r.grad_dtype = grad_dtype_;
    r.rounding = form_.rounding;
    r.random = {5, 6, (uint64_t{1} << 34) - static_cast<uint64_t>(n_ / 2)};
    return r;
  }

  Form form_;
  DType grad_dtype_;
  int64_t n_;
  Buffer grad_;
  std::vector<Buffer> expected_, actual_;
  std::vector<std::unique_ptr<OnDevice>> device_;
  std::unique_ptr<OnDevice> device_grad_;
};

// The parts of a range between cuts.
std::vector<UpdateRange> parts(const UpdateRange& range, const std::vector<int64_t>& cuts) {
  std::vector<UpdateRange> list;
  for (size_t i = 0; i + 1 < cuts.size(); ++i)
    list.push_back(part(range, cuts[i], cuts[i + 1]));
  return list;
}

TEST_F(Cuda, UpdatesGiveTheBitsOfTheReference) {
  for (const Case& rule : cases()) {
    for (const Form& form : forms()) {
      for (DType grad_dtype : kDTypes) {
        for (int64_t n : kSizes) {
          SCOPED_TRACE(std::string(rule.name) + ", " + form.name() + ", n " + std::to_string(n));
          Streams streams(form, grad_dtype, n);
          const std::vector<int64_t> cuts{0, n / 7, n / 7, n / 2, n / 2 + n / 16, n};
          rule.reference(parts(streams.reference(), cuts));
          rule.device(parts(streams.on_device(), cuts));
          streams.expect_same();
          if (HasFailure()) return;
        }
      }
    }
  }
}

// More of them than one launch has room for, and of kinds that cannot share one.
TEST_F(Cuda, AnyNumberOfSegments) {
  const int64_t n = 3000;
  std::vector<AdamRule> rules(11, adamw());
  for (size_t i = 0; i < rules.size(); ++i)
    rules[i].lr *= 1 + static_cast<double>(i);
  const Case adam = make_case<AdamRule>("adam", rules, &Table::adam, &DeviceTable::adam);
  std::vector<int64_t> cuts;
  for (int64_t at = 0; at < n; at += 1 + at % 61)
    cuts.push_back(at);
  const std::vector<Form> all = forms();
  std::vector<Streams> streams;
  std::vector<UpdateRange> expected, actual;
  for (const Form& form : {all.front(), all.back(), all[all.size() / 2]}) {
    Streams& one = streams.emplace_back(form, DType::BF16, n);
    for (const UpdateRange& range : parts(one.reference(), cuts))
      expected.push_back(range);
    for (const UpdateRange& range : parts(one.on_device(), cuts))
      actual.push_back(range);
  }
  adam.reference(expected);
  adam.device(actual);
  for (Streams& one : streams)
    one.expect_same();
}

// A gradient that begins at another element of 16 bytes than the other streams.
TEST_F(Cuda, StreamsThatAreNotAlignedAlike) {
  for (const Form& form : forms()) {
    const int64_t n = 600;
    SCOPED_TRACE(form.name());
    Streams streams(form, DType::BF16, n);
    const auto shifted = [&](UpdateRange range) {
      const void* grad = range.grad;
      range = part(range, 8, n - 8);
      range.grad = static_cast<const uint16_t*>(grad) + 3;
      return std::vector<UpdateRange>{range};
    };
    cases()[0].reference(shifted(streams.reference()));
    cases()[0].device(shifted(streams.on_device()));
    streams.expect_same();
  }
}

// The columns of a matrix: runs of numbers that are `stride` apart.
TEST_F(Cuda, NumbersInRuns) {
  Form form{testing::kMasterForms[4], DType::BF16, Rounding::Stochastic};
  ASSERT_STREQ(form.master.name, "bf16_alone");
  for (int64_t run : {1, 3, 8, 21, 64, 997}) {
    for (int64_t stride : {run, run + 5, int64_t{1} << 33}) {
      const int64_t n = run == 64 ? kLarge : 1000;
      SCOPED_TRACE("run " + std::to_string(run) + ", stride " + std::to_string(stride));
      Streams streams(form, DType::BF16, n);
      for (int64_t begin = 0; begin < n; begin += run) {
        UpdateRange row = part(streams.reference(), begin, std::min(n, begin + run));
        row.random.first = streams.reference().random.first + static_cast<uint64_t>(begin / run * stride);
        reference_table().adam(adamw(), row, 0.5f);
      }
      const UpdateSegment<AdamRule> segment{adamw(), streams.on_device(), 0.5f, run, stride};
      cuda_table().adam(&segment, 1, nullptr);
      streams.expect_same();
      if (HasFailure()) return;
    }
  }
}

TEST_F(Cuda, ElementwiseGivesTheBitsOfTheReference) {
  const RandomKey random{1, 2, (uint64_t{1} << 34) - 100};
  for (DType to : kDTypes) {
    for (DType from : kDTypes) {
      for (int64_t n : {int64_t{0}, int64_t{1}, int64_t{31}, int64_t{257}, kLarge}) {
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
  expect_split_and_join(kLarge);
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

// Of a buffer's blocks, of all of it and of two parts, of which the second may begin anywhere. The room for sums has a number
// behind it that nobody may touch.
void expect_sums_of_squares(Buffer& src, DType dtype, int64_t n) {
  constexpr double untouched = -7;
  const OnDevice in(src, dtype, n);
  const auto at = [&](void* data, int64_t i) {
    return static_cast<char*>(data) + i * static_cast<int64_t>(size_of(dtype));
  };
  std::vector<double> expected;
  std::vector<SumSegment> segments;
  for (const auto& [begin, end] : {std::pair{int64_t{0}, n}, {int64_t{0}, n / 3}, {n / 3, n}}) {
    segments.push_back({at(in.data(), begin), dtype, end - begin, nullptr});
    for (int64_t block = begin; block < end; block += kSumBlock)
      expected.push_back(
          reference_table().sum_of_squares(at(src.data(), block), dtype, std::min(kSumBlock, end - block)));
  }
  expected.push_back(untouched);
  std::vector<double> sums(expected.size(), untouched);
  const OnDevice out(sums);
  double* to = out.doubles();
  for (SumSegment& segment : segments)
    to = (segment.sums = to) + sum_blocks(segment.n);
  cuda_table().sum_of_squares(segments.data(), static_cast<int64_t>(segments.size()), nullptr);
  out.back();
  expect_same_sums(sums, expected);
}

TEST_F(Cuda, SumsOfSquaresGiveTheBitsOfTheReference) {
  constexpr float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> denormals = {1e-45f, -1e-39f, 6e-8f, -6.1e-5f, -0.0f};
  const std::vector<float> hard[] = {{-0.0f}, denormals, {1.0f, inf, -2.0f}, {-inf}, {1.0f, std::nanf("")}, {3e38f}};
  for (DType dtype : kDTypes) {
    for (int64_t n : {0, 1, 31, 32, 33, 224, 225, 256, 257, 4095, 4096, 4097, 3 * 4096 + 5, 20 * 4096 + 9}) {
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
