#include "tessera/zero/joining.h"

namespace tessera::zero {

void Joining::params_changed() {
  units_.params_changed();
  regions_.params_changed();
  early_.params_changed();
}

void Joining::join(const std::vector<ParamId>& ids) {
  {
    const std::lock_guard lock(driver_.hooks().mutex());
    units_.join(ids);
    modules_.follow_units();
  }
  driver_.take_joined(ids);
}

}  // namespace tessera::zero
