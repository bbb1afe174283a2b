// What carries the collectives of a group of CPU ranks.
//
// Note [Choice of transport]
//   TESSERA_TRANSPORT says it: "gloo" the back end at hand, "shared_memory" shared memory or an error, "auto" (the default)
//   shared memory between ranks of one host and the back end at hand between hosts. Ranks tell each other through the
//   group's store where they are and what they announced, and end alike. Whether memory can really be shared is found out by
//   sharing it: when a rank cannot, "auto" warns and stays with the back end at hand.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/comm/hosts/hosts.h"

namespace tessera::comm {

// What every rank says about `topic`, by rank. Collective over the `size` ranks that use `store`, as often as they like. A
// rank that is lost before it says anything is a DistBackendError of the others. Rank 0, whose process may host the store, is the
// last to return, so that what all announce may end it.
std::vector<std::string> exchange_all(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                      const std::string& topic, const std::string& text);

// Makes the group of Note [Choice of transport]. Collective over the `size` ranks that use `store`, which has no other use.
// `at_hand` makes a group over the back end at hand, may be called several times and later, when siblings are made; `timeout`:
// longest wait for a rank later. Value error when TESSERA_TRANSPORT is wrong or not the same on all ranks; DistBackendError when
// memory must be shared and cannot.
GroupPtr choose_transport(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                          std::chrono::milliseconds timeout, const std::function<GroupPtr()>& at_hand);

// Two steps of that choice. find_hosts(): where the ranks are, if memory may be shared; nothing when it shall not. Collective.
std::optional<Hosts> find_hosts(c10d::Store& store, int rank, int size);
// Shares memory among all ranks by share(), which throws DistBackendError on all of them or none. False, with a warning, when
// memory could not and need not be shared.
bool try_sharing(int rank, const std::function<void()>& share);

// Throws a value error when TESSERA_TRANSPORT is none of the three.
void check_transport();

}  // namespace tessera::comm
