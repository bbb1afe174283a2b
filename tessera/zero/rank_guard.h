// RankGuard: work that may fail on one rank, for its disk or its memory, while the others wait for that rank in collectives.
#pragma once

#include <string>

#include "tessera/base/error.h"
#include "tessera/zero/ranks.h"
#include "tessera/zero/unit.h"

namespace tessera::zero {

// Whether the master and states of `unit` are where its gradients are; for lives_on_device() its weights are, too.
bool states_on_device(const Unit& unit);
bool lives_on_device(const Unit& unit);

// An OutOfMemoryError that all ranks of an engine have, so that none waits for another.
class AgreedOutOfMemory final : public c10::OutOfMemoryError {
  using c10::OutOfMemoryError::OutOfMemoryError;
};

// Ends the groups of `ranks` with `error`, which only this rank has, so that the others do not wait for this one.
void end_groups(const c10::OutOfMemoryError& error, const Ranks& ranks);

// How work went, as all ranks agreed.
struct Failure {
  std::string text{};      // this rank's error, else that another rank has one; empty: none
  bool of_memory = false;  // the device's memory ran out; the same on all ranks
  // Throws the failure behind `what`: as AgreedOutOfMemory, else as an IoError.
  void check(const std::string& what) const;
};

// Runs the pieces of such work, between which collectives are made all the same; at the end all ranks agree on how it went.
class RankGuard {
 public:
  // `agrees`: agree() will be called, so an error is kept until then. Else it is thrown at once.
  explicit RankGuard(bool agrees) : agrees_(agrees) {}
  // A guard that agrees, but on the device's memory only; all other errors are thrown.
  static RankGuard for_memory() {
    RankGuard guard(true);
    guard.all_ = false;
    return guard;
  }
  bool agrees() const { return agrees_; }
  bool went_well() const { return mine_.text.empty(); }  // so far, on this rank
  // Runs `work`, unless something failed before.
  template <class F>
  void run(const F& work) {
    if (went_well()) run_always(work);
  }
  // Runs `work` also after a failure. Keeps the first failure, of memory too; not errors of the caller's, which all ranks have.
  template <class F>
  void run_always(const F& work) {
    if (!agrees_) return work();
    try {
      work();
    } catch (const c10::OutOfMemoryError& error) {
      keep(error.what_without_backtrace(), /*of_memory=*/true);
    } catch (const c10::ValueError&) {
      throw;
    } catch (const c10::Error& error) {
      if (!all_) throw;
      keep(error.what_without_backtrace());
    } catch (const std::exception& error) {
      if (!all_) throw;
      keep(error.what());
    }
  }
  // Agrees with `ranks` on how the work went. Collective.
  Failure agree(const Ranks& ranks) const;

 private:
  void keep(const std::string& failure, bool of_memory = false) {
    if (went_well()) mine_ = {failure, of_memory};
  }

  bool agrees_, all_ = true;
  Failure mine_;
};

}  // namespace tessera::zero
