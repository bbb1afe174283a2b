#include "tessera/engine/logical.h"

#include <gtest/gtest.h>

#include "tests/support/toy.h"

namespace tessera::testing {

using comm::Axis;

TEST(Logical, NamesOfWhatDiffersAlongAxes) {
  run_axes({{Axis::DpShard, 2}, {Axis::Tp, 3}}, [&](int, const comm::Mesh& mesh) {
    auto specs = Toy().specs();
    specs[1].varies = {Axis::DpShard, Axis::Tp, Axis::Sp};  // one rank along sp
    specs[3].varies = Axis::Tp;
    specs[3].cut = shard::cut_along({17 * 3, 5}, 0, {{17 * mesh.rank(Axis::Tp), 17 * mesh.rank(Axis::Tp) + 17}});
    const engine::Engine engine(toy_options({}), mesh, specs, {toy_adamw()});
    const auto name = [&](int id) { return engine::file_name_of(engine, engine.params()[id]); };
    EXPECT_EQ(name(0), "a");
    EXPECT_EQ(name(1), c10::str("b@dp_shard=", mesh.rank(Axis::DpShard), ",tp=", mesh.rank(Axis::Tp)));
    EXPECT_EQ(name(3), "w1") << "its cut says which part it is";
    EXPECT_EQ(engine::whole_shape(engine.params()[3], shard::Form(specs[3].tensor)), (std::vector<int64_t>{51, 5}));
    const auto places = engine::places_of(engine, engine.params()[1]);
    ASSERT_EQ(places.size(), 6u);
    EXPECT_EQ(places[4], (std::vector<checkpoint::Along>{{"dp_shard", 1, 2}, {"tp", 1, 3}}));
    EXPECT_EQ(engine::places_of(engine, engine.params()[0]).size(), 1u);
  });
}

}  // namespace tessera::testing
