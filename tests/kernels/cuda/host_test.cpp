// What the kernels' host code does with errors, and that accesses are checked where the kernels are C++ for the host.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "tessera/kernels/cuda/cuda.h"

namespace tessera::kernels {
namespace {

struct CudaOnHost : ::testing::Test {
  void TearDown() override {
    cuda_on_host::next_error = cudaSuccess;
    cuda_on_host::capture = cudaStreamCaptureStatusNone;
  }

  void split(int64_t n) { cuda::split(weight.data(), residual.data(), src.data(), n, nullptr); }
  // The error of `call`; empty where there is none.
  template <class F>
  static std::string message_of(const F& call) {
    try {
      call();
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "";
  }

  const int64_t n = 100;
  std::vector<uint16_t> weight = std::vector<uint16_t>(n), residual = weight;
  std::vector<float> src = std::vector<float>(n, 1.5f);
};

TEST_F(CudaOnHost, ErrorsOfTheRuntimeAreThrown) {
  EXPECT_EQ(cuda::why_unusable(), "");
  cuda_on_host::next_error = cudaErrorInvalidValue;
  EXPECT_EQ(message_of([&] { split(n); }), "[kernels.cuda] a kernel was not launched: invalid argument");
  const auto copy = [&] { cuda::scaled_copy(weight.data(), DType::BF16, residual.data(), DType::BF16, 1, n, nullptr); };
  EXPECT_EQ(message_of(copy), "[kernels.cuda] a copy was not started: invalid argument");
  EXPECT_EQ(message_of([&] { split(0); }), "");
  EXPECT_EQ(weight[0], 0);
}

TEST_F(CudaOnHost, SaysWhatIsMissing) {
  using cuda_on_host::card, cuda_on_host::driver;
  const auto why = [](int of_driver, int of_card) {
    driver = of_driver;
    card = of_card;
    return cuda::why_unusable();
  };
  EXPECT_EQ(why(0, 90), "CUDA has no device: there is no driver (libcuda.so.1); install NVIDIA's");
  EXPECT_EQ(why(12040, 90),
            "CUDA has no device: the driver serves CUDA 12.4 and these kernels need 13.0; update the driver, or build "
            "Tessera with a toolkit that is no newer than it");
  EXPECT_EQ(why(13000, 70),
            "the card is of architecture 70, and these kernels were built for 80 and later; build Tessera with "
            "CMAKE_CUDA_ARCHITECTURES=70 and a toolkit of CUDA 12, the last one that knows it");
  EXPECT_EQ(why(13000, 75),
            "the card is of architecture 75, and these kernels were built for 80 and later; build Tessera with "
            "CMAKE_CUDA_ARCHITECTURES=75");
  for (const int usable : {80, 86, 100})
    EXPECT_EQ(why(13010, usable), "");
}

TEST_F(CudaOnHost, SaysWhatIsCaptured) {
  int some = 0;
  for (const auto status :
       {cudaStreamCaptureStatusActive, cudaStreamCaptureStatusInvalidated, cudaStreamCaptureStatusNone}) {
    cuda_on_host::capture = status;
    EXPECT_EQ(cuda::is_captured(&some), status != cudaStreamCaptureStatusNone);
    EXPECT_FALSE(cuda::is_captured(nullptr));
  }
}

TEST_F(CudaOnHost, OneLaunchForManySegments) {
  std::vector<UpdateSegment<LionRule>> segments;
  for (int64_t i = 0; i + 4 <= n; i += 4) {
    UpdateRange range;
    range.n = 4;
    range.master = src.data() + i;
    range.grad = weight.data() + i;
    range.grad_dtype = DType::BF16;
    range.state0 = residual.data() + i;
    range.state_dtype = DType::BF16;
    range.random.first = static_cast<uint64_t>(17 * i);
    segments.push_back({{1e-4 * static_cast<double>(1 + i % 3), 0.9, 0.99, 0}, range, 1});
  }
  const int64_t before = cuda_on_host::launches;
  cuda::update(segments.data(), static_cast<int64_t>(segments.size()), nullptr);
  EXPECT_EQ(cuda_on_host::launches, before + 1);
  std::vector<double> sums(segments.size());
  std::vector<SumSegment> squares;
  for (size_t i = 0; i < sums.size(); ++i)
    squares.push_back({segments[i].range.master, DType::F32, 4, &sums[i]});
  cuda::sum_of_squares(squares.data(), static_cast<int64_t>(squares.size()), nullptr);
  EXPECT_EQ(cuda_on_host::launches, before + 2);
}

#ifdef __SANITIZE_ADDRESS__
TEST_F(CudaOnHost, AccessesAreChecked) {
  split(n);
  EXPECT_EQ(weight[n - 1], 0x3fc0);
  EXPECT_DEATH(split(n + 1), "heap-buffer-overflow");
  EXPECT_DEATH(cuda::split(reinterpret_cast<char*>(weight.data()) + 1, residual.data(), src.data(), n - 1, nullptr),
               "misaligned address");
}
#endif

}  // namespace
}  // namespace tessera::kernels
