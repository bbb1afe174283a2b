#include "tessera/base/free_port.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <optional>
#include <type_traits>

namespace tessera {
namespace {

static_assert(!std::is_copy_constructible_v<HeldPort> && !std::is_copy_assignable_v<HeldPort>);

bool is_open(int socket) {
  return fcntl(socket, F_GETFD) != -1;
}

TEST(FreePort, IsHeldWhileItsObjectLives) {
  std::optional<HeldPort> held(std::in_place);
  const int port = held->port(), socket = held->socket();
  ASSERT_GT(port, 0);
  EXPECT_TRUE(is_open(socket));
  ASSERT_EQ(listen(socket, 1), 0);  // else a second one may have it, too: addresses are reused
  EXPECT_THROW(hold_free_port(port), std::system_error);
  held.reset();
  EXPECT_FALSE(is_open(socket));
  EXPECT_EQ(hold_free_port(port).port(), port);
}

TEST(FreePort, MovesWithItsSocket) {
  HeldPort first = hold_free_port(), second = hold_free_port();
  const int port = first.port(), socket = first.socket(), other = second.socket();
  second = std::move(first);
  EXPECT_FALSE(is_open(other));
  EXPECT_TRUE(is_open(socket));
  EXPECT_EQ(second.port(), port);
  const HeldPort third = std::move(second);
  EXPECT_EQ(third.socket(), socket);
  EXPECT_TRUE(is_open(socket));
}

TEST(FreePort, StaysHeldWhereItIsReleased) {
  int socket = -1;
  {
    HeldPort held = hold_free_port();
    socket = held.release();
  }
  EXPECT_TRUE(is_open(socket));
  close(socket);
}

}  // namespace
}  // namespace tessera
