// What a checkpoint has beside tensors, as front ends in C++ read and write it: the program's own values and random generators.
#pragma once

#include "tessera/engine/restore.h"
#include "tessera/nn/session.h"

namespace tessera::nn {

c10::impl::GenericDict dict_of(const ClientValues& values);
// torch's generators, of the CPU and of `device`.
c10::impl::GenericDict random_states(c10::Device device);

class SavedValues {
 public:
  // `place`: of this rank, among those that load.
  SavedValues(const engine::Restore& found, int place) : reader_(found.reader()), place_(place) {}

  // IoError where it is damaged.
  ClientValues client() const { return checkpoint::client_values(reader_); }
  // Of this rank, where it has been saved. IoError where generators do not take it, which stay as they are.
  void try_random(c10::Device device) const;
  void put_random(c10::Device device) const;

 private:
  at::Tensor random_of(const char* generator) const;

  const checkpoint::Reader& reader_;
  const int place_;
};

}  // namespace tessera::nn
