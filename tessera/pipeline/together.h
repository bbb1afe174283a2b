// Several engines that step as one: one norm of all to clip by, one decision to skip.
#pragma once

#include <optional>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::pipeline {

// What is asked of an engine of this process, whichever front end it belongs to.
class Stepping {
 public:
  virtual ~Stepping() = default;

  // The engine itself, by which a second mention of it is found.
  virtual const void* engine() const = 0;
  virtual bool at_boundary() = 0;
  // Throws what keeps this rank from the step. Local.
  virtual void check(bool at_boundary) = 0;
  // check() was made of all engines, and this rank goes on: faults that it has found, in any engine, are what the exchanges of
  // and the step announce to the engine's other ranks.
  virtual void checked() {}
  // This rank's part of the square of the norm, or the whole square. Collective over the engine's ranks.
  virtual double square(bool whole) = 0;
  // Steps; true when weights were updated.
  virtual bool step(std::optional<double> norm) = 0;
};

struct Stepped {
  std::optional<double> norm = {};  // of all engines; unset between boundaries
  bool applied = false;             // the last engine's weights were updated
};

// `engines`: those of this process, each once; with `everyone` there may be none. `everyone`: all ranks that hold any of the engines,
// exchanging on `device`; null: every rank of one engine holds them all. With it UsageError, on every rank and with nothing stepped, where
// only some engines are at an accumulation boundary or a rank cannot step (which gets its own error); without it engines' own
// exchanges say the latter. What an engine's step() throws is thrown when all have stepped, but for a lost peer. Collective.
Stepped step_together(const std::vector<Stepping*>& engines, comm::Group* everyone, at::Device device = at::kCPU);

}  // namespace tessera::pipeline
