// What both launchers check of their options before a rank starts. Needs no torch: tessera-run includes this file, too.
#pragma once

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <system_error>

namespace tessera {

// Why ranks would wait in vain for rank 0 at `host`, a name or an address; empty where it is known here.
inline std::string why_no_host(const std::string& host) {
  addrinfo kind{}, *found = nullptr;
  kind.ai_socktype = SOCK_STREAM;
  const int error = getaddrinfo(host.c_str(), nullptr, &kind, &found);
  if (error == 0) {
    freeaddrinfo(found);
    return "";
  }
  return "--master_addr " + host + " is no host that is known here (" + gai_strerror(error) +
         "): give the name or the address by which every host of the job reaches the host of rank 0";
}

// Why nothing can be written into `folder`, which is made where it is missing; empty where that can be.
inline std::string why_no_logs(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (!error && access(folder.c_str(), W_OK | X_OK) != 0) error = std::error_code(errno, std::generic_category());
  if (!error) return "";
  return "--log_dir " + folder + " is no folder that can be written into (" + error.message() +
         "): name another, or leave it out";
}

}  // namespace tessera
