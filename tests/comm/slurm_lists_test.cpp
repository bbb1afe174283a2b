#include "tessera/comm/slurm_lists.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "tests/support/errors.h"

namespace tessera::comm {
namespace {

TEST(SlurmLists, HostsAreThoseOfTheShortForm) {
  const std::pair<const char*, const char*> rows[] = {
      {"node", "node"},
      {"node1,node2", "node1 node2"},
      {"node[003-005,07],other", "node003 node004 node005 node07 other"},
      {"node[01-03,7],gpu-a", "node01 node02 node03 node7 gpu-a"},
      {"n[8-11]", "n8 n9 n10 n11"},
      {"n[098-101]", "n098 n099 n100 n101"},
      {"n[5]", "n5"},
      {"[1-2]", "1 2"},
      {"rack[1-2]node[1,3]-ib,login-1", "rack1node1-ib rack1node3-ib rack2node1-ib rack2node3-ib login-1"},
      {"a.b.c,10.0.0.[1-2]", "a.b.c 10.0.0.1 10.0.0.2"},
  };
  for (const auto& [list, expected] : rows)
    EXPECT_EQ(c10::Join(" ", expand_hosts(list, "X")), expected);
}

TEST(SlurmLists, OtherFormsAreRefusedByName) {
  for (const char* list :
       {"", ",", "a,", ",a", "a,,b", "a[", "a[]", "a[1", "a]1", "a[1-]", "a[-1]", "a[2-1]", "a[x]", "a[1,]", "a[1]]",
        "a[[1]]", "a[0-99999999999]", "a[0-99999][0-99999]", "a[0-18446744073709551615]"}) {
    const std::string begin = c10::str("[comm] X is '", list, "'; it must be hosts like node[003-005,07],other");
    EXPECT_HAS(testing::message_of<c10::ValueError>([&] { expand_hosts(list, "X"); }), begin);
  }
}

TEST(SlurmLists, TasksOfAHost) {
  for (const auto& [host, tasks] : {std::pair(0, 4), {1, 2}, {3, 2}, {4, 1}, {5, 0}})
    EXPECT_EQ(tasks_of_host("4,2(x3),1", host), tasks) << host;
  for (const char* wrong : {"", "x", "2(x", "2(x)", "2(xy)", ",2"})
    EXPECT_EQ(tasks_of_host(wrong, 0), 0) << wrong;
}

}  // namespace
}  // namespace tessera::comm
