// Disks: work that may fail on one rank, for its disk or its memory, while the others wait for that rank in collectives.
#pragma once

#include <string>

#include "tessera/base/error.h"
#include "tessera/zero/ranks.h"
#include "tessera/zero/unit.h"

namespace tessera::zero {

// Master and states of `unit` are where its gradients are; its weights are, too.
bool states_on_device(const Unit& unit);
bool lives_on_device(const Unit& unit);

// The collectives between pieces of such work are made all the same; at the end all ranks agree on how it went.
class DiskGuard {
 public:
  // `agrees`: agree() will be called, so what fails is kept until then. Else it is thrown at once.
  explicit DiskGuard(bool agrees) : agrees_(agrees) {}
  // It agrees, but on the device's memory only; all other errors are thrown.
  static DiskGuard for_memory() {
    DiskGuard guard(true);
    guard.all_ = false;
    return guard;
  }
  bool agrees() const { return agrees_; }
  // Nothing happens after a failure.
  template <class F>
  void run(const F& work) {
    if (failure_.empty()) run_always(work);
  }
  // Keeps the first failure, of memory too; not errors of the caller's, which all ranks have.
  template <class F>
  void run_always(const F& work) {
    if (!agrees_) return work();
    try {
      work();
    } catch (const c10::OutOfMemoryError& error) {
      keep(error.what_without_backtrace());
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
  // This rank's failure, else that another one has one; empty: there is none. Collective.
  std::string agree(const Ranks& ranks) const;

 private:
  void keep(const std::string& failure) {
    if (failure_.empty()) failure_ = failure;
  }

  bool agrees_, all_ = true;
  std::string failure_;
};

}  // namespace tessera::zero
