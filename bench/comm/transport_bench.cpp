// Collectives between processes of this host: Gloo beside shared memory.
//
// usage: transport_bench [RANKS]     2 unless given
//
// Starts the ranks itself. Every figure is the median of kRounds rounds of equal calls; the two transports take turns
// round by round, so that other load on the machine meets both. Prints microseconds per call, with the fastest and slowest
// round, and the ratio of the medians. Results are compared bit for bit first.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/backends.h"

namespace {

using tessera::comm::GroupPtr;
using tessera::comm::ReduceOp;

constexpr int kRounds = 7;

struct Buffers {
  at::Tensor whole, part, other;
};
using Call = std::function<void(tessera::comm::Group&, Buffers&)>;

struct Kind {
  const char* name;
  Call call;
};

const std::vector<Kind> kKinds = {
    {"all_reduce", [](auto& group, auto& b) { group.all_reduce(b.whole, ReduceOp::Sum).wait(); }},
    {"reduce_scatter", [](auto& group, auto& b) { group.reduce_scatter(b.part, b.whole, ReduceOp::Sum).wait(); }},
    {"all_gather", [](auto& group, auto& b) { group.all_gather(b.whole, b.part).wait(); }},
    {"all_to_all", [](auto& group, auto& b) { group.all_to_all(b.other, b.whole).wait(); }},
};

double microseconds(tessera::comm::Group& group, const Call& call, Buffers& buffers, int calls) {
  group.barrier();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i)
    call(group, buffers);
  const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
  return time.count() / calls;
}

struct Figure {
  double median, fastest, slowest;
};
Figure figure(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {values[values.size() / 2], values.front(), values.back()};
}

void measure(const std::vector<GroupPtr>& groups, const Kind& kind, int64_t bytes) {
  const int ranks = groups[0]->size();
  const int64_t n = bytes / 4 / ranks * ranks;
  Buffers buffers{at::zeros({n}), at::zeros({n / ranks}), at::zeros({n})};
  const int calls = static_cast<int>(std::clamp<int64_t>((int64_t{16} << 20) / bytes, 2, 300));
  std::vector<std::vector<double>> times(groups.size());
  for (int round = -1; round < kRounds; ++round) {
    for (size_t g = 0; g < groups.size(); ++g) {
      const double time = microseconds(*groups[g], kind.call, buffers, round < 0 ? 2 : calls);
      if (round >= 0) times[g].push_back(time);
    }
  }
  if (groups[0]->rank() != 0) return;
  const Figure gloo = figure(times[0]), shared = figure(times[1]);
  std::printf("| %s | %lld | %.1f (%.1f-%.1f) | %.1f (%.1f-%.1f) | %.1f |\n", kind.name,
              static_cast<long long>(bytes / 1024), gloo.median, gloo.fastest, gloo.slowest, shared.median,
              shared.fastest, shared.slowest, gloo.median / shared.median);
  std::fflush(stdout);
}

bool equal_bits(const std::vector<GroupPtr>& groups) {
  at::Tensor input = at::randn({100003});
  at::Tensor a = input.clone(), b = input.clone();
  groups[0]->all_reduce(a, ReduceOp::Avg).wait();
  groups[1]->all_reduce(b, ReduceOp::Avg).wait();
  return a.equal(b);
}

int run_rank() {
  at::set_num_threads(1);
  std::vector<GroupPtr> groups;
  for (const char* transport : {"gloo", "shared_memory"}) {
    setenv("TESSERA_TRANSPORT", transport, 1);
    groups.push_back(tessera::comm::environment_group());
  }
  if (!equal_bits(groups)) {
    std::fprintf(stderr, "the transports give different results\n");
    return 1;
  }
  if (groups[0]->rank() == 0)
    std::printf("| call | KiB | Gloo us | shared memory us | ratio |\n|---|---|---|---|---|\n");
  const Kind barrier{"barrier", [](auto& group, auto&) { group.barrier(); }};
  measure(groups, barrier, 4 << 10);
  for (const Kind& kind : kKinds) {
    for (const int64_t bytes : {4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20})
      measure(groups, kind, bytes);
  }
  groups[0]->barrier();  // rank 0 has the store
  return 0;
}

int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  bind(fd, reinterpret_cast<sockaddr*>(&address), length);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  close(fd);
  return ntohs(address.sin_port);
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  if (ranks < 2) {
    std::fprintf(stderr, "usage: transport_bench [RANKS]   at least 2\n");
    return 2;
  }
  setenv("WORLD_SIZE", std::to_string(ranks).c_str(), 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("MASTER_PORT", std::to_string(free_port()).c_str(), 1);
  for (int rank = 0; rank < ranks; ++rank) {
    if (fork() != 0) continue;
    setenv("RANK", std::to_string(rank).c_str(), 1);
    return run_rank();
  }
  int failed = 0;
  for (int status = 0; wait(&status) > 0;)
    failed |= status != 0;
  return failed;
}
