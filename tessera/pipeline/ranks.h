// The ranks of a pipeline, and what all of them agree on.
#pragma once

#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/comm/point_to_point.h"

namespace tessera::pipeline {

// The numbers of all ranks of `everyone`, equally many each, a row for each rank. `device`: where they are exchanged. Collective.
std::vector<std::vector<double>> rows_of(comm::Group& everyone, const std::vector<double>& own, comm::Label label,
                                         at::Device device = at::kCPU);
// The texts of all ranks, of any lengths. Collective.
std::vector<std::string> texts_of(comm::Group& everyone, const std::string& own, comm::Label label,
                                  at::Device device = at::kCPU);

// Ends a part of the work that ranks do each for themselves. `problem`: what this rank's error says; empty where it has
// none, and then StageFailed with what another rank's says, where that has one. Collective.
void agree(comm::Group& everyone, const std::string& problem, at::Device device = at::kCPU);

// Messages of a pipeline's own between ranks that may have had others over the same `way`: whatever became of an earlier one, a later one
// takes none of its messages and waits for none. Null where `way` is. Collective.
comm::PointToPointPtr own_messages(comm::Group& everyone, const comm::PointToPointPtr& way);

// Stages are runs of neighbours of equal size. The ranks of one stage are an engine, those of one place in their stages send
// each other what goes between stages.
struct Ranks {
  int stages = 1, size = 1;                             // of the pipeline, of each stage
  int rank = 0;                                         // this rank's number among all
  comm::GroupPtr everyone = {};                         // all ranks of all stages
  at::Device device = at::kCPU;                         // of what everyone exchanges
  comm::PointToPointPtr forwards = {}, backwards = {};  // of activations, of gradients; may be one; null with one stage
  std::vector<int> peers = {};                          // by stage: the rank that has this rank's place there

  int stage() const { return rank / size; }
  int place() const { return rank % size; }
  std::string name(int of) const;  // "stage 1 (rank 2)"
  std::string name() const { return name(rank); }

  // rows_of() and texts_of() everyone.
  std::vector<std::vector<double>> rows(const std::vector<double>& own, comm::Label label) const;
  std::vector<std::string> texts(const std::string& own, comm::Label label) const;
  // Returns when all that this rank has sent is taken.
  void flush() const;
};

}  // namespace tessera::pipeline
