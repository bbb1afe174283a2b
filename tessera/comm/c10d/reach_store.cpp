#include "tessera/comm/c10d/reach_store.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <thread>

#include "tessera/base/error.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr auto kFirstWord = std::chrono::seconds(15);  // a store's thread answers at once, whatever its process does
constexpr auto kBetweenLooks = std::chrono::milliseconds(500);
constexpr auto kFirstPause = std::chrono::milliseconds(5), kLongestPause = std::chrono::milliseconds(200);
constexpr int kConnectWithinMs = 1000;

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

// Addresses of a host's name; empty where nobody knows it.
Addresses addresses_of(const std::string& host, int port) {
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wanted, &found) != 0) found = nullptr;
  return {found, freeaddrinfo};
}

// Connects and returns the answer: 0, the error that refuses it, or ETIMEDOUT.
int knock(const addrinfo& to) {
  const int fd = socket(to.ai_family, to.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, to.ai_protocol);
  if (fd < 0) return errno;
  int error = connect(fd, to.ai_addr, to.ai_addrlen) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    pollfd ready{fd, POLLOUT, 0};
    socklen_t size = sizeof(error);
    if (poll(&ready, 1, kConnectWithinMs) != 1 || getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0)
      error = ETIMEDOUT;
  }
  close(fd);
  return error;
}

std::string place_of(const std::string& address, int port) {
  return c10::str(address, ":", port);
}

// Returns once somebody listens at the address. torch's client waits, too, but prints what goes wrong meanwhile: names that are
// not known yet, ends of its tries with their stacks.
void await_listener(const std::string& address, int port, std::chrono::milliseconds timeout) {
  const auto end = Clock::now() + timeout;
  for (auto pause = kFirstPause; listens(address, port) != true; pause = std::min(2 * pause, kLongestPause)) {
    if (Clock::now() >= end) {
      const std::string what = addresses_of(address, port) ? "nobody listens at " + place_of(address, port)
                                                           : "no host is known by the name " + address;
      TESSERA_FAIL(::c10::DistNetworkError, what + " after " + std::to_string(timeout.count() / 1000) + " s");
    }
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace

std::optional<bool> listens(const std::string& address, int port) {
  const Addresses all = addresses_of(address, port);
  std::optional<bool> there = false;
  for (const addrinfo* each = all.get(); each != nullptr; each = each->ai_next) {
    const int error = knock(*each);
    if (error == 0) return true;
    if (error == ETIMEDOUT) there.reset();
  }
  return there;
}

StorePtr reach_store(const std::string& address, const c10d::TCPStoreOptions& options) {
  if (!options.isServer) await_listener(address, options.port, options.timeout);
  // The client runs on a thread, which is left behind where no word comes: nothing ends torch's wait.
  const auto attempt = std::make_shared<std::packaged_task<StorePtr()>>(
      [address, options]() -> StorePtr { return c10::make_intrusive<c10d::TCPStore>(address, options); });
  std::future<StorePtr> store = attempt->get_future();
  std::thread([attempt] { (*attempt)(); }).detach();
  const auto begin = Clock::now();
  auto next = begin;
  std::optional<Clock::time_point> reached;  // since when somebody listens
  while (store.wait_for(kBetweenLooks) != std::future_status::ready) {
    const auto now = Clock::now();
    if (now >= next) {  // seldom, once somebody is there: each time takes a place in its queue
      const std::optional<bool> there = listens(address, options.port);
      if (there == false) reached.reset();
      if (there == true && !reached) reached = now;
      next = now + (reached ? kFirstWord / 3 : kBetweenLooks);
    }
    const bool mute = reached && now - *reached > kFirstWord;
    if (!mute && now - begin < options.timeout + kFirstWord) continue;
    const std::string there = place_of(address, options.port);
    TESSERA_FAIL(::c10::DistNetworkError,
                 reached ? "who listens at " + there +
                               " does not answer as a store: another program has the port, or the "
                               "process that hosts the store (usually rank 0) is stopped; end it, or "
                               "choose another port"
                         : "nobody listens at " + there);
  }
  return store.get();
}

}  // namespace tessera::comm
