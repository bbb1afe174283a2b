// The forks between torch versions that concern storages.
#pragma once

#include <c10/core/StorageImpl.h>

#include <utility>

namespace tessera::shard::compat {

// torch 2.11 and 2.12 can forbid accesses to a storage's data but not allow them again: the flag is a private member. An
// explicit instantiation may name it, and its friend hands it out. The member exists in later versions too.
template <auto flag>
struct PrivateFlag {
  friend bool& access_throws(c10::StorageImpl& storage) { return storage.*flag; }
};
template struct PrivateFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;
bool& access_throws(c10::StorageImpl& storage);

// Ends what release_data_and_set_meta_custom_data_ptr_error_msg_() began, but for the text, which the storage keeps for
// forbid_access(); a new data pointer must follow.
template <class Storage>
void allow_access(Storage& storage) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    auto text = std::move(storage.get_extra_meta().custom_data_ptr_error_msg_);
    storage.clear_data_ptr_access_error_msg_();
    storage.get_extra_meta().custom_data_ptr_error_msg_ = std::move(text);
  } else {
    access_throws(storage) = false;
  }
}

// Forbids accesses again, with the text that the storage has.
inline void forbid_access(c10::StorageImpl& storage) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(
      std::move(storage.get_extra_meta().custom_data_ptr_error_msg_));
}

}  // namespace tessera::shard::compat
