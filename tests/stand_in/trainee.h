// Test support: an engine on the stand-in that trains the toy, wherever its states and weights live, and what its calls come to.
#pragma once

#include "tessera/offload/states.h"
#include "tests/stand_in/staged_group.h"
#include "tests/support/modes.h"
#include "tests/support/training.h"

namespace tessera::testing {

using engine::Engine;
using shard::Residence;

inline c10::Device device_for_limits(int rank) {
  return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(rank)};
}

struct Limited {
  ToyRun run;
  Residence states = Residence::Device, weights = Residence::Device;
  bool timed = false, pin = true;
  std::string folder{};  // of what lives on a disk
  bool frozen = false;   // the toy's "a", which is all of a unit, and "c"
  double share = 0;      // of states that live elsewhere, the device's
};

inline std::string text_of(const Limited& row) {
  return "stage " + std::to_string(row.run.stage) + (row.run.in_backward ? ", in the backward" : "") +
         (row.run.runs_on ? ", running on" : "") + ", states " + std::to_string(static_cast<int>(row.states)) +
         ", weights " + std::to_string(static_cast<int>(row.weights)) + (row.share > 0 ? ", shared" : "") + ", " +
         c10::toString(row.run.precision.value_or(amp::PrecisionPolicy::fp32()).param) + (row.frozen ? ", frozen" : "");
}

// `modes`: numbers of all_modes(); the first one on the disk of `folder` too, the last one with frozen parameters too. `small`:
// in stage 3 small parameters stay whole.
inline std::vector<Limited> limited_rows(const std::vector<size_t>& modes = {0, 2, 5}, bool small = true,
                                         const std::string& folder = "") {
  using enum Residence;
  std::vector<Limited> all;
  const auto all_of_them = all_modes();
  for (int stage = 0; stage <= 3; ++stage) {
    for (const size_t mode : modes) {
      for (const bool in_backward : {false, true}) {
        ToyRun run{
            .stage = stage, .clip = in_backward ? 0 : 0.5, .precision = all_of_them[mode], .in_backward = in_backward};
        if (!small) run.persistence = 0;
        if (in_backward && stage == 0) continue;
        std::vector<std::pair<Residence, Residence>> places{{Device, Device}};
        if (stage > 0) places.emplace_back(Host, Device);
        if (stage == 3) places.insert(places.end(), {{Host, Host}, {Device, Host}});
        const bool disk = !folder.empty() && mode == modes.front();
        if (disk && stage > 0) places.emplace_back(Nvme, Device);
        if (disk && stage == 3) places.insert(places.end(), {{Nvme, Nvme}, {Device, Nvme}});
        for (const auto& [states, weights] : places) {
          all.push_back({.run = run, .states = states, .weights = weights, .folder = folder});
          const bool shares = states == Host && weights == Device && mode < 4;  // states of 32 bits
          if (shares) all.push_back({.run = run, .states = Host, .share = 0.5});
          if (shares && in_backward && mode == modes.front()) all.back().run.runs_on = true;
          if (mode != modes.back() || states == Nvme) continue;
          all.push_back(all.back());
          all.back().frozen = true;
        }
      }
    }
  }
  return all;
}

struct Trainee {
  explicit Trainee(const Limited& r, int rank = 0, bool builds = true) : row(r), device(device_for_limits(rank)) {
    toy.enclosed = true;
    for (at::Tensor& t : toy.tensors)
      t = t.detach().to(device).requires_grad_(true);
    for (const size_t i : {0, 2})
      toy.tensors[i].requires_grad_(!row.frozen);
    if (builds) build(comm::single_group());
  }
  // `fails`: as of StagedGroup.
  void build(comm::GroupPtr group, std::shared_ptr<const std::string> fails = nullptr) {
    engine::Options options = toy_options(row.run);
    options.time_device = row.timed;
    const auto home = [this](Residence where) {
      return offload::state_homes({.residence = where, .folder = row.folder, .pin_memory = row.pin});
    };
    if (row.states != Residence::Device) options.zero.home = home(row.states);
    options.zero.device_share = row.share;
    if (row.weights != Residence::Device) options.zero.weight_home = home(row.weights);
    if (group->size() > 1) group = std::make_shared<StagedGroup>(group, std::move(fails));
    std::vector<engine::ParamSpec> specs = toy.specs();
    for (engine::ParamSpec& spec : specs)
      spec.group = spec.tensor.requires_grad() ? 0 : -1;
    engine = std::make_unique<Engine>(options, comm::Mesh(group), specs, std::vector{toy_adamw()});
  }

  void step(int number) {
    toy_forward(*engine, toy, toy_batch(0, number).to(device)).backward();
    engine->step();
    engine->finish_update();
  }
  std::vector<at::Tensor> states() {
    std::vector<at::Tensor> all;
    for (const at::Tensor& t : all_states(*engine))
      all.push_back(t.cpu());
    return all;
  }

  Limited row;
  c10::Device device;
  Toy toy;
  std::unique_ptr<Engine> engine;
};

struct Outcome {
  std::string text{};  // "": it went well
  bool of_memory = false;
  bool has(const std::string& part) const { return text.find(part) != std::string::npos; }
};

template <class F>
Outcome outcome_of(const F& f) {
  try {
    f();
  } catch (const c10::OutOfMemoryError& error) {
    return {error.what_without_backtrace(), true};
  } catch (const c10::Error& error) {
    return {error.what_without_backtrace()};
  } catch (const std::exception& error) {
    return {error.what()};
  }
  return {};
}

// f() with the n-th allocation of a device failing.
template <class F>
Outcome outcome_without_memory(int device, int64_t number, const F& f) {
  tessera_stand_in_fail_allocation(device, number);
  const Outcome outcome = outcome_of(f);
  tessera_stand_in_fail_allocation(device, -1);
  return outcome;
}

}  // namespace tessera::testing
