// An accumulation that has begun, in a checkpoint: every rank's gradients as they are.
// Note [Another number of micro-batches] in restore.h says what it means where gradient_accumulation_steps is another.
//
// Sums over ranks are tensors of kind "gradient", what a rank has added itself is a "partial_gradient" with the rank in its
// name. Where ranks, stage and dtype are the same each rank gets back what it had, and the run goes on with the same bits;
// elsewhere the gradient over all ranks is made of them in fp32.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tessera/checkpoint/reader.h"
#include "tessera/checkpoint/writer.h"
#include "tessera/engine/engine.h"

namespace tessera::engine {

struct SavedRunAccumulation;

inline constexpr const char* kGradient = "gradient";
inline constexpr const char* kPartialGradient = "partial_gradient";

struct SavedAccumulation {
  std::string run;   // JSON, the same on all ranks; empty: no accumulation has begun
  std::string blob;  // this rank's counts, saved as blob_of_accumulation()
  std::vector<checkpoint::Item> items;
};
SavedAccumulation save_accumulation(Engine& engine);
std::string blob_of_accumulation(int place);

class RestoredAccumulation {
 public:
  // `records`: the checkpoint's, by parameter; null where it has none.
  RestoredAccumulation(Engine& engine, const checkpoint::Reader& reader, const SavedRunAccumulation& saved, int place,
                       const std::vector<const checkpoint::ParamRecord*>& records);

  // False: parameters that are slices or experts are spread otherwise here than at the save, so the accumulation begins anew.
  bool fits() const { return fits_; }
  void verify() const;
  // Reads all gradients and puts them into the engine. Local.
  void apply();

 private:
  struct Source {
    const checkpoint::TensorRecord* record;
    double factor;
  };
  struct Wanted {  // the sum of the sources, each times its factor
    zero::HeldGradient gradient;
    checkpoint::Want want;
    std::vector<Source> sources;
  };
  void plan_same(const std::vector<const checkpoint::ParamRecord*>& records, const std::string& blob);
  void plan_other(const std::vector<const checkpoint::ParamRecord*>& records, const SavedRunAccumulation& saved);
  void add(int id, bool reduced, std::vector<Source> sources);

  Engine& engine_;
  const checkpoint::Reader& reader_;
  bool fits_ = true;
  double scale_ = 1;
  zero::Accumulation::State state_;
  std::vector<Wanted> parts_;
};

}  // namespace tessera::engine
