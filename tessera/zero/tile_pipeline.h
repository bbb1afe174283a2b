// TilePipeline: this rank's update of units, a tile at a time.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "tessera/zero/disks.h"
#include "tessera/zero/units.h"

namespace tessera::zero {

// The next tile is on its way to the device and the last one on its way back while one is updated. Where the states live on
// the device a unit is one tile, and nothing is on its way.
class TilePipeline {
 public:
  // `done` is told of every unit in turn, also after a failure: the collectives go on, or the other ranks would wait.
  TilePipeline(Units& units, double scale, DiskGuard& disks, std::function<void(Unit&)> done);
  ~TilePipeline();

  // Gradients of the owned range are `grads`, multiplied by `scale`. `present`: by parameter of the model; the others are left
  // alone.
  void add(Unit& unit, const shard::Buffer& grads, const std::vector<bool>& present);
  // The last tile's update.
  void finish();

 private:
  class Tile;
  struct Segment;

  static std::vector<Segment> segments_of(const Unit& unit, const std::vector<bool>& present, bool numbered);
  static std::vector<Segment> in_tiles(const std::vector<Segment>& segments);
  void add(Unit& unit, const shard::Buffer& grads, shard::Range range, std::vector<Segment> segments, bool last,
           bool away);

  Units& units_;
  double scale_;
  DiskGuard& disks_;
  std::function<void(Unit&)> done_;
  std::unique_ptr<Tile> next_;
};

}  // namespace tessera::zero
