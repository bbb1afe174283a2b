#include "tessera/comm/c10d/own_group.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/comm/c10d/compat.h"
#include "tessera/comm/c10d/gloo.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr auto kEnded = "ended";

c10::intrusive_ptr<c10d::Backend> backend_for(c10d::ProcessGroup& group, c10::Device device) {
  TESSERA_CHECK_VALUE(compat::has_backend_for(group, device.type()), "comm", "process group '", group.getGroupName(),
                      "' has no back end for tensors of ", device.type());
  const auto backend = without_checks(group.getBackend(device.type()));
  TESSERA_CHECK_BUILT(backend->supportsSplitting(), "comm", "the back end '", backend->getBackendName(), "' of ",
                      device.type(),
                      " cannot be split; gathers and reductions need communicators of their own: use NCCL "
                      "or Gloo");
  return backend;
}

// A back end splits itself for the device that it is bound to.
class BoundTo {
 public:
  BoundTo(c10d::Backend& backend, c10::Device device) : backend_(backend), before_(backend.getBoundDeviceId()) {
    if (device.has_index() && !device.is_cpu()) backend_.setBoundDeviceId(device);
  }
  ~BoundTo() { backend_.setBoundDeviceId(before_); }

 private:
  c10d::Backend& backend_;
  const std::optional<c10::Device> before_;
};

}  // namespace

OwnGroup::OwnGroup(std::shared_ptr<C10dCore> core, int64_t instance, c10::Device device)
    : core_(std::move(core)),
      device_(device),
      store_(core_->watched_store("siblings/" + std::to_string(instance))),
      backend_(backend_for(core_->group(), device)) {
  const auto launched = Clock::now();
  try {
    split();
    connect();
  } catch (const std::exception& error) {
    core_->fail({.name = "sibling", .label = c10::str("for tensors of ", device)}, launched, -1, error.what());
  }
}

void OwnGroup::split() {
  std::vector<int> ranks(core_->size());
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto options = backend_->getBackendOptions();
  // torch reads the ranks' numbers among all, which it has for all groups but the default one.
  if (options->global_ranks_in_group.empty()) options->global_ranks_in_group.assign(ranks.begin(), ranks.end());
  {
    const BoundTo bound(*backend_, device_);
    backend_ = backend_->split(store_, ranks, options);
  }
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store_, core_->rank(), core_->size());
  const auto type = c10d::ProcessGroup::strToBackendType(backend_->getBackendName());
  group->setBackend(device_.type(), type, backend_);
  group->setDefaultBackend(type);
  group_ = hold_group(core_->hold(), std::move(group));
}

// Makes each kind of collective once: back ends set it up at its first call, and wait for the other ranks there.
void OwnGroup::connect() {
  const at::AutoDispatchBelowADInplaceOrView guard;
  at::Tensor part = at::zeros({1}, at::TensorOptions(device_)), whole = at::zeros({core_->size()}, part.options());
  device_ = part.device();
  std::vector<at::Tensor> one = {part};
  group_->allreduce(one)->wait();
  group_->_allgather_base(whole, part)->wait();
  group_->_reduce_scatter_base(part, whole)->wait();
  mark_end();
}

void OwnGroup::mark_end() {
  if (device_.is_cpu()) return;
  const std::scoped_lock lock(mutex_);
  if (!end_) end_.emplace(device_.type());
  end_->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

void OwnGroup::keep(LeftTransfers left) {
  const std::scoped_lock lock(mutex_);
  std::erase_if(left_, [this](const LeftTransfers& one) { return core_->have_come(one); });
  left_.push_back(std::move(left));
}

bool OwnGroup::ended() {
  const std::scoped_lock lock(mutex_);
  return !end_ || end_->query();
}

void OwnGroup::await_others() {
  const auto until = Clock::now() + kOthersEnd;
  int64_t count = store_->add(kEnded, 1);
  while (count < core_->size() && Clock::now() < until && !core_->failed()) {
    std::this_thread::sleep_for(milliseconds(2));
    count = store_->add(kEnded, 0);
  }
}

void OwnGroup::leave() {
  LeftTransfers all{.memory = {}, .transfers = {}, .group = std::move(group_), .backend = std::move(backend_)};
  for (LeftTransfers& one : left_) {
    std::ranges::move(one.memory, std::back_inserter(all.memory));
    std::ranges::move(one.transfers, std::back_inserter(all.transfers));
  }
  core_->keep(std::move(all));
}

OwnGroup::~OwnGroup() {
  std::erase_if(left_, [this](const LeftTransfers& one) { return core_->have_come(one); });
  if (!left_.empty()) {
    attempt([&] { leave(); });
    return;
  }
  attempt([&] {
    const auto until = Clock::now() + backend_->getBackendOptions()->timeout;
    while (!ended() && Clock::now() < until && !core_->failed())
      std::this_thread::sleep_for(milliseconds(1));
  });
  if (!core_->failed()) attempt([&] { await_others(); });
  attempt([&] { backend_->abort(); });
}

}  // namespace tessera::comm
