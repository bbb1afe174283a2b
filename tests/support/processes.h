// Test support: ranks as processes. A test starts this very binary again, once per rank, to run that test alone with the
// environment of torchrun; is_rank() tells it which of the two it is.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

extern char** environ;

namespace tessera::testing {

struct ProcessResult {
  int exit_code = 0;   // negative: the signal that ended it
  std::string output;  // stdout and stderr
  double seconds = 0;
};

// A TCP port of the loopback interface that was free a moment ago.
inline int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    throw std::runtime_error("no free port");
  }
  close(fd);
  return ntohs(address.sin_port);
}

// In one of the processes that run_processes() started.
inline bool is_rank() {
  return std::getenv("TESSERA_TEST_MARKS") != nullptr;
}

// Starts `test` of this binary as rank `rank` of `size`; returns its process id and the read end of its output.
inline std::pair<pid_t, int> start_process(int rank, const std::string& test, std::map<std::string, std::string> env) {
  env["RANK"] = env["LOCAL_RANK"] = std::to_string(rank);
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    env.try_emplace(text.substr(0, text.find('=')), text.substr(text.find('=') + 1));
  }
  std::vector<std::string> entries;
  for (const auto& [name, value] : env)
    entries.push_back(name + "=" + value);
  std::vector<char*> envp;
  for (auto& entry : entries)
    envp.push_back(entry.data());
  envp.push_back(nullptr);
  std::string exe = "/proc/self/exe", filter = "--gtest_filter=" + test, brief = "--gtest_brief=1";
  char* argv[] = {exe.data(), filter.data(), brief.data(), nullptr};
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe failed");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
  pid_t pid = 0;
  const int failed = posix_spawn(&pid, exe.c_str(), &actions, nullptr, argv, envp.data());
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  if (failed != 0) throw std::runtime_error("cannot start " + exe);
  return {pid, ends[0]};
}

// Meeting points of the processes of one run_processes(), independent of the groups that they test and of anybody's
// speed: a rank leaves a mark, others wait for it. False after a minute without the marks.
inline std::filesystem::path mark_path(const std::string& name, int rank) {
  return std::filesystem::path(std::getenv("TESSERA_TEST_MARKS")) / (name + "." + std::to_string(rank));
}

inline void leave_mark(const std::string& name) {
  std::ofstream(mark_path(name, std::stoi(std::getenv("RANK"))));
}

inline bool await_marks(const std::string& name, const std::vector<int>& ranks) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  for (const int rank : ranks) {
    while (!std::filesystem::exists(mark_path(name, rank))) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  return true;
}

// Runs the running test as `size` processes and returns when all have ended. One that is still there after `limit` is
// killed (exit_code -SIGKILL).
inline std::vector<ProcessResult> run_processes(int size, std::map<std::string, std::string> env = {},
                                                std::chrono::seconds limit = std::chrono::seconds(120)) {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  env.try_emplace("WORLD_SIZE", std::to_string(size));
  env.try_emplace("MASTER_ADDR", "127.0.0.1");
  env.try_emplace("MASTER_PORT", std::to_string(free_port()));
  env.try_emplace("OMP_NUM_THREADS", "1");
  env.try_emplace("GTEST_TOTAL_SHARDS", "1");  // they run one test, whichever part of all this process has
  env.try_emplace("GTEST_SHARD_INDEX", "0");
  std::string marks = (std::filesystem::temp_directory_path() / ("tessera_marks_" + std::string(6, 'X'))).string();
  if (mkdtemp(marks.data()) == nullptr) throw std::runtime_error("no folder for marks");
  env["TESSERA_TEST_MARKS"] = marks;
  const auto start = std::chrono::steady_clock::now();
  std::vector<ProcessResult> results(size);
  std::vector<std::thread> readers;
  for (int rank = 0; rank < size; ++rank) {
    const auto [pid, output] = start_process(rank, std::string(test->test_suite_name()) + "." + test->name(), env);
    readers.emplace_back([&result = results[rank], pid = pid, output = output, start, limit] {
      std::thread reader([&] {
        char block[4096];
        for (ssize_t got; (got = read(output, block, sizeof(block))) > 0;)
          result.output.append(block, got);
        close(output);
      });
      int status = 0;
      bool killed = false;
      while (waitpid(pid, &status, WNOHANG) == 0) {
        if (!killed && std::chrono::steady_clock::now() - start > limit) killed = kill(pid, SIGKILL) == 0;
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
      reader.join();
    });
  }
  for (auto& reader : readers)
    reader.join();
  std::filesystem::remove_all(marks);
  return results;
}

}  // namespace tessera::testing
