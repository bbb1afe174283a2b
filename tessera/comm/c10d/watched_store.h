// The store of a job's ranks, whose waits end when a rank is lost, and how it is opened.
#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <chrono>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/comm/c10d/fault_board.h"

namespace tessera::comm {

// Ranks find each other by keys that each waits for from the others (exchange(), shm_rendezvous(), the connections of Gloo), for as long as
// the store's timeout. Such a wait looks every half second for a cause that another rank has reported, and for processes
// of this host that have shown themselves on the board and ended. Errors: DistBackendError.
class WatchedStore final : public c10d::PrefixStore {
 public:
  // `board`: the board of the `size` ranks which use the store.
  WatchedStore(const c10::intrusive_ptr<c10d::Store>& store, FaultBoard board, int rank, int size);

  c10::intrusive_ptr<c10d::Store> clone() override;
  std::vector<uint8_t> get(const std::string& key) override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;

 private:
  void look(const std::vector<std::string>& keys);

  std::mutex mutex_;
  FaultBoard board_;
  const int rank_, size_;
};

// Throws the DistBackendError for an error of the store itself.
[[noreturn]] void store_lost(int rank, int size, const std::exception& error);

// What an error means that came while this process met others at address:port: rank 0, whose store was there, may have ended.
std::string what_happened(const std::exception& error, const std::string& address, int port);

// The board of a group whose ranks use `store`: "job", where they have nothing more in common yet.
FaultBoard job_board(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                     const std::string& group = "job");

// `store`, whose waits end when one of the `size` ranks that have come to it, or to its job, is lost. This rank shows itself.
c10::intrusive_ptr<c10d::Store> watch_store(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);
// fresh_store(store, name), watched likewise: the ranks that have come to `store` are known.
c10::intrusive_ptr<c10d::Store> watch_fresh_store(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name,
                                                  int rank, int size);
// A part of `store` that nobody has used: the next one under `name`, counted by each rank for itself. Ranks ask in one
// order, and keys that an earlier group left in a store that outlives it are never seen.
c10::intrusive_ptr<c10d::Store> fresh_store(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name,
                                            int rank);

// Shows the others that this process is rank `rank`, and waits for them, for as long as the store's timeout. Value error
// when another process is that rank; DistBackendError that says who has come and who has not.
void come_together(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);

// The store of a job at address:port, which rank 0 hosts (or torchrun's agent, as the environment says), with all ranks
// there. Nobody has used it: a process may come here several times. Boards of all its ranks over it, or over a part of it,
// know the processes that came before.
c10::intrusive_ptr<c10d::Store> open_job_store(const std::string& address, int port, int rank, int size,
                                               std::chrono::milliseconds timeout);

}  // namespace tessera::comm
