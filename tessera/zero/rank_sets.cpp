#include "tessera/zero/rank_sets.h"

namespace tessera::zero {

RankSets::RankSets(const comm::Mesh& mesh, const std::vector<ParamSpec>& params, bool partitions) {
  for (const comm::Axis axis : comm::kAxes)
    if (mesh.size(axis) > 1) several_ = several_.with(axis);
  sets_.emplace(comm::Axes(), Set{Ranks(mesh), nullptr});
  for (const ParamSpec& p : params)
    if (!has(p)) sets_.emplace(differs(p), Set{Ranks(mesh, differs(p)), nullptr});
  for (auto& [axes, set] : sets_) {
    for (const comm::GroupPtr& group : {set.ranks.shard, set.ranks.replicate, set.ranks.model})
      if (group->size() > 1) mesh_groups_.push_back(group);
    if (!params.empty()) set.ranks.device = params.front().tensor.device();
    set.ranks = set.ranks.siblings();
    const bool gathers = partitions && set.ranks.shard->size() > 1;
    set.gathers = gathers ? set.ranks.shard->sibling(set.ranks.device) : set.ranks.shard;
  }
}

std::vector<const Ranks*> RankSets::each() const {
  std::vector<const Ranks*> ranks;
  for (const auto& [axes, set] : sets_)
    ranks.push_back(&set.ranks);
  return ranks;
}

// Ranks along dp_shard and sp are numbered together, sp fastest.
int RankSets::writer_of(const ParamSpec& param, int rank) const {
  const Ranks &everywhere = all().ranks, &own = of(param).ranks;
  const int shard = rank % everywhere.shard->size(), many = own.shard->size();
  const bool along_sp = differs(param).has(comm::Axis::Sp);
  const int place = along_sp ? shard / (everywhere.shard->size() / many) : shard % many;
  return (own.replicate->size() > 1 ? rank / everywhere.shard->size() : 0) * many + place;
}

void RankSets::abort(int informed, const std::string& why) const {
  if (informed == all().ranks.all()) return;
  for (const comm::GroupPtr& group : mesh_groups_)
    group->abort(why);
}

}  // namespace tessera::zero
