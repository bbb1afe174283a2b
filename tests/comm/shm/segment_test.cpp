#include "tessera/comm/shm/segment.h"

#include <sys/wait.h>
#include <unistd.h>

#include "tests/comm/collectives.h"
#include "tests/comm/shared_files.h"

namespace tessera::comm {
namespace {

using testing::message_of;
using testing::shared_files;

TEST(ShmSegment, IsOneMemoryForAllWhoAttach) {
  const auto before = shared_files();
  const auto segment = ShmSegment::create(1 << 20);
  segment->reserve(0, 1 << 20);
  const auto same = ShmSegment::attach(getpid(), segment->fd(), 1 << 20);
  EXPECT_NE(segment->data(), same->data());
  segment->data()[4097] = 'x';
  EXPECT_EQ(same->data()[4097], 'x');
  EXPECT_EQ(same->data()[0], 0);
  EXPECT_EQ(shared_files(), before);  // nothing that a crash could leave behind
}

TEST(ShmSegment, IsTakenForNoOtherThanTheOneOffered) {
  const auto segment = ShmSegment::create(4096);
  segment->reserve(0, 4096);
  ShmAddress address = segment->offer();
  ShmSegment::attach(address, 4096)->data()[8] = 'x';
  EXPECT_EQ(segment->data()[8], 'x');
  EXPECT_NE(segment->offer().secret, address.secret);
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { ShmSegment::attach(address, 4096); }), "another segment");
}

TEST(ShmSegment, OutlivesItsCreator) {
  auto segment = ShmSegment::create(4096);
  const auto same = ShmSegment::attach(getpid(), segment->fd(), 4096);
  segment->data()[0] = 'x';
  segment.reset();
  EXPECT_EQ(same->data()[0], 'x');
}

TEST(ShmSegment, SaysWhatIsNeededWhenThereIsNoMemory) {
  const auto segment = ShmSegment::create(4096);
  const size_t huge = size_t{1} << 62;
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { segment->reserve(0, huge); }),
             "[comm] shared memory: 4611686018427387904 B are needed, ");
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { ShmSegment::create(size_t{1} << 60); }),
             "1152921504606846976 B are needed");
}

TEST(ShmSegment, IsClosedToProcessesOfOtherUsers) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  const auto segment = ShmSegment::create(4096);
  const pid_t owner = getpid();
  const pid_t child = fork();
  if (child == 0) {
    constexpr uid_t kNobody = 65534;
    if (setresgid(kNobody, kNobody, kNobody) != 0 || setresuid(kNobody, kNobody, kNobody) != 0) _exit(2);
    try {
      ShmSegment::attach(owner, segment->fd(), 4096);
    } catch (const c10::DistBackendError&) {
      _exit(0);
    }
    _exit(1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(WIFEXITED(status) ? WEXITSTATUS(status) : -1, 0);
}

TEST(ShmSegment, RefusesWhatIsNone) {
  EXPECT_HAS(message_of<c10::DistBackendError>([] { ShmSegment::attach(getpid(), 12345, 4096); }),
             "all ranks must run on one host");
  const auto segment = ShmSegment::create(4096);
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { ShmSegment::attach(getpid(), segment->fd(), 8192); }),
             "is not a segment of 8192 B");
}

}  // namespace
}  // namespace tessera::comm
