// ProcessOwner: whether this is still the process in which something was made, or a forked copy of it.
//
// Note [Copies of a process]
//   fork() (os.fork in Python, workers of a DataLoader) copies a rank's groups into the child, but not the threads behind
//   them. The copy is no rank: whatever it wrote into shared memory, the store or a socket would be taken for the rank's
//   word. So every call fails there at once, and who lets go of a group lets go of the copy's own memory only. What has
//   threads is never destroyed there: it would wait for threads that do not exist.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

namespace tessera::comm {

class ProcessOwner {
 public:
  ProcessOwner();
  // Whether the calling process made this. Costs nothing.
  bool is_here() const;

 private:
  uint32_t forks_;
};

// Why calls fail in a copy of the process.
inline constexpr auto kForkedCopy =
    "this process is a forked copy of the rank and cannot talk to the others; use the engine and its groups "
    "only in the process that made them";

// Does what std::make_shared does, but a forked copy of the process never destroys the object.
template <class T, class... Args>
std::shared_ptr<T> make_owned(Args&&... args) {
  return {new T(std::forward<Args>(args)...), [owner = ProcessOwner()](T* made) {
            if (owner.is_here()) delete made;
          }};
}

}  // namespace tessera::comm
