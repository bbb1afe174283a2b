// Layers and losses that run over a long sequence a tile at a time.
//
// Note [Tiles]
//   What a tile saves for its backward lives while that tile runs, not for the whole sequence: the backward computes the tile again.
//   Gradients of parameters are summed inside, in fp32 where they are narrower, and handed over once: the parameter's accumulator,
//   and an engine's hooks on it, see one gradient a backward. The first tile of a forward runs with a graph: its leaves are the
//   parameters that the function uses. The tiles' own backwards run no hooks of accumulators.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::parallel {

// Makes a tensor of the tensors of a tile, by the tile's own elements alone.
using TileFunction = std::function<at::Tensor(const std::vector<at::Tensor>& pieces)>;

struct Tiled {
  TileFunction f;
  std::vector<at::Tensor> tensors;
  std::vector<bool> cut;                // which tensors are given a tile at a time, the others whole
  int64_t dim = 1;                      // the dim that is cut; all have the same length along it
  int64_t count = 1;                    // tiles; fewer where the length is less
  std::vector<std::string> names = {};  // of the tensors, for errors; else their numbers
};
// Runs f on all tiles, as one node of autograd: outputs with dimensions are joined along `join`, scalars summed, each times what
// `weights` has for its tile (a tile of weight 0 counts as nothing, even if it is NaN). Trained tensors and the parameters that f
// reads get their gradients. Value error for a count < 1, tensors to cut that are none or of several lengths, or an f that reads what
// is computed outside and requires gradients.
at::Tensor tiled(const Tiled& tiles, int64_t join, const std::function<std::vector<double>()>& weights = {});
enum class TileReduction : uint8_t { Mean, Sum };
// The same, of scalars summed or, as Mean, by the tokens of each tile: those that are `valid` [batch, sequence], where that is given.
at::Tensor tiled(const Tiled& tiles, int64_t join, TileReduction reduction, const at::Tensor& valid = {});
// The weighted sum of scalars, whose gradients are computed with it in one pass over the tiles.
at::Tensor tiled_with_gradients(const Tiled& tiles, const std::vector<double>& weights);
// Where each tile begins, and its length.
std::vector<std::pair<int64_t, int64_t>> tile_ranges(int64_t length, int64_t count);

// layer(x) of a layer that treats each token by itself; x [..., sequence, hidden].
at::Tensor tiled_mlp(const std::function<at::Tensor(const at::Tensor& x)>& layer, const at::Tensor& x, int64_t tiles);

// Computes logits of a sequence and their loss: all logits are never there at once. loss(x, y, mask) returns a scalar of a tile:
// x [batch, sequence, ...], y [batch, sequence, ...] and, where there is one, mask [batch, sequence]. Mean: a mean over a tile's
// tokens (those whose label is not -100 and whose mask is not 0), and the result is the mean over all; Sum: it is their sum.
// Gradients are computed with the loss, but in fp16, where the loss scale is not known yet: then the backward runs the
// tiles again. Value error for sizes that do not fit and a loss that is no scalar.
using TileLoss = std::function<at::Tensor(const at::Tensor& x, const at::Tensor& y, const at::Tensor& mask)>;
at::Tensor tiled_loss(const TileLoss& loss, const at::Tensor& x, const at::Tensor& y, int64_t tiles,
                      TileReduction reduction = TileReduction::Mean, const at::Tensor& mask = {});

}  // namespace tessera::parallel
