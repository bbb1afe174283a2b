// AutocastRegion: torch's autocast for the forward of an engine, in its own dtype whatever region the caller is in.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace tessera::amp {

struct AutocastOptions {
  bool enabled = false;
  c10::ScalarType dtype = c10::ScalarType::BFloat16;  // Float: an enabled region in which autocast is off
};

// Value error when the device type has no autocast, or dtype is none of Half, BFloat16 and Float.
void check(const AutocastOptions& options, c10::DeviceType device);

// From construction to leave(), on the calling thread, autocast is as `options` say, off where they are not enabled.
// Regions end in the opposite order of their beginning.
//
// Torch's cache of cast weights is not used inside: it would hold a cast of the whole model until the forward ends, and
// a cast made under no_grad (an evaluation, a recomputed block) would be taken up by later code, whose gradients are
// then lost. The cache is emptied at both ends as well, so that a region of the caller's around many steps, where weights are
// updated unseen by torch, starts anew at every forward.
class AutocastRegion {
 public:
  AutocastRegion(const AutocastOptions& options, c10::DeviceType device);
  void leave() const;
  // Whether a region of the caller's is switched off by options that are not enabled.
  bool switched_off() const { return switched_off_; }

 private:
  c10::DeviceType device_;
  bool idle_ = false;  // nothing to do
  bool switched_off_ = false;
  bool was_enabled_ = false;
  bool was_cached_ = true;
  c10::ScalarType was_dtype_ = c10::ScalarType::Float;
};

}  // namespace tessera::amp
