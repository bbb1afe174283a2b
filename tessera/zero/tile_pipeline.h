// TilePipeline: this rank's update of units, a tile at a time.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/shard/side_stream.h"
#include "tessera/zero/rank_guard.h"
#include "tessera/zero/units.h"

namespace tessera::zero {

// The next tile is on its way to who updates it and the last one on its way back while one is updated. Where states and
// weights live on the device a unit is one tile, and nothing is on its way.
class TilePipeline {
 public:
  // Those of weights that live elsewhere to the device that updates them, and back. The caller keeps them.
  struct Ways {
    shard::SideStream there, back;
  };
  // `done` is told of every unit in turn, also after a failure: the collectives go on, or the other ranks would wait.
  TilePipeline(Units& units, Ways& ways, double scale, RankGuard& disks, std::function<void(Unit&)> done);
  ~TilePipeline();

  // Gradients of the owned range are `grads`, not defined() where they lie in pieces, multiplied by `scale`. `present`: by parameter of the model; the others are left
  // alone.
  void add(Unit& unit, const shard::Buffer& grads, const std::vector<bool>& present);
  // The last tile's update, and its way back.
  void finish();

 private:
  class Tile;
  struct Segment;
  // Weights on their way from the device to `to`, and from there home.
  struct Returning {
    Unit* unit;
    shard::Range range;
    at::Tensor from, to;
    std::shared_ptr<c10::Event> copied;
  };

  static std::vector<Segment> segments_of(const Unit& unit, const std::vector<bool>& present, bool numbered);
  static std::vector<Segment> in_tiles(const std::vector<Segment>& segments);
  void add(Unit& unit, const shard::Buffer& grads, shard::Range range, std::vector<Segment> segments, bool last,
           bool away);
  void update_next();
  void arrive();

  Units& units_;
  Ways& ways_;
  double scale_;
  RankGuard& disks_;
  std::function<void(Unit&)> done_;
  std::unique_ptr<Tile> next_;
  std::deque<Returning> returning_;
};

}  // namespace tessera::zero
