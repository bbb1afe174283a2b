// What stages send each other: lists of tensors, in messages that say of themselves what they are.
//
// A message is a header, the form of the tensors where it is another than that of the message before, and the tensors. So their
// number, shapes and dtypes may change from one message to the next, and cost nothing where they do not.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/comm/point_to_point.h"

namespace tessera::pipeline {

using Tensors = std::vector<at::Tensor>;

// The other end of a wire.
struct Peer {
  int rank = 0;      // of the p2p
  std::string name;  // in errors, as "stage 1 (rank 2)"
};

// One direction of messages, from this rank to another or from another to this. Both ends use one tag, and no other wire
// between them does.
class Wire {
 public:
  // `what`: in words, for errors, as "activations". Messages are received on `device`.
  Wire(comm::PointToPointPtr p2p, Peer peer, int tag, at::Device device, std::string what);

  // Tensors of any dtype and layout; undefined ones arrive as such. `number` tells messages apart. Waits for nobody.
  void send(const Tensors& tensors, int64_t number);
  // In place of the next message: this side cannot go on.
  void send_failure(const std::string& text);

  // The next message: leaves that require a gradient where the sender's do. UsageError when it has another number;
  // DistBackendError with the other side's text when it could not go on, or when it is lost, which names it.
  Tensors receive(int64_t number);

  int64_t forms() const { return forms_; }  // messages that had to say what form they have

 private:
  void put(const at::Tensor& tensor);
  void take(const at::Tensor& tensor);
  std::vector<int64_t> take_numbers(int64_t count);
  template <class F>
  void guarded(const F& body) const;

  const comm::PointToPointPtr p2p_;
  const Peer peer_;
  const int tag_;
  const at::Device device_;
  const std::string what_;
  std::vector<int64_t> form_;
  int64_t forms_ = 0;
};

}  // namespace tessera::pipeline
