#include "tessera/offload/rates.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>

#include <algorithm>
#include <chrono>

#include "tessera/base/parallel.h"
#include "tessera/kernels/update.h"
#include "tessera/shard/side_stream.h"

namespace tessera::offload {

namespace {

constexpr int64_t kCopied = 1 << 25;   // bytes of a copy
constexpr int kCopies = 3;             // copies in a row
constexpr int64_t kUpdated = 1 << 23;  // elements: more than caches hold
constexpr int64_t kGrain = 1 << 15;    // elements of a thread, at least

// The best rate of two runs, the first of which meets memory and threads that are new. `bytes`: what a run moves.
template <class F>
double rate_of(double bytes, const F& run) {
  double best = 0;
  for (int i = 0; i < 2; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    run();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    best = std::max(best, bytes / std::max(took.count(), 1e-9));
  }
  return best;
}

at::Tensor bytes_on(c10::Device device, bool pin = false) {
  return at::empty({kCopied}, at::TensorOptions(at::kByte).device(device).pinned_memory(pin));
}

double rate_of_bus(const RateOptions& options) {
  const at::Tensor from = bytes_on(at::kCPU, options.pin_memory).zero_(), to = bytes_on(at::kCPU, options.pin_memory);
  const at::Tensor above = bytes_on(options.device), below = bytes_on(options.device).zero_();
  shard::SideStream up, down;
  return rate_of(kCopies * static_cast<double>(kCopied), [&] {
    std::array<std::shared_ptr<c10::Event>, 2> done;
    for (int i = 0; i < kCopies; ++i) {
      done[0] = up.run(options.device, [&] { above.copy_(from, /*non_blocking=*/options.pin_memory); });
      done[1] = down.run(options.device, [&] { to.copy_(below, /*non_blocking=*/options.pin_memory); });
    }
    for (const auto& event : done)
      event->synchronize();
  });
}

double rate_of_device(c10::Device device) {
  const at::Tensor from = bytes_on(device).zero_(), to = bytes_on(device);
  return rate_of(2 * kCopies * static_cast<double>(kCopied), [&] {
    for (int i = 0; i < kCopies; ++i)
      to.copy_(from);
    shard::mark(device)->synchronize();
  });
}

// The rate of Adam on a split master with moments of 32 bits: 26 bytes an element.
double rate_of_update() {
  constexpr int64_t kBytes = 2 + 2 * (2 + 2 + 4 + 4);
  const auto make = [](at::ScalarType dtype) { return at::zeros({kUpdated}, at::TensorOptions(dtype)); };
  const at::Tensor weight = make(at::kBFloat16), residual = make(at::kShort), grad = make(at::kBFloat16);
  const at::Tensor first = make(at::kFloat), second = make(at::kFloat);
  kernels::UpdateRange range;
  range.n = kUpdated;
  range.weight = weight.mutable_data_ptr();
  range.residual = residual.mutable_data_ptr();
  range.grad = grad.const_data_ptr();
  range.grad_dtype = kernels::DType::BF16;
  range.state0 = first.mutable_data_ptr();
  range.state1 = second.mutable_data_ptr();
  const kernels::AdamRule rule{1e-3, .9, .999, 1e-8, 0};
  return rate_of(static_cast<double>(kBytes * kUpdated), [&] {
    parallel_ranges(kUpdated, kGrain, 64,
                    [&](int64_t begin, int64_t end) { kernels::update(rule, kernels::part(range, begin, end), 1.0F); });
  });
}

double rate_of_disk(const RateOptions& options) {
  NvmeFile file(options.folder, 2, kCopied, options.make_queue);
  const Bytes space = file.reserve(kCopied);
  return rate_of(2 * static_cast<double>(kCopied), [&] {
    const std::shared_ptr<char> memory = file.memory_for(space);
    file.write(space, space, memory.get(), memory);
    file.flush();
    file.read(space, space).arrived();
  });
}

}  // namespace

Rates measure_rates(const RateOptions& options) {
  Rates rates;
  rates.host = rates.memory = rate_of_update();
  if (!options.device.is_cpu()) {
    rates.bus = rate_of_bus(options);
    rates.memory = std::max(rates.host, 2 * rates.bus);
    rates.device = rate_of_device(options.device);
  }
  if (!options.folder.empty()) rates.disk = rate_of_disk(options);
  return rates;
}

}  // namespace tessera::offload
