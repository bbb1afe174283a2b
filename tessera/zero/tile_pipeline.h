// TilePipeline: this rank's update of units, a tile at a time.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/zero/rank_guard.h"
#include "tessera/zero/tile.h"

namespace tessera::zero {

// The next tile is on its way to who updates it and the last one on its way back while one is updated. Where states and
// weights live on the device a unit is one tile, and nothing is on its way. One at a time for an engine's lanes.
class TilePipeline {
 public:
  // `done` is called with every unit in turn, also after a failure: the collectives go on, or the other ranks would wait. With
  // `done` all gradients are there beforehand; without it a unit's are when it is added. `groups`: hyper-parameters to go by,
  // which outlive it; null: those of `units`.
  TilePipeline(Units& units, Lanes& lanes, RankGuard& disks, std::function<void(Unit&)> done = {},
               const std::vector<optim::GroupOptions>* groups = nullptr);
  ~TilePipeline();

  // Gradients of the owned range are `grads`, not defined() where they lie in pieces, multiplied by `scale`. `present`: by
  // parameter of the model; the others are left alone.
  void add(Unit& unit, const shard::Buffer& grads, const std::vector<bool>& present, double scale);
  // Adds the segments that pieces_of() gave. `start`, where others use Unit::order meanwhile: after what its streams were given.
  void add(Unit& unit, const shard::Buffer& grads, const std::vector<Segment>& segments, double scale,
           const std::shared_ptr<c10::Event>& start = nullptr);
  static std::vector<Segment> pieces_of(const Units& units, const Unit& unit, const std::vector<bool>& present);
  // The last tile's update; what the host updates stays until another tile comes, so that the host waits for a copy that the
  // device is past, and not for all that it has to do. The event tells when the gradients that were added are used; null where
  // that is so on the current stream.
  const std::shared_ptr<c10::Event>& launch();
  // launch(), and the way back. What the current stream is given from here on comes after it.
  void finish();
  // All whose way back has begun is where it lives, or on its way there by itself.
  void arrive_all();
  // When what was updated so far is on the device; where the current stream did it, none.
  std::vector<std::shared_ptr<c10::Event>> used() const;

 private:
  void update_next();
  void arrive();
  void wait() noexcept;

  Units& units_;
  Lanes& lanes_;
  RankGuard& disks_;
  std::function<void(Unit&)> done_;
  const std::vector<optim::GroupOptions>& groups_;
  std::unique_ptr<Tile> next_;
  std::deque<Returning> returning_;
  std::shared_ptr<c10::Event> updated_, sent_;  // by the device, and by the host to it
  std::shared_ptr<c10::Event> began_;           // after all gradients, where they are there
};

}  // namespace tessera::zero
