#include "tessera/nn/link.h"

#include <utility>

#include "tessera/base/error.h"

namespace tessera::nn {
namespace {

constexpr int kFirstTag = comm::kSiblingTags;  // no pipeline over the same parts has it
constexpr int kTags = 3;                       // tags of a link

pipeline::LinkRanks ranks_of(const Link& link, const comm::Parts& parts, const engine::Engine* engine, bool sends) {
  const int mine = sends ? link.source : link.target, count = static_cast<int>(parts.shapes.size());
  for (const auto& [end, part] : {std::pair("source", link.source), std::pair("target", link.target)})
    TESSERA_CHECK_VALUE(part >= 0 && part < count, "hybrid", "the ", end, " of the link is part ", part,
                        "; the parts are 0 to ", count - 1);
  TESSERA_CHECK_VALUE(link.source != link.target && parts.part == mine, "hybrid", "this rank is of part ", parts.part,
                      "; the ", sends ? "source" : "target", " of the link is part ", mine);
  if (engine != nullptr) {
    for (const comm::Axis axis : comm::kAxes)
      TESSERA_CHECK_VALUE(engine->mesh().size(axis) == parts.shapes[mine].size(axis), "hybrid", "rank ", parts.place(),
                          " of ", link.sides[sends ? 0 : 1], ": its engine has ", engine->mesh().size(axis),
                          " ranks along '", comm::axis_name(axis), "', its part ", parts.shapes[mine].size(axis));
  }
  return {.source = pipeline::Layout::of(parts.shapes.at(link.source)),
          .target = pipeline::Layout::of(parts.shapes.at(link.target)),
          .source_rank = parts.rank_of(link.source, 0),
          .target_rank = parts.rank_of(link.target, 0),
          .place = parts.place(),
          .rank = parts.everyone->rank(),
          .p2p = parts.p2p,
          .tag = kFirstTag + kTags * ((link.number * count + link.source) * count + link.target),
          .dims = {link.batch_dim, link.sequence_dim},
          .sides = link.sides};
}

}  // namespace

LinkSender::LinkSender(const Link& link, const comm::Parts& parts, Session& engine)
    : LinkSender(link, parts, &engine.core()) {}
LinkReceiver::LinkReceiver(const Link& link, const comm::Parts& parts, Session& engine)
    : LinkReceiver(link, parts, &engine.core()) {}

LinkSender::LinkSender(const Link& link, const comm::Parts& parts, engine::Engine* engine)
    : pipeline::LinkSender(ranks_of(link, parts, engine, true), pipeline::link_engine(engine)) {}

LinkReceiver::LinkReceiver(const Link& link, const comm::Parts& parts, engine::Engine* engine)
    : pipeline::LinkReceiver(ranks_of(link, parts, engine, false), pipeline::link_engine(engine)) {}

}  // namespace tessera::nn
