// What a checkpoint has beside tensors, as front ends in C++ read and write it: the program's own values and random generators.
#pragma once

#include "tessera/engine/restore.h"
#include "tessera/nn/session.h"

namespace tessera::nn {

c10::impl::GenericDict dict_of(const ClientValues& values);
// States of torch's generators, of the CPU and of `device`, and of the program's `own`.
c10::impl::GenericDict random_states(c10::Device device, const std::vector<at::Generator>& own);

class SavedValues {
 public:
  // `place`: this rank's, among those that load.
  SavedValues(const engine::Restore& found, int place) : reader_(found.reader()), place_(place) {}

  // The program's own values. IoError where the checkpoint is damaged.
  ClientValues client() const { return checkpoint::client_values(reader_, place_ == 0); }
  // This rank's generators, where they were saved: try throws IoError where one does not take its state, value error for another
  // number of `own`, and changes none.
  void try_random(c10::Device device, const std::vector<at::Generator>& own) const;
  void put_random(c10::Device device, const std::vector<at::Generator>& own) const;

 private:
  at::Tensor random_of(const char* generator) const;
  void try_state(const at::Generator& generator, const at::Tensor& state) const;
  std::vector<at::Tensor> own_random() const;  // empty where there are none

  const checkpoint::Reader& reader_;
  const int place_;
};

}  // namespace tessera::nn
