// A TCP port for ranks to meet. Needs no torch: programs that do not link it include this file, too.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace tessera {

// Holds a port: while the object lives the system gives it to nothing else, and stores, which reuse addresses, can have it.
class [[nodiscard]] HeldPort {
 public:
  // `port`, or where it is 0 any port, that is free on every address of this host. Throws std::system_error.
  explicit HeldPort(int port = 0) {
    sockaddr_in6 six{};
    six.sin6_family = AF_INET6;
    six.sin6_port = htons(static_cast<in_port_t>(port));
    sockaddr_in four{};
    four.sin_family = AF_INET;
    four.sin_port = six.sin6_port;
    socket_ = bound(AF_INET6, &six, sizeof(six));
    if (socket_ < 0) socket_ = bound(AF_INET, &four, sizeof(four));
    socklen_t size = sizeof(six);
    if (socket_ < 0 || getsockname(socket_, reinterpret_cast<sockaddr*>(&six), &size) != 0) {
      const int error = errno;
      end();
      throw std::system_error(error, std::generic_category(), "no free port");
    }
    port_ = ntohs(six.sin6_port);  // the port has one place in both kinds of address
  }
  ~HeldPort() { end(); }
  HeldPort(HeldPort&& other) noexcept
      : port_(std::exchange(other.port_, 0)), socket_(std::exchange(other.socket_, -1)) {}
  HeldPort& operator=(HeldPort&& other) noexcept {
    if (this == &other) return *this;
    end();
    port_ = std::exchange(other.port_, 0);
    socket_ = std::exchange(other.socket_, -1);
    return *this;
  }
  HeldPort(const HeldPort&) = delete;
  HeldPort& operator=(const HeldPort&) = delete;

  int port() const { return port_; }      // 0 for one that was moved from
  int socket() const { return socket_; }  // bound to the port
  // Leaves the port held until the process ends, or the caller closes what it gets.
  int release() { return std::exchange(socket_, -1); }

 private:
  static int bound(int family, const void* address, socklen_t size) {
    const int fd = ::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0), no = 0, yes = 1;
    if (fd < 0) return -1;
    if (family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof(no));
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    if (bind(fd, static_cast<const sockaddr*>(address), size) == 0) return fd;
    const int error = errno;
    close(fd);
    errno = error;
    return -1;
  }
  void end() {
    if (socket_ >= 0) close(socket_);
    socket_ = -1;
  }

  int port_ = 0;
  int socket_ = -1;
};

inline HeldPort hold_free_port(int port = 0) {
  return HeldPort(port);
}

}  // namespace tessera
