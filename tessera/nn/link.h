// A differentiable hand-over between two engines on ranks of their own (pipeline/link.h), for engines of this front end.
//
//   const tessera::nn::Link link{.source = 0, .target = 1, .sides = {"tower", "reader"}};
//   LinkSender sender(link, parts, engine);                       LinkReceiver receiver(link, parts, engine);
//   sender.send({engine.forward(x)}, micro);                      const Tensors got = receiver.receive(micro);
//   sender.backward(micro);                                       loss_of(got).backward();
//   tessera::nn::step_together(engine, parts);                    receiver.give_back(micro);
//   sender.step();                                                tessera::nn::step_together(engine, parts);
//                                                                 receiver.step();
#pragma once

#include <array>
#include <optional>
#include <string>

#include "tessera/comm/parts.h"
#include "tessera/engine/engine.h"
#include "tessera/nn/session.h"
#include "tessera/pipeline/link.h"

namespace tessera::nn {

using Tensors = std::vector<at::Tensor>;

// What both sides must agree on.
struct Link {
  int source = 0, target = 1;            // parts of the program
  int batch_dim = 0;                     // the dim of every tensor along which batches of ranks lie
  std::optional<int> sequence_dim = {};  // the dim that ranks of a sequence cut; for packed tokens it may be the same
  std::array<std::string, 2> sides{"source", "target"};  // in errors
  int number = 0;                                        // differs for each link of the same two parts
};

// The outputs' end, on a rank of the source. `engine`: the engine whose outputs are sent; its loss scale holds in backward(). Without
// one (null) there is none. An nn::Engine may move, and outlives the end. Value error where the mesh of the engine is not that of the
// part.
struct LinkSender : pipeline::LinkSender {
  LinkSender(const Link& link, const comm::Parts& parts, Session& engine);
  LinkSender(const Link& link, const comm::Parts& parts, engine::Engine* engine = nullptr);
};

// The inputs' end, on a rank of the target.
struct LinkReceiver : pipeline::LinkReceiver {
  LinkReceiver(const Link& link, const comm::Parts& parts, Session& engine);
  LinkReceiver(const Link& link, const comm::Parts& parts, engine::Engine* engine = nullptr);
};

// For ranks that are on both sides: comm::environment_overlaid_parts().
using pipeline::hand_over;

}  // namespace tessera::nn
