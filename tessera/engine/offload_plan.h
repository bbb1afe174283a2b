// OffloadPlan: which units live elsewhere, who updates them, and what that takes; made when an engine is built.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/offload/rates.h"
#include "tessera/optim/optimizer.h"
#include "tessera/shard/buffer.h"
#include "tessera/zero/options.h"
#include "tessera/zero/param_spec.h"
#include "tessera/zero/ranks.h"

namespace tessera::engine {

// Which of zero::Options are to be found out: `ratio`, `device_share`.
struct OffloadOptions {
  bool finds_ratio = false, finds_share = false;
  double reserve = 0.4;  // share of the device's memory that the states leave free
  std::string folder{};  // folder of the states on a disk; else empty
};

enum class UpdatedBy : uint8_t {
  Device,   // the device, where the unit's states stay
  Through,  // the device, through which the unit's states pass
  Host,
};

struct OffloadPlan {
  struct Row {
    std::string unit;
    int64_t elements;  // that this rank updates
    shard::Residence states;
    UpdatedBy by;
  };
  double ratio = 1, device_share = 0;   // as asked for, or found
  std::optional<offload::Rates> rates;  // rates of the slowest rank, where they were measured
  // Where rates were measured: how long an update takes, as the longest of the times of bus, host, memory, device and disk.
  double milliseconds = 0, bus = 0, host = 0, memory = 0, device = 0, disk = 0;
  bool in_backward = false, runs_on = false;  // when the update begins and ends
  // How long a step takes whose micro-batches take so many milliseconds each in the forward and the backward. Value error for
  // impossible numbers, state error where nothing was measured.
  double step(double forward, double backward, int micro_batches = 1) const;
  std::vector<Row> units;    // in the order of the update
  std::string text() const;  // a line
};

// How fast states move here, on the slowest rank. An IoError or OutOfMemoryError of any rank is one of all. Collective.
offload::Rates measured_rates(const OffloadOptions& asked, const zero::Options& options, const zero::Ranks& ranks);

// Finds what `asked` says and puts it into `options`, the same on all ranks. Value error for a ratio of a model on the CPU; an
// IoError or OutOfMemoryError of any rank is one of all. Collective.
std::optional<offload::Rates> settle_offload(const OffloadOptions& asked, zero::Options& options,
                                             const zero::Ranks& ranks, const std::vector<zero::ParamSpec>& params,
                                             int moments);

}  // namespace tessera::engine
