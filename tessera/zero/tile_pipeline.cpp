#include "tessera/zero/tile_pipeline.h"

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>

#include <algorithm>
#include <array>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/shard/side_stream.h"

namespace tessera::zero {

namespace {

constexpr size_t kReturning = 1;  // tiles of weights whose way back goes on while the next one is updated

// `from`, on a device, on its way to host memory. (torch keeps pinned memory while a copy of it is on its way.)
shard::PendingView bring_to_host(const at::Tensor& from, bool pin) {
  const at::Tensor there = at::empty(from.sizes(), from.options().device(at::kCPU).pinned_memory(pin));
  there.copy_(from, /*non_blocking=*/true);
  return shard::PendingView(there, [copied = shard::mark(from.device())] { copied->synchronize(); });
}

}  // namespace

// Consecutive elements of an owned range with the hyper-parameters of one update.
struct TilePipeline::Segment {
  shard::Range range;  // in the coordinates of the owned range
  int group = 0;
  int64_t step = 0;
  bool adopts = false;           // see Unit::adopts()
  const Param* param = nullptr;  // the first one
  // Numbers of the elements in the model, where they matter: see optim::UpdateSlice.
  uint64_t first = 0;
  int64_t run = 0, stride = 0;

  bool continues(const Segment& s) const {
    return group == s.group && step == s.step && adopts == s.adopts && param->run == s.param->run;
  }
  // Appends elements that follow at once, if their numbers go on as those that are here.
  bool append(shard::Range next, uint64_t number) {
    const int64_t size = range.size();
    if (next.begin != range.end) return false;
    if (run == 0 && number != first + static_cast<uint64_t>(size)) {  // a second run
      if (next.size() > size || number < first) return false;
      run = size;
      stride = static_cast<int64_t>(number - first);
    } else if (run > 0) {
      const bool fits = size % run == 0 && next.size() <= run;
      if (!fits || number != first + static_cast<uint64_t>(size / run * stride)) return false;
    }
    range.end = next.end;
    return true;
  }
  // Elements [begin, end) of the owned range, which are some of one run or begin with one.
  Segment part(int64_t begin, int64_t end) const {
    const int64_t skipped = begin - range.begin, of_run = run == 0 ? range.size() : run;
    Segment s = *this;
    s.range = {begin, end};
    s.first += static_cast<uint64_t>(skipped / of_run * stride + skipped % of_run);
    if (end - begin <= of_run) s.run = s.stride = 0;
    return s;
  }
};

// Gaps between parameters hold zeros, and are updated with them where nothing is `numbered`. Else a parameter that is cut out
// of a whole one is a segment too where its numbers are regular: a slice along one dimension.
std::vector<TilePipeline::Segment> TilePipeline::segments_of(const Unit& unit, const std::vector<bool>& present,
                                                             bool numbered) {
  std::vector<Segment> segments;
  bool open = false;
  const auto add = [&](const Segment& s) {
    Segment* last = open ? &segments.back() : nullptr;
    if (last != nullptr && last->continues(s) && !numbered) {
      last->range.end = s.range.end;
    } else if (last == nullptr || !last->continues(s) || !last->append(s.range, s.first)) {
      segments.push_back(s);
    }
    open = true;
  };
  for (const Param& p : unit.params) {
    const shard::Range mine = unit.owned_slice(p);
    if (mine.empty()) continue;
    if (!present[p.id]) {
      open = false;
      continue;
    }
    const Segment whole{mine, p.group, p.step + 1, unit.adopts(p), &p};
    if (!numbered) {
      add(whole);
      continue;
    }
    const int64_t skipped = unit.owned.begin + mine.begin - p.range.begin;
    shard::for_stretches(p.cut, {skipped, skipped + mine.size()}, [&](shard::Range r, int64_t number) {
      Segment s = whole;
      s.range = {mine.begin + r.begin - skipped, mine.begin + r.end - skipped};
      s.first = p.first + static_cast<uint64_t>(number);
      add(s);
    });
  }
  return segments;
}

// `segments` cut at multiples of kTile.
std::vector<TilePipeline::Segment> TilePipeline::in_tiles(const std::vector<Segment>& segments) {
  std::vector<Segment> pieces;
  for (const Segment& s : segments) {
    for (int64_t begin = s.range.begin; begin < s.range.end; begin = pieces.back().range.end) {
      int64_t end = std::min((begin / kTile + 1) * kTile, s.range.end);
      const int64_t within = s.run == 0 ? 0 : (begin - s.range.begin) % s.run;
      if (within > 0) end = std::min(end, begin + s.run - within);  // the rest of a run
      pieces.push_back(s.part(begin, end));
    }
  }
  return pieces;
}

// A piece of a unit's update: its buffers' values on their way to who updates, and back. States that do not live on the
// device are updated by the host, which then takes gradients and weights from the device and sends weights back. Weights
// that do not live there are one buffer more, and go where the update is: to the device by way of elsewhere_, memory of the
// host.
class TilePipeline::Tile {
 public:
  // `range`: of the owned range, whose gradients are `grads`. `last`: of its unit. `away`: its states do not live on the
  // device.
  Tile(Unit& unit, const shard::Buffer& grads, shard::Range range, std::vector<Segment> segments, bool last, bool away,
       bool pin)
      : unit_(&unit),
        range_(range),
        segments_(std::move(segments)),
        last_(last),
        pin_(pin),
        device_(unit.flat->options().device()),
        weights_here_(unit.weights().is_here()),
        weights_(fetch_weights()),
        grads_(grads.defined() ? std::optional(grads.fetch(range)) : std::nullopt) {
    for (const shard::Buffer* buffer : buffers())
      views_.push_back(buffer->defined() ? std::optional(buffer->fetch(range)) : std::nullopt);
    if (device_.is_cpu()) return;
    if (!away) {
      travels_ = !weights_here_;
      return;
    }
    if (grads.is_here()) grads_ = bring_to_host(grads_->wait(), pin);
    if (!weights_here_) return;
    device_weights_ = weights_.wait();
    weights_ = bring_to_host(device_weights_, pin);
  }

  ~Tile() {
    if (came_) shard::StreamOrder().keep(here_, came_.get());
  }
  Tile(const Tile&) = delete;
  Tile& operator=(const Tile&) = delete;

  // Weights that live elsewhere set out for the device that updates them.
  void set_out(shard::SideStream& way) {
    if (!travels_) return;
    elsewhere_ = weights_.wait();
    here_ = at::empty(elsewhere_.sizes(), elsewhere_.options().device(device_).pinned_memory(false));
    if (!all_written())
      came_ = way.run(device_, [&] { here_.copy_(elsewhere_, /*non_blocking=*/elsewhere_.is_pinned()); });
    weights_ = shard::PendingView(here_, [this] {
      if (came_) shard::come_after(*came_, device_);
    });
  }

  void update(optim::Rule rule, const std::vector<optim::GroupOptions>& groups, const Options& options, double scale) {
    std::vector<optim::Update> updates;
    for (const Segment& segment : segments_)
      updates.push_back({&groups[segment.group], segment.step, slice(segment, options)});
    optim::update(rule, updates, scale);
    if (!weights_here_ && !travels_) unit_->weights_to_write().store(range_, weights_.wait());
    if (device_weights_.defined()) device_weights_.copy_(weights_.wait(), /*non_blocking=*/true);
    for (size_t i = 0; i < views_.size(); ++i)
      if (views_[i]) buffers()[i]->store(range_, views_[i]->wait());
  }

  // What set_out() brought sets out for elsewhere_, updated.
  std::optional<Returning> set_back(shard::SideStream& way) {
    if (!travels_) return {};
    const auto copied = way.run(device_, [&] { elsewhere_.copy_(here_, /*non_blocking=*/elsewhere_.is_pinned()); });
    return Returning{unit_, range_, here_, elsewhere_, copied};
  }

  Unit& unit() const { return *unit_; }
  bool is_last() const { return last_; }

 private:
  std::array<const shard::Buffer*, 4> buffers() const { return unit_->state_buffers(); }
  // The master is apart, and nothing of the weights stays what it was.
  bool all_written() const {
    int64_t written = 0;
    for (const Segment& segment : segments_)
      written += segment.range.size();
    return unit_->master.defined() && written == range_.size();
  }
  // Then nothing has to come from a disk.
  shard::PendingView fetch_weights() const {
    const shard::Buffer weights = unit_->weights();
    if (weights.residence() != shard::Residence::Nvme || !all_written()) return weights.fetch(range_);
    const auto host = weights.options().device(at::kCPU).pinned_memory(pin_ && !device_.is_cpu());
    return shard::PendingView(at::empty({range_.size()}, host));
  }
  at::Tensor arrived(shard::PendingView& values, shard::Range range) const {
    return values.wait().narrow(0, range.begin - range_.begin, range.size());
  }
  at::Tensor arrived(size_t buffer, shard::Range range) {
    return views_[buffer] ? arrived(*views_[buffer], range) : at::Tensor();
  }
  at::Tensor gradient(const Segment& segment) {
    if (grads_) return arrived(*grads_, segment.range);
    const auto [buffer, there] = unit_->gradient(*segment.param, segment.range);
    return buffer.view(there);
  }
  optim::UpdateSlice slice(const Segment& segment, const Options& options) {
    const at::Tensor weights = arrived(weights_, segment.range);
    const bool fp32_weights = weights.scalar_type() == at::kFloat;  // then they are the master
    optim::UpdateSlice slice;
    slice.master = fp32_weights ? weights : arrived(0, segment.range);
    if (!fp32_weights) slice.weight = weights;
    slice.adopts = segment.adopts;
    slice.residual = arrived(1, segment.range);
    slice.grad = gradient(segment);
    slice.state = {arrived(2, segment.range), arrived(3, segment.range)};
    slice.rounding = options.precision.rounding;
    slice.random = {options.seed, static_cast<uint64_t>(segment.step), segment.first};
    slice.run = segment.run;
    slice.stride = segment.stride;
    return slice;
  }

  Unit* unit_;
  shard::Range range_;
  std::vector<Segment> segments_;
  bool last_;
  bool pin_;
  c10::Device device_;
  bool weights_here_;
  bool travels_ = false;  // weights that live elsewhere, to the device
  std::vector<std::optional<shard::PendingView>> views_;
  shard::PendingView weights_;
  std::optional<shard::PendingView> grads_;  // none where they lie in pieces
  at::Tensor device_weights_;                // where the host updates a copy
  at::Tensor elsewhere_, here_;              // where the device does: from where, and there
  std::shared_ptr<c10::Event> came_;
};

TilePipeline::TilePipeline(Units& units, Ways& ways, double scale, RankGuard& disks, std::function<void(Unit&)> done)
    : units_(units), ways_(ways), scale_(scale), disks_(disks), done_(std::move(done)) {}

// After an error weights may be on their way to where others write next.
TilePipeline::~TilePipeline() {
  for (const Returning& left : returning_) {
    try {
      left.copied->synchronize();
    } catch (const std::exception&) {
      // A device that fails: who uses it next is told.
    }
  }
}

void TilePipeline::add(Unit& unit, const shard::Buffer& grads, const std::vector<bool>& present) {
  std::vector<Segment> segments = segments_of(unit, present, units_.options().precision.update_is_random());
  if (lives_on_device(unit)) return add(unit, grads, {0, unit.owned.size()}, std::move(segments), true, false);
  const bool away = !states_on_device(unit);
  segments = in_tiles(segments);
  if (segments.empty()) {
    update_next();
    done_(unit);
  }
  for (auto begin = segments.begin(); begin != segments.end();) {
    const int64_t number = begin->range.begin / kTile;
    const auto end =
        std::find_if(begin, segments.end(), [&](const Segment& s) { return s.range.begin / kTile > number; });
    const shard::Range range{number * kTile, std::min((number + 1) * kTile, unit.owned.size())};
    add(unit, grads, range, {begin, end}, end == segments.end(), away);
    begin = end;
  }
}

void TilePipeline::finish() {
  update_next();
  while (!returning_.empty())
    arrive();
}

void TilePipeline::update_next() {
  if (!next_) return;
  const NamedRange range("update", next_->unit().name);
  disks_.run([&] {
    next_->update(units_.rule(), units_.groups(), units_.options(), scale_);
    if (auto returning = next_->set_back(ways_.back)) returning_.push_back(std::move(*returning));
  });
  while (returning_.size() > kReturning)
    arrive();
  if (next_->is_last()) done_(next_->unit());
  next_.reset();
}

void TilePipeline::arrive() {
  const Returning oldest = std::move(returning_.front());
  returning_.pop_front();
  disks_.run_always([&] { oldest.copied->synchronize(); });
  disks_.run([&] { oldest.unit->weights_to_write().store(oldest.range, oldest.to); });
}

void TilePipeline::add(Unit& unit, const shard::Buffer& grads, shard::Range range, std::vector<Segment> segments,
                       bool last, bool away) {
  std::unique_ptr<Tile> tile;
  disks_.run([&] {
    tile = std::make_unique<Tile>(unit, grads, range, std::move(segments), last, away, units_.options().pin_memory);
  });
  update_next();
  if (tile) disks_.run([&] { tile->set_out(ways_.there); });
  if (tile) {
    next_ = std::move(tile);
  } else if (last) {
    done_(unit);
  }
}

}  // namespace tessera::zero
