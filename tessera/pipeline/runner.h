// Batches of a stage, which end alike on all stages: with the loss, or with the error of one of them.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/pipeline/run.h"
#include "tessera/pipeline/ties.h"

namespace tessera::pipeline {

class Runner {
 public:
  // `beside`: groups in which the ranks of this stage wait for each other. Messages come to `device`.
  Runner(Ranks ranks, std::shared_ptr<Ties> ties, int chunks, at::Device device, std::vector<comm::GroupPtr> beside);

  struct Result {
    std::optional<double>
        loss;           // the mean over micro-batches and ranks of the last stage; none where these compute none
    int most_live = 0;  // see Run
    int64_t most_under_way = 0;
  };
  // What this stage does of a batch. An error of one rank is one of all: there it is thrown as it is, elsewhere as StageFailed
  // with its text, or as DistBackendError where ranks were lost. Collective over all ranks of all stages.
  Result run(Stage& stage, const Table& table, const Shape& shape, bool trains);

  // A part of a batch beside run() that stages do together: where this rank loses another one in it, it announces that to all.
  template <class F>
  auto guarded(const Stage& stage, const F& body) {
    try {
      return body();
    } catch (...) {
      const Failure failure = stage.explain(std::current_exception());
      if (failure.lost) announce(failure);
      throw;
    }
  }
  // Everybody who may wait for this rank, now or later, gets this in place of what they wait for. Local.
  void announce(const Failure& failure);

  const Ranks& ranks() const { return ranks_; }
  Ties& ties() { return *ties_; }

 private:
  double mean_of(const Tensors& losses) const;
  [[noreturn]] void end_failed(const std::exception_ptr& problem, const Failure& failure) const;

  const Ranks ranks_;
  const std::shared_ptr<Ties> ties_;
  Wires wires_;
  const std::vector<comm::GroupPtr> beside_;
};

}  // namespace tessera::pipeline
