// DeepSpeed's checkpoints as manifests of our own (checkpoint/manifest.h), made in memory: every tensor where it lies in the .pt
// files. What is no tensor goes into the manifest as the blobs that the engine's own checkpoints have.
#pragma once

#include <string>

#include "tessera/checkpoint/reader.h"

namespace tessera::checkpoint::deepspeed {

inline constexpr const char* kLookedFor = "DeepSpeed's '*_model_states.pt'";

// Returns the text of a manifest of the checkpoint in `folder`; empty where the folder holds none of DeepSpeed's. IoError that
// names the file where one is damaged, missing, or of a kind that cannot be read. Local.
std::string manifest_of(const std::string& folder, const DeepSpeedHints& hints);

}  // namespace tessera::checkpoint::deepspeed
