#include "tessera/comm/hosts/stages.h"

#include "tests/comm/collectives.h"
#include "tests/comm/hosts/threads.h"

namespace tessera::comm {
namespace {

using testing::same_bits;

void over_hosts(const std::function<void(const HostsPlace&)>& body) {
  for (const auto& host_of : testing::kHosts) {
    testing::run_hosts(host_of, [&](int rank, ShmSharePtr here, const std::function<GroupPtr()>& between) {
      const HostsPlace place{.hosts = {host_of}, .rank = rank, .here = std::move(here), .between = between()};
      body(place);
      place.between->barrier("end");
    });
  }
}

TEST(HostsStages, Gathers) {
  over_hosts([](const HostsPlace& place) {
    for (const int64_t n : {0, 1, 5, 70001}) {
      const auto in = testing::inputs(1, place.size(), n, at::kFloat);
      const at::Tensor out = at::zeros({place.size() * n});
      hosts_all_gather(place, out, in[place.rank], "x");
      EXPECT_TRUE(same_bits(out, at::cat(in))) << n;
    }
  });
}

TEST(HostsStages, Broadcasts) {
  over_hosts([](const HostsPlace& place) {
    for (int root = 0; root < place.size(); ++root) {
      for (const int64_t n : {0, 3, 50000}) {
        const at::Tensor t = testing::input(2, place.rank, n, at::kDouble);
        hosts_broadcast(place, t, root, "x");
        EXPECT_TRUE(same_bits(t, testing::input(2, root, n, at::kDouble))) << root << ", " << n;
      }
    }
  });
}

TEST(HostsStages, Exchanges) {
  over_hosts([](const HostsPlace& place) {
    const int size = place.size(), me = place.rank;
    const auto split = [](int from, int to) { return int64_t{1000} * ((from + 2 * to) % 3); };
    std::vector<int64_t> sent, received;
    std::vector<at::Tensor> parts, want;
    for (int r = 0; r < size; ++r) {
      sent.push_back(split(me, r));
      received.push_back(split(r, me));
      parts.push_back(testing::input(10 * me + r, 3, sent[r], at::kShort));
      want.push_back(testing::input(10 * r + me, 3, received[r], at::kShort));
    }
    const at::Tensor out = at::zeros_like(at::cat(want));
    hosts_all_to_all(place, out, at::cat(parts), received, sent, "x");
    EXPECT_TRUE(same_bits(out, at::cat(want)));
  });
}

// Numbers whose sum depends on the order.
at::Tensor rough(int rank, int64_t n, at::ScalarType dtype) {
  auto t = testing::input(4, rank, n, at::kFloat);
  for (int i = 0; i < rank; ++i)
    t = t * 37.1f + 0.013f;
  return t.to(dtype);
}

// Host by host, each in rank order, in fp32.
at::Tensor by_hosts(const HostsPlace& place, int64_t n, at::ScalarType dtype) {
  at::Tensor sum;
  for (int h = 0; h < place.hosts.count(); ++h) {
    at::Tensor of_host;
    for (const int r : place.hosts.ranks_on(h)) {
      const at::Tensor row = rough(r, n, dtype).to(dtype == at::kDouble ? at::kDouble : at::kFloat);
      of_host = of_host.defined() ? of_host + row : row;
    }
    sum = sum.defined() ? sum + of_host : of_host;
  }
  return sum;
}

TEST(HostsStages, AddHostByHostWhateverTheCollective) {
  over_hosts([](const HostsPlace& place) {
    const int size = place.size();
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
      for (const int64_t part : {0, 1, 3001}) {
        const int64_t n = part * size;
        const at::Tensor sum = by_hosts(place, n, dtype);
        at::Tensor t = rough(place.rank, n, dtype), out = at::zeros({part}, dtype);
        hosts_reduce_scatter(place, out, t, ReduceOp::Sum, "x");
        EXPECT_TRUE(same_bits(out, sum.narrow(0, place.rank * part, part).to(dtype).clone()));
        hosts_all_reduce(place, t, ReduceOp::Avg, "x");
        EXPECT_TRUE(same_bits(t, (sum / size).to(dtype)));
      }
    }
  });
}

TEST(HostsStages, KnowEveryReduction) {
  over_hosts([](const HostsPlace& place) {
    for (const ReduceOp op : testing::kReductions) {
      const bool bits = op == ReduceOp::BitAnd || op == ReduceOp::BitOr || op == ReduceOp::BitXor;
      const auto dtype = bits ? at::kInt : at::kHalf;
      auto rows = testing::inputs(5, place.size(), 1003, dtype);
      if (op == ReduceOp::Product) {
        for (at::Tensor& row : rows)
          row = row.sign();  // exact in any order
      }
      const at::Tensor want = testing::reference_reduce(rows, op);
      hosts_all_reduce(place, rows[place.rank], op, "x");
      EXPECT_TRUE(same_bits(rows[place.rank], want)) << static_cast<int>(op);
    }
  });
}

}  // namespace
}  // namespace tessera::comm
