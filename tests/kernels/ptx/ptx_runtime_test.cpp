// What the stand-in runtime refuses, through the kernels' own host code.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include "tessera/kernels/cuda/cuda.h"

namespace tessera::kernels {
namespace {

class PtxRuntime : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(cudaMalloc(&weight_, 2 * n_), cudaSuccess);
    ASSERT_EQ(cudaMalloc(&residual_, 2 * n_), cudaSuccess);
    ASSERT_EQ(cudaMalloc(&src_, 4 * n_), cudaSuccess);
  }
  void TearDown() override {
    cudaFree(weight_);
    cudaFree(residual_);
    cudaFree(src_);
    cudaGetLastError();
  }

  // The error of a split of n elements; empty where there is none.
  std::string split(void* weight, int64_t n) const {
    try {
      cuda::split(weight, residual_, static_cast<const float*>(src_), n, nullptr);
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "";
  }

  const int64_t n_ = 100;
  void *weight_ = nullptr, *residual_ = nullptr, *src_ = nullptr;
};

TEST_F(PtxRuntime, HasADevice) {
  EXPECT_EQ(cuda::why_unusable(), "");
}

TEST_F(PtxRuntime, KernelsStayInTheirMemory) {
  EXPECT_EQ(split(weight_, n_), "");
  const std::string one_more = split(weight_, n_ + 1);
  EXPECT_NE(one_more.find("outside of the memory that was allocated (thread 100 of block 0)"), std::string::npos)
      << one_more;
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);  // the launch that failed has read it
  EXPECT_EQ(split(weight_, n_), "");

  std::string on_host(2 * static_cast<size_t>(n_), ' ');
  EXPECT_NE(split(on_host.data(), n_), "");
  EXPECT_NE(split(static_cast<char*>(weight_) + 1, n_ - 1).find("not aligned to 2"), std::string::npos);
}

TEST_F(PtxRuntime, CopiesStayInTheirMemory) {
  std::string host(400, ' ');
  EXPECT_EQ(cudaMemcpy(src_, host.data(), 400, cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(host.data(), src_, 400, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(weight_, residual_, 200, cudaMemcpyDeviceToDevice), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(src_, host.data(), 401, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(host.data(), src_, 400, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(weight_, src_, 400, cudaMemcpyDeviceToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(host.data()), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST_F(PtxRuntime, LaunchesWhatIsRegisteredAndFits) {
  void* no_arguments = nullptr;
  EXPECT_EQ(cudaLaunchKernel(&no_arguments, dim3(1), dim3(1), &no_arguments, 0, nullptr),
            cudaErrorInvalidDeviceFunction);
  EXPECT_EQ(std::string(cudaGetErrorString(cudaGetLastError())), "a kernel that was not registered");
}

}  // namespace
}  // namespace tessera::kernels
