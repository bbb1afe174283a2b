// Tile: a piece of a unit's update, whose values come to who updates them and go home; Lanes: what they come and go by.
//
// Note [Where an update is]
//   - On the device, where all of the unit lives there: it is one tile, and nothing moves.
//   - On the device too, where little has to come: only weights live elsewhere, or states of 16 bits do. Tiles pass through it:
//     one comes while one is updated and one goes home, each on a stream of its own beside the one that computes. A backward that
//     updates therefore hides them: only who reads what they bring waits for them.
//   - On the host, where fp32 states live elsewhere: they are more bytes than gradients, which come to the host, and weights,
//     which go back. A share of such units may be the device's all the same (StateResidence::by_device), so that the link is busy
//     while the host's memory is: the two have streams apart, and what the host updates waits for nothing of the device's.
//   Bits are the same: kernels of the host and of the device have the same ones.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/shard/side_stream.h"
#include "tessera/zero/segments.h"
#include "tessera/zero/units.h"

namespace tessera::zero {

// Where `unit` is updated: its device, or the CPU.
c10::Device device_of_update(const Unit& unit);

// Memory on the device of an update for tiles on their way.
class TileRing {
 public:
  static constexpr size_t kQuantities = 6;
  struct Slot {
    std::shared_ptr<c10::Event> free;  // of its last use
    std::array<at::Tensor, kQuantities> bytes;
  };
  ~TileRing() { clear(); }
  TileRing() = default;
  TileRing(const TileRing&) = delete;
  TileRing& operator=(const TileRing&) = delete;

  // Makes memory in all slots for `size` elements of a quantity, on the device `on`; `pin`: page-locked, of the host. Does
  // nothing where a slot has as much.
  void reserve(size_t quantity, int64_t size, at::ScalarType dtype, c10::Device on, bool pin);
  Slot& next() { return slots_[next_++ % slots_.size()]; }
  static at::Tensor view(const Slot& slot, size_t quantity, int64_t size, at::ScalarType dtype);
  void clear() noexcept;

 private:
  std::array<Slot, 3> slots_;  // one comes, one is updated, one goes home
  size_t next_ = 0;
};

// What the tiles of one engine come and go by: streams and memory.
struct Lanes {
  shard::SideStream there, work, back;      // of what the device updates
  shard::SideStream host_there, host_back;  // of what the host does
  TileRing on_device, on_host;
  size_t units = 0;  // so many units have room

  // Makes room for tiles of all units. After out-of-memory it can be called again.
  void make_room(const Units& all);
  // Whether all units have room: the same on all ranks, also where nothing has to move.
  bool has_room(const Units& all) const;
};

// Values on their way from where they were updated to a home that does not take them by itself.
struct Returning {
  std::vector<std::pair<shard::Buffer, at::Tensor>> values;
  shard::Range range;
  std::shared_ptr<c10::Event> copied;
};

class Tile {
 public:
  // `range`: of the owned range, whose gradients are `grads`, not defined() where they lie in pieces. `last`: the unit's last.
  Tile(Unit& unit, const shard::Buffer& grads, shard::Range range, std::vector<Segment> segments, bool last,
       double scale, const Options& options);

  ~Tile();
  Tile(const Tile&) = delete;
  Tile& operator=(const Tile&) = delete;

  // Starts the way of what lives elsewhere to where it is updated. Waits for the disk. The way to the host comes after `since`,
  // which comes after all that the unit's streams were given; so does the way back. `apart`: others use Unit::order meanwhile;
  // then the device updates after `since` as well.
  void set_out(Lanes& lanes, const std::shared_ptr<c10::Event>& since, bool apart = false);
  // Where the device updates beside the current stream, the event tells when the update is done; else null.
  const std::shared_ptr<c10::Event>& update(optim::Rule rule, const std::vector<optim::GroupOptions>& groups,
                                            Lanes& lanes);
  // Starts the way home of what set_out() brought, beside the current stream.
  std::optional<Returning> set_back(Lanes& lanes);
  // After set_out(): the event after which the values are where they are updated.
  const std::shared_ptr<c10::Event>& came() const { return came_; }
  // After set_back(): the event after which the device has what the host updated.
  const std::shared_ptr<c10::Event>& updated() const { return updated_; }

  Unit& unit() const { return *unit_; }
  bool is_last() const { return last_; }
  // Whether the host takes part in this tile's update.
  bool is_of_host() const { return travels_ && updates_on_.is_cpu(); }

 private:
  // What an update reads or changes, of one buffer.
  struct Carried {
    shard::Buffer buffer;
    std::optional<shard::PendingView> pending;
    at::Tensor home, here;  // where it lives, and where the update is: the same where it does not travel
    bool travels = false, reads = true, changes = true;
  };

  void carry(size_t quantity, const shard::Buffer& buffer, bool reads, bool changes);
  bool reads_weights() const;
  at::Tensor part(size_t quantity, shard::Range range) const;
  at::Tensor gradient(const Segment& segment) const;
  optim::UpdateSlice slice(const Segment& segment) const;
  void run(optim::Rule rule, const std::vector<optim::GroupOptions>& groups);

  Unit* unit_;
  shard::Range range_;
  std::vector<Segment> segments_;
  bool last_;
  double scale_;
  const Options* options_;
  c10::Device device_, updates_on_;
  bool travels_ = false, apart_ = false;
  std::array<Carried, TileRing::kQuantities> carried_;  // weights, gradients, Unit::state_buffers()
  TileRing::Slot* slot_ = nullptr;
  std::shared_ptr<c10::Event> since_, came_, updated_;
};

}  // namespace tessera::zero
