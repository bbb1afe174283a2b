// Where masters, optimizer states and parameters live that are not on the device: in host memory, or in a file on a disk.
//
//   zero::Options options;
//   options.home = offload::state_homes({.residence = shard::Residence::Nvme, .folder = "/local/nvme"});
#pragma once

#include <functional>
#include <string>

#include "tessera/offload/nvme_file.h"
#include "tessera/shard/buffer.h"
#include "tessera/shard/named_shard.h"

namespace tessera::offload {

struct StateOptions {
  shard::Residence residence = shard::Residence::Host;
  std::string folder{};  // Nvme: folder on the disk; made where there is none
  // Nvme: buffers of a tile that stay in memory, at least what the pipeline of the update wants: kPipeline a quantity.
  int64_t buffer_count = 0;
  int64_t in_memory = 0;  // Nvme: elements, by buffers, that live in host memory instead, the first ones of a thread
  // Page-locked host memory for a model on a device: for values that live there, and for transfers of files. pin_asked: of such
  // values only buffers whose TensorOptions ask for it.
  bool pin_memory = false, pin_asked = false;
  std::string what = "optimizer states";  // for warnings
  QueueMaker make_queue{};                // Nvme: how files are read and written; empty: io::make_queue
};

// Tiles of a quantity that are in memory at once: one is read, one updated, one written.
inline constexpr int64_t kPipeline = 3;

// Makes zero::Options::home and weight_home. Host: null for buffers of a model on the CPU, which are there already; warns once.
// Nvme: what one thread asks for lies in one file while any of it is alive. A home that cannot be had is an error when it is
// asked for: value error without a folder, IoError that names it.
std::function<shard::HomePtr(shard::Quantity, int64_t size, const at::TensorOptions&)> state_homes(
    StateOptions options);

}  // namespace tessera::offload
