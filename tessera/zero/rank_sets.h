// RankSets: the ranks of every unit, by the axes along which its parameters differ, in groups of the engine's own: engines under
// one loss reach their collectives in orders that differ by rank.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tessera/zero/param_spec.h"
#include "tessera/zero/ranks.h"

namespace tessera::zero {

class RankSets {
 public:
  struct Set {
    Ranks ranks;
    comm::GroupPtr gathers;  // for what is not ordered with reductions
  };

  // `partitions`: parameters are partitioned, and gathers have groups of their own. Collective.
  RankSets(const comm::Mesh& mesh, const std::vector<ParamSpec>& params, bool partitions);

  const Set& all() const { return sets_.begin()->second; }  // of parameters that are the same everywhere
  const Set& of(const ParamSpec& param) const { return sets_.at(differs(param)); }
  bool has(const ParamSpec& param) const { return sets_.contains(differs(param)); }
  // The axes of several ranks along which the parameter differs.
  comm::Axes differs(const ParamSpec& param) const { return param.varies.only(several_); }
  // The ranks of all sets; those of all() first.
  std::vector<const Ranks*> each() const;
  // The number among the parameter's ranks of the rank that has the place of `rank` (as Ranks::rank() of all() counts) along their
  // axes.
  int writer_of(const ParamSpec& param, int rank) const;
  // Ends all groups that the ranks have in common, with the reason; where all were informed nothing happens. Ranks that take no
  // part in a gather make other collectives than those that do, and would wait there.
  void abort(int informed, const std::string& why) const;

 private:
  comm::Axes several_;                       // the axes that have several ranks
  std::map<comm::Axes, Set> sets_;           // by axes of these
  std::vector<comm::GroupPtr> mesh_groups_;  // the mesh's groups of several ranks, along which they lie
};

}  // namespace tessera::zero
