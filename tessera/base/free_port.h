// A TCP port for ranks to meet. Needs no torch: programs that do not link it include this file, too.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace tessera {

struct HeldPort {
  int port = 0;
  int socket = -1;  // while this is open, the system gives the port to nothing else; stores reuse addresses
};

// Holds `port`, or where it is 0 any port, that is free on every address of this host. Throws std::system_error.
inline HeldPort hold_free_port(int port = 0) {
  const auto bound = [](int family, const void* address, socklen_t size) {
    const int fd = ::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0), no = 0, yes = 1;
    if (fd < 0) return -1;
    if (family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof(no));
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    if (bind(fd, static_cast<const sockaddr*>(address), size) == 0) return fd;
    close(fd);
    return -1;
  };
  sockaddr_in6 six{};
  six.sin6_family = AF_INET6;
  six.sin6_port = htons(static_cast<in_port_t>(port));
  sockaddr_in four{};
  four.sin_family = AF_INET;
  four.sin_port = six.sin6_port;
  int fd = bound(AF_INET6, &six, sizeof(six));
  if (fd < 0) fd = bound(AF_INET, &four, sizeof(four));
  socklen_t size = sizeof(six);
  if (fd < 0 || getsockname(fd, reinterpret_cast<sockaddr*>(&six), &size) != 0)
    throw std::system_error(errno, std::generic_category(), "no free port");
  return {ntohs(six.sin6_port), fd};  // the port has one place in both kinds of address
}

}  // namespace tessera
