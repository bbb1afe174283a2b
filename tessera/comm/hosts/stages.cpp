#include "tessera/comm/hosts/stages.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/comm/reduce_rows.h"
#include "tessera/comm/shm/op.h"
#include "tessera/comm/shm/pieces.h"

namespace tessera::comm {
namespace {

using Counts = std::vector<int64_t>;

// Which ranks talk to each other. The place of a rank is its number among the ranks of its host. Ranks at the same place on other
// hosts, counted round where a host has fewer ranks, are a rank's partners there.
class Partners {
 public:
  explicit Partners(const HostsPlace& place)
      : rank_(place.rank), hosts_(place.hosts), place_of_(hosts_.of_rank.size()) {
    for (int h = 0; h < hosts_.count(); ++h) {
      ranks_.push_back(hosts_.ranks_on(h));
      for (size_t i = 0; i < ranks_[h].size(); ++i)
        place_of_[ranks_[h][i]] = static_cast<int>(i);
    }
  }

  int size() const { return static_cast<int>(place_of_.size()); }
  int hosts() const { return hosts_.count(); }
  int host(int rank) const { return hosts_.of_rank[rank]; }
  int place(int rank) const { return place_of_[rank]; }
  int my_host() const { return host(rank_); }
  int my_place() const { return place(rank_); }
  // The ranks of this host, ascending.
  const std::vector<int>& neighbours() const { return ranks_[my_host()]; }
  // The rank of `host` by way of which `rank` sends to, and receives from, all ranks of that host. On the host of `rank` it is
  // `rank` itself.
  int partner(int rank, int host) const { return ranks_[host][place(rank) % ranks_[host].size()]; }
  // The ranks, ascending, that use this host's rank number `i` in that way.
  std::vector<int> dealt_with(int i) const {
    std::vector<int> result;
    for (int r = 0; r < size(); ++r) {
      if (partner(r, my_host()) == neighbours()[i]) result.push_back(r);
    }
    return result;
  }

 private:
  const int rank_;
  const Hosts hosts_;
  std::vector<std::vector<int>> ranks_;  // by host
  std::vector<int> place_of_;
};

at::Tensor flat_bytes(const at::Tensor& t) {
  return at::from_blob(bytes_of(t), {static_cast<int64_t>(t.nbytes())}, at::TensorOptions(at::kByte));
}

at::Tensor room(int64_t elements, c10::ScalarType dtype) {
  return at::empty({elements}, at::TensorOptions(dtype));
}

int64_t total(const Counts& counts) {
  int64_t sum = 0;
  for (const int64_t n : counts)
    sum += n;
  return sum;
}

Counts begins(const Counts& counts) {
  Counts result;
  int64_t at = 0;
  for (const int64_t n : counts) {
    result.push_back(at);
    at += n;
  }
  return result;
}

void run(const HostsPlace& place, const ShmOpPtr& op) {
  place.here->world->launch(place.here->channel, op);
  place.here->world->wait(place.here->channel, *op, {});
}

int size_here(const HostsPlace& place) {
  return place.here->world->size();
}

// Copies elements [begin, begin + count) of a flat tensor.
void copy_part(const at::Tensor& to, int64_t to_begin, const at::Tensor& from, int64_t begin, int64_t count) {
  const auto width = static_cast<int64_t>(from.element_size());
  copy_bytes(bytes_of(to) + to_begin * width, bytes_of(from) + begin * width, count * width);
}

c10::ScalarType wide(c10::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf ? at::kFloat : dtype;
}

// Sums parts: rank r's of `in` has counts[r] elements. Returns what all have brought for this rank, in the wide dtype; for an
// average this has yet to be divided.
at::Tensor sum_between(const HostsPlace& place, const Partners& partners, const at::Tensor& in, const Counts& counts,
                       ReduceOp op, const std::string& text) {
  // Within the host neighbour i adds the parts of the ranks that it deals with.
  const at::Tensor from = in.view(-1).to(wide(in.scalar_type()));
  const Counts begin = begins(counts);
  ShmTensors blocks;
  for (int i = 0; i < size_here(place); ++i) {
    const auto dealt = partners.dealt_with(i);
    int64_t at = 0;
    for (const int r : dealt)
      at += counts[r];
    blocks.push_back(room(at, from.scalar_type()));
    at = 0;
    for (const int r : dealt) {
      copy_part(blocks[i], at, from, begin[r], counts[r]);
      at += counts[r];
    }
  }
  const at::Tensor summed = at::empty_like(blocks[partners.my_place()]);
  run(place, shm_reduce_scatter(partners.my_place(), size_here(place), summed, blocks, op, text));
  // Between hosts every sum travels to the rank whose part it is.
  const int64_t mine = counts[place.rank];
  Counts sent(partners.size(), 0), received(partners.size(), 0);
  for (const int r : partners.dealt_with(partners.my_place()))
    sent[r] = counts[r];
  for (int h = 0; h < partners.hosts(); ++h)
    received[partners.partner(place.rank, h)] = mine;
  const at::Tensor sums = room(mine * partners.hosts(), from.scalar_type());
  place.between->all_to_all(sums, summed, received, sent, text).wait();
  const Counts at = begins(received);
  std::vector<const void*> rows;
  rows.reserve(partners.hosts());
  for (int h = 0; h < partners.hosts(); ++h)
    rows.push_back(bytes_of(sums) + at[partners.partner(place.rank, h)] * static_cast<int64_t>(sums.element_size()));
  at::Tensor result = room(mine, from.scalar_type());
  reduce_rows(result.mutable_data_ptr(), rows.data(), partners.hosts(), mine, from.scalar_type(), op);
  return result;
}

// Shares parts: rank r's of `out` has counts[r] elements; `mine` is this rank's.
void share(const HostsPlace& place, const Partners& partners, const at::Tensor& out, const at::Tensor& mine,
           const Counts& counts, const std::string& text) {
  // Between hosts the part goes to the partner on every host, on this one to the rank itself.
  Counts sent(partners.size(), 0), received(partners.size(), 0);
  for (int h = 0; h < partners.hosts(); ++h)
    sent[partners.partner(place.rank, h)] = counts[place.rank];
  for (const int r : partners.dealt_with(partners.my_place()))
    received[r] = counts[r];
  const at::Tensor copies = room(total(sent), out.scalar_type()), dealt = room(total(received), out.scalar_type());
  for (int h = 0; h < partners.hosts(); ++h)
    copy_part(copies, h * counts[place.rank], mine, 0, counts[place.rank]);
  place.between->all_to_all(dealt, copies, received, sent, text).wait();
  // Within the host every rank gets the parts of all.
  ShmTensors blocks;
  for (int i = 0; i < size_here(place); ++i) {
    int64_t n = 0;
    for (const int r : partners.dealt_with(i))
      n += counts[r];
    blocks.push_back(room(n, out.scalar_type()));
  }
  run(place, shm_all_gather(partners.my_place(), size_here(place), blocks, dealt, text));
  const Counts begin = begins(counts);
  for (int i = 0; i < size_here(place); ++i) {
    int64_t at = 0;
    for (const int r : partners.dealt_with(i)) {
      copy_part(out, begin[r], blocks[i], at, counts[r]);
      at += counts[r];
    }
  }
}

at::Tensor rounded(const at::Tensor& sum, c10::ScalarType dtype, ReduceOp op, int ranks) {
  if (op == ReduceOp::Avg) sum.div_(ranks);
  return sum.to(dtype);
}

// An average over several steps is a sum first.
ReduceOp step_of(ReduceOp op) {
  return op == ReduceOp::Avg ? ReduceOp::Sum : op;
}

}  // namespace

void hosts_all_gather(const HostsPlace& place, const at::Tensor& out, const at::Tensor& in, const std::string& text) {
  const Partners partners(place);
  share(place, partners, flat_bytes(out), flat_bytes(in), Counts(partners.size(), static_cast<int64_t>(in.nbytes())),
        text);
}

void hosts_reduce_scatter(const HostsPlace& place, const at::Tensor& out, const at::Tensor& in, ReduceOp op,
                          const std::string& text) {
  const Partners partners(place);
  const at::Tensor sum = sum_between(place, partners, in, Counts(partners.size(), out.numel()), step_of(op), text);
  const at::Tensor result = rounded(sum, out.scalar_type(), op, partners.size());
  copy_bytes(bytes_of(out), bytes_of(result), static_cast<int64_t>(out.nbytes()));
}

void hosts_all_reduce(const HostsPlace& place, const at::Tensor& tensor, ReduceOp op, const std::string& text) {
  const Partners partners(place);
  Counts counts;
  for (int r = 0; r < partners.size(); ++r)
    counts.push_back(tensor.numel() * (r + 1) / partners.size() - tensor.numel() * r / partners.size());
  const at::Tensor sum = sum_between(place, partners, tensor, counts, step_of(op), text);
  const at::Tensor mine = rounded(sum, tensor.scalar_type(), op, partners.size());
  for (int64_t& n : counts)
    n *= static_cast<int64_t>(tensor.element_size());
  share(place, partners, flat_bytes(tensor), flat_bytes(mine), counts, text);
}

void hosts_broadcast(const HostsPlace& place, const at::Tensor& tensor, int root, const std::string& text) {
  const Partners partners(place);
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  Counts sent(partners.size(), 0), received(partners.size(), 0);
  for (int h = 0; h < partners.hosts(); ++h) {
    if (place.rank == root && h != partners.my_host()) sent[partners.partner(root, h)] = bytes;
  }
  const int first = partners.partner(root, partners.my_host());
  if (place.rank == first && place.rank != root) received[root] = bytes;
  const at::Tensor flat = flat_bytes(tensor), copies = room(total(sent), at::kByte);
  for (int64_t at = 0; at < copies.numel(); at += std::max<int64_t>(1, bytes))
    copy_part(copies, at, flat, 0, bytes);
  const at::Tensor to = total(received) > 0 ? flat : room(0, at::kByte);
  place.between->all_to_all(to, copies, received, sent, text).wait();
  run(place, shm_broadcast(partners.my_place(), size_here(place), flat, partners.place(first), text));
}

void hosts_all_to_all(const HostsPlace& place, const at::Tensor& out, const at::Tensor& in,
                      const std::vector<int64_t>& out_splits, const std::vector<int64_t>& in_splits,
                      const std::string& text) {
  const Partners partners(place);
  const auto width = static_cast<int64_t>(in.element_size());
  const at::Tensor to = flat_bytes(out), from = flat_bytes(in);
  Counts sent = in_splits, received = out_splits;
  for (int r = 0; r < partners.size(); ++r) {
    sent[r] *= width;
    received[r] *= width;
  }
  const Counts sent_at = begins(sent), received_at = begins(received);
  ShmTensors out_here, in_here;
  for (const int r : partners.neighbours()) {
    out_here.push_back(to.narrow(0, received_at[r], received[r]));
    in_here.push_back(from.narrow(0, sent_at[r], sent[r]));
    sent[r] = received[r] = 0;
  }
  // Memory for what goes to other hosts, without what stays.
  const at::Tensor away = room(total(sent), at::kByte), coming = room(total(received), at::kByte);
  const Counts away_at = begins(sent), coming_at = begins(received);
  for (int r = 0; r < partners.size(); ++r)
    copy_part(away, away_at[r], from, sent_at[r], sent[r]);
  Pending exchange = place.between->all_to_all(coming, away, received, sent, text);
  run(place, shm_all_to_all(partners.my_place(), size_here(place), out_here, in_here, text));
  exchange.wait();
  for (int r = 0; r < partners.size(); ++r)
    copy_part(to, received_at[r], coming, coming_at[r], received[r]);
}

}  // namespace tessera::comm
