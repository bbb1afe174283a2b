#include "tessera/zero/tile_pipeline.h"

#include <c10/core/Event.h>

#include <algorithm>
#include <utility>

namespace tessera::zero {

namespace {

constexpr size_t kReturning = 1;  // tiles that are on their way back, to be stored, while the next one is updated

}  // namespace

TilePipeline::TilePipeline(Units& units, Lanes& lanes, RankGuard& disks, std::function<void(Unit&)> done,
                           const std::vector<optim::GroupOptions>* groups)
    : units_(units),
      lanes_(lanes),
      disks_(disks),
      done_(std::move(done)),
      groups_(groups == nullptr ? units.groups() : *groups) {
  if (!lanes_.has_room(units)) disks_.run([&] { lanes_.make_room(units_); });
  const c10::Device device = units_.ranks().device;
  if (done_ && !device.is_cpu()) disks_.run([&] { began_ = shard::mark(device); });
}

// After an error weights may be on their way to where others write next.
TilePipeline::~TilePipeline() {
  wait();
}

void TilePipeline::wait() noexcept {
  try {
    for (const Returning& left : std::exchange(returning_, {}))
      left.copied->synchronize();
    for (const auto& event : {updated_, sent_})
      if (event) event->synchronize();
  } catch (const std::exception&) {
    // A device that fails: its next use throws.
  }
}

std::vector<Segment> TilePipeline::pieces_of(const Units& units, const Unit& unit, const std::vector<bool>& present) {
  std::vector<Segment> segments = segments_of(unit, present, units.options().precision.update_is_random());
  return lives_on_device(unit) ? segments : in_tiles(segments);
}

void TilePipeline::add(Unit& unit, const shard::Buffer& grads, const std::vector<bool>& present, double scale) {
  add(unit, grads, pieces_of(units_, unit, present), scale);
}

void TilePipeline::add(Unit& unit, const shard::Buffer& grads, const std::vector<Segment>& segments, double scale,
                       const std::shared_ptr<c10::Event>& start) {
  const bool whole = lives_on_device(unit), apart = start != nullptr;
  if (segments.empty()) {
    update_next();
    if (done_) done_(unit);
  }
  for (auto begin = segments.begin(); begin != segments.end();) {
    const int64_t number = begin->range.begin / kTile;
    const auto end =
        whole ? segments.end()
              : std::find_if(begin, segments.end(), [&](const Segment& s) { return s.range.begin / kTile > number; });
    const shard::Range range = whole
                                   ? shard::Range{0, unit.owned().size()}
                                   : shard::Range{number * kTile, std::min((number + 1) * kTile, unit.owned().size())};
    const bool last = end == segments.end();
    std::unique_ptr<Tile> tile;
    disks_.run([&] {
      tile =
          std::make_unique<Tile>(unit, grads, range, std::vector<Segment>(begin, end), last, scale, units_.options());
      // The tile does not wait for what the current stream is given since, as gathers of units that the device has updated.
      if (!tile->is_of_host()) return;
      tile->set_out(lanes_, apart ? start : began_ ? began_ : shard::mark(units_.ranks().device), apart);
    });
    update_next();
    if (tile && !tile->is_of_host()) disks_.run([&] { tile->set_out(lanes_, start, apart); });
    next_ = std::move(tile);
    if (!next_ && last && done_) done_(unit);
    begin = end;
  }
}

void TilePipeline::update_next() {
  if (!next_) return;
  const NamedRange range("update", next_->unit().name());
  disks_.run([&] {
    if (const auto& updated = next_->update(units_.rule(), groups_, lanes_)) updated_ = updated;
    if (auto returning = next_->set_back(lanes_)) returning_.push_back(std::move(*returning));
    if (next_->is_of_host()) sent_ = next_->updated();
  });
  while (returning_.size() > kReturning)
    arrive();
  Unit& unit = next_->unit();
  const bool last = next_->is_last();
  next_.reset();  // a tile without an update waits for its way there, before others write
  if (last && done_) done_(unit);
}

void TilePipeline::arrive() {
  const Returning oldest = std::move(returning_.front());
  returning_.pop_front();
  disks_.run_always([&] { oldest.copied->synchronize(); });
  for (const auto& [home, values] : oldest.values)
    disks_.run([&] { home.store(oldest.range, values); });
}

const std::shared_ptr<c10::Event>& TilePipeline::launch() {
  if (next_ && next_->is_of_host()) return next_->came();
  update_next();
  return updated_;
}

void TilePipeline::arrive_all() {
  while (!returning_.empty())
    arrive();
}

std::vector<std::shared_ptr<c10::Event>> TilePipeline::used() const {
  std::vector<std::shared_ptr<c10::Event>> events;
  for (const auto& event : {updated_, sent_})
    if (event) events.push_back(event);
  return events;
}

void TilePipeline::finish() {
  update_next();
  arrive_all();
  for (auto* event : {&updated_, &sent_})
    if (const auto over = std::exchange(*event, nullptr))
      disks_.run_always([&] { shard::come_after(*over, units_.ranks().device); });
}

}  // namespace tessera::zero
