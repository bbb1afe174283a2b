// Where the elements of a tensor lie in files of DeepSpeed's, and the words of these files.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/deepspeed/pt_file.h"
#include "tessera/checkpoint/deepspeed/save.h"

namespace tessera::checkpoint::deepspeed {

inline constexpr int64_t kMostNumber = int64_t{1} << 53;   // that every reader of JSON holds
inline constexpr const char* kOwnSteps = "tessera_steps";  // of optim-states, beside DeepSpeed's keys: by parameter
// A file of our own beside DeepSpeed's, which it ignores: buffers that ranks have otherwise than rank 0, "NAME@rank=N".
inline constexpr const char* kOwnBuffers = "tessera_rank_buffers.pt";
// In the blob "optimizer-N", beside the states of a parameter that are neither one number nor one for each element: what of the
// parameter they are of: first element, last, shape, slice, of how many.
inline constexpr const char* kCut = "tessera.cut";
inline constexpr const char* kMaster = "master";
inline constexpr const char* kWeight = "weight";
inline constexpr const char* kBuffer = "buffer";
inline constexpr const char* kRankBuffer = "rank_buffer";

// A tensor as a manifest has it.
struct Held {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> order;
  std::vector<Piece> pieces;
};
Held whole(const TensorRef& tensor);
// Elements [low, high) of a parameter, which begin at element `at` of the tensor.
void add_piece(Held& held, const TensorRef& tensor, int64_t at, int64_t low, int64_t high);
// Of a parameter that stage 3 has cut: element `at` of each part is the first one of it.
Held sharded(const std::vector<const TensorRef*>& parts, int64_t at, int64_t numel);

// How many wrote a model-states file and those beside it.
int64_t ranks_of(const PtFile& file);
// What a run of ours says of data-parallel ranks (spread_of in engine/logical.h).
std::string ranks_text(int64_t world);
// A few of them.
std::string shown(const std::vector<int64_t>& ranks);

}  // namespace tessera::checkpoint::deepspeed
