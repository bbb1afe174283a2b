// Weights of live engines as files, whatever they are spread over.
#include "tessera/engine/export.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "tessera/io/safetensors.h"
#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"
#include "tests/support/toy.h"

namespace tessera::testing {

using comm::Axis;
using engine::Engine;
using io::TempFolder;

namespace {

std::map<std::string, at::Tensor> read_files(const std::string& folder, const std::vector<std::string>& names) {
  std::map<std::string, at::Tensor> found;
  for (const std::string& name : names) {
    if (name.ends_with(".json")) continue;
    const io::File file = io::File::open(folder + "/" + name);
    for (const io::TensorEntry& entry : io::read_safetensors(file).tensors) {
      found[entry.name] = at::empty(entry.shape, at::TensorOptions(entry.dtype));
      file.read(found[entry.name].mutable_data_ptr(), entry.end - entry.begin, entry.begin);
    }
  }
  return found;
}

const at::Tensor& whole() {
  static const at::Tensor values = at::arange(6 * 40, at::kFloat).view({6, 40});
  return values;
}

// A matrix that lies column by column, a frozen one, one cut along tp, an expert, and one of integers.
std::vector<engine::ParamSpec> specs_of(const comm::Mesh& mesh) {
  const int64_t tp = mesh.rank(Axis::Tp), rows = 6 / mesh.size(Axis::Tp);
  std::vector<engine::ParamSpec> specs{{"turned", whole().t().clone().t(), 0, "a"},
                                       {"still", whole() + 0.5, -1, "a"},
                                       {"cut", whole().slice(0, tp * rows, (tp + 1) * rows).clone(), 0, "b"},
                                       {"expert", at::full({33}, mesh.rank(Axis::DpShard)).to(at::kFloat), 0, "b"},
                                       {"numbers", at::arange(50), -1, "b"},
                                       {"none", at::zeros({0, 2}), 0, "b"}};
  specs[2].varies = Axis::Tp;
  specs[2].cut = shard::cut_along({6, 40}, 0, {{tp * rows, (tp + 1) * rows}});
  specs[3].varies = Axis::DpShard;
  for (auto& spec : specs)
    if (spec.group >= 0) spec.tensor.requires_grad_(true);
  return specs;
}

std::vector<engine::LiveTensor> tensors_of(const Engine& engine, int rank) {
  std::vector<engine::LiveTensor> tensors;
  for (int id = 0; id < static_cast<int>(engine.params().size()); ++id)
    tensors.push_back({{engine.params()[id].name}, id});
  tensors[1].names.emplace_back("tied");
  tensors.push_back({{"buffer"}, -1, at::full({3}, rank, at::kInt)});
  return tensors;
}

}  // namespace

TEST(ExportWeights, EveryStageAndSpread) {
  for (const auto& sizes : std::vector<AxisSizes>{{{Axis::DpShard, 1}},
                                                  {{Axis::DpShard, 3}},
                                                  {{Axis::DpShard, 2}, {Axis::Tp, 2}},
                                                  {{Axis::DpReplicate, 2}, {Axis::DpShard, 2}, {Axis::Sp, 2}}}) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (const bool bf16 : {false, true}) {
        const TempFolder folder;
        run_axes(sizes, [&](int rank, const comm::Mesh& mesh) {
          Engine engine(toy_options({.stage = stage, .bf16 = bf16, .persistence = 0}), mesh, specs_of(mesh),
                        {toy_adamw()});
          const auto names =
              engine::export_weights(engine, tensors_of(engine, rank), folder.path(), "model.safetensors", 800);
          if (rank != 0) return;
          const auto found = read_files(folder.path(), names);
          const at::ScalarType dtype = bf16 ? at::kBFloat16 : at::kFloat;
          const auto expect = [&](const std::string& name, const at::Tensor& value) {
            ASSERT_TRUE(found.contains(name)) << name;
            EXPECT_EQ(found.at(name).scalar_type(), value.scalar_type()) << name;
            EXPECT_TRUE(found.at(name).equal(value)) << name << " stage " << stage;
          };
          expect("turned", whole().to(dtype));
          expect("still", (whole() + 0.5).to(engine.params()[1].tensor.scalar_type()));
          expect("cut", whole().to(dtype));
          expect("numbers", at::arange(50));
          expect("none", at::zeros({0, 2}, dtype));
          expect("buffer", at::zeros({3}, at::kInt));
          const int experts = mesh.size(Axis::DpShard);
          for (int i = 0; i < experts; ++i)
            expect(experts == 1 ? "expert" : c10::str("expert@dp_shard=", i), at::full({33}, i).to(dtype));
          EXPECT_EQ(found.size(), 6u + experts);
        });
      }
    }
  }
}

// An error of rank 0 is one of all, nothing of the new files stays, and the engine goes on.
TEST(ExportWeights, AllOrNothing) {
  const TempFolder folder;
  for (const int stage : {1, 3}) {
    run_axes({{Axis::DpShard, 2}}, [&](int rank, const comm::Mesh& mesh) {
      Engine engine(toy_options({.stage = stage, .persistence = 0}), mesh, specs_of(mesh), {toy_adamw()});
      const auto tensors = tensors_of(engine, rank);
      engine::export_weights(engine, tensors, folder.path(), "model.safetensors", 1 << 20);
      auto broken = tensors;
      broken.push_back({{"sparse"}, -1, at::eye(3).to_sparse()});
      const auto to = [&](const std::string& path, const std::vector<engine::LiveTensor>& all) {
        return error_of([&] { engine::export_weights(engine, all, path, "model.safetensors", 800); });
      };
      EXPECT_HAS(to(folder.path(), broken), "'sparse' is not a dense tensor");
      EXPECT_HAS(to(folder / "model.safetensors/deeper", tensors), "cannot make the folder");
      auto other = tensors;
      if (rank == 1) other.pop_back();
      EXPECT_HAS(to(folder.path(), other), "other tensors");
      if (rank == 0) {
        std::set<std::string> names;
        for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
          names.insert(entry.path().filename().string());
        EXPECT_EQ(names, std::set<std::string>{"model.safetensors"});
        EXPECT_TRUE(read_files(folder.path(), {"model.safetensors"}).at("still").equal(whole() + 0.5));
      }
      mesh.group(Axis::DpShard)->barrier();
    });
  }
}

}  // namespace tessera::testing
