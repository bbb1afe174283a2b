// Where the elements of a tensor lie in files of DeepSpeed's, and the words of these files.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/deepspeed/pt_file.h"
#include "tessera/checkpoint/deepspeed/save.h"

namespace tessera::checkpoint::deepspeed {

inline constexpr int64_t kMostNumber = int64_t{1} << 53;   // the largest number that every reader of JSON holds
inline constexpr const char* kOwnSteps = "tessera_steps";  // a key of ours beside DeepSpeed's: updates by parameter
// A file of ours beside DeepSpeed's, which DeepSpeed ignores: buffers that differ from rank 0's, named "NAME@rank=N".
inline constexpr const char* kOwnBuffers = "tessera_rank_buffers.pt";
// A key in the blob "optimizer-N" beside a parameter's states that are neither one number nor one value for each element. It says
// which part of the parameter they belong to: first element, last, shape, which slice, of how many.
inline constexpr const char* kCut = "tessera.cut";
inline constexpr const char* kMaster = "master";
inline constexpr const char* kWeight = "weight";
inline constexpr const char* kBuffer = "buffer";
inline constexpr const char* kRankBuffer = "rank_buffer";

// A tensor's record in a manifest: its dtype, its order and where its pieces lie.
struct Held {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> order;
  std::vector<Piece> pieces;
};
Held whole(const TensorRef& tensor);
// Adds elements [low, high) of a parameter, which begin at element `at` of the tensor.
void add_piece(Held& held, const TensorRef& tensor, int64_t at, int64_t low, int64_t high);
// The pieces of a parameter that stage 3 cut: it begins at element `at` of every rank's part.
Held sharded(const std::vector<const TensorRef*>& parts, int64_t at, int64_t numel);

// The number of data-parallel ranks that wrote the model-states `file` and the files beside it.
int64_t ranks_of(const PtFile& file);
// What a run of ours writes about its ranks where all are data-parallel ones (spread_of in engine/logical.h).
std::string ranks_text(int64_t world);
// The ranks as an error shows them: the first few, and how many more there are.
std::string shown(const std::vector<int64_t>& ranks);

}  // namespace tessera::checkpoint::deepspeed
