// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ranks as processes that form a SharedMemoryGroup, and exchanges that check themselves.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support.hpp"
#include "syncbn/error.hpp"
#include "syncbn/shared_memory.hpp"

namespace syncbn::testing {

/// No test needs as long; what takes longer hangs.
inline constexpr std::chrono::seconds kHang(60);

/// For checks in a child, where gtest's go unheard.
inline void require(bool condition, const std::string& what) {
  if (!condition) {
    throw std::logic_error(what);
  }
}

class Processes {
 public:
  static constexpr int kMax = 16;

  /// How a process ended: the type of what its body threw ("" for nothing) and its text, or the
  /// signal.
  struct Outcome {
    std::string error;
    std::string text;
    int signal = 0;
  };
  struct Rank {
    SharedMemoryGroup& group;
    std::unique_ptr<SharedMemoryGroup>& owner;  ///< of group
    std::atomic<std::int64_t>& progress;        ///< the test can watch it
  };

  Processes(int ranks, std::chrono::milliseconds timeout, const std::function<void(Rank)>& body)
      : board_(new (mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                         -1, 0)) Board) {
    for (int r = 0; r < ranks; ++r) {
      int ends[2];
      require(pipe(ends) == 0, "pipe");
      const pid_t parent = getpid();
      const pid_t pid = fork();
      require(pid >= 0, "fork");
      if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        alarm(static_cast<unsigned>(kHang.count()));
        const std::string report =
            getppid() != parent ? "" : report_of([&] { run(r, ranks, timeout, body); });
        const ssize_t written = write(ends[1], report.data(), report.size());
        _exit(written == static_cast<ssize_t>(report.size()) ? 0 : 1);
      }
      close(ends[1]);
      children_.push_back({pid, ends[0], true, {}});
    }
  }
  ~Processes() {
    for (int r = 0; r < static_cast<int>(children_.size()); ++r) {
      if (children_[static_cast<std::size_t>(r)].running) {
        send(r, SIGKILL);
        waitpid(children_[static_cast<std::size_t>(r)].pid, nullptr, 0);
      }
      close(children_[static_cast<std::size_t>(r)].pipe);
    }
    munmap(board_, sizeof(Board));
  }
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  void send(int rank, int signal) const {
    kill(children_[static_cast<std::size_t>(rank)].pid, signal);
  }
  std::int64_t progress(int rank) const {
    return board_->progress[static_cast<std::size_t>(rank)].load();
  }
  /// Returns when all ranks have formed the group and this one has come so far.
  void wait_for(int rank, std::int64_t progress) const {
    const auto begin = std::chrono::steady_clock::now();
    while (board_->opened.load() < static_cast<int>(children_.size()) ||
           this->progress(rank) < progress) {
      require(std::chrono::steady_clock::now() - begin < kHang,
              "rank " + std::to_string(rank) + " makes no progress");
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  /// Waits for this rank's end.
  const Outcome& join(int rank) {
    Child& child = children_[static_cast<std::size_t>(rank)];
    const auto begin = std::chrono::steady_clock::now();
    for (int status = 0; child.running;) {
      if (waitpid(child.pid, &status, WNOHANG) == child.pid) {
        child.running = false;
        child.outcome = outcome_of(status, child.pipe);
      } else {
        require(std::chrono::steady_clock::now() - begin < kHang,
                "rank " + std::to_string(rank) + " does not end");
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    }
    return child.outcome;
  }
  void expect_success() {
    for (int r = 0; r < static_cast<int>(children_.size()); ++r) {
      const Outcome& outcome = join(r);
      EXPECT_EQ(outcome.error + outcome.text, "") << "rank " << r;
      EXPECT_EQ(outcome.signal, 0) << "rank " << r;
    }
  }

 private:
  /// Where the children gather their offers; lives in memory that fork shares.
  struct Board {
    std::atomic<int> offered{0};
    std::atomic<int> opened{0};
    std::atomic<std::int64_t> progress[kMax]{};
    std::byte offers[kMax][SharedMemoryOffer::kBytes]{};
  };
  struct Child {
    pid_t pid;
    int pipe;
    bool running;
    Outcome outcome;
  };

  static void gather(std::atomic<int>& count, int ranks) {
    ++count;
    while (count.load() < ranks) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

  void run(int rank, int ranks, std::chrono::milliseconds timeout,
           const std::function<void(Rank)>& body) {
    SharedMemoryOffer offer(rank, ranks);
    std::memcpy(board_->offers[rank], offer.bytes().data(), offer.kBytes);
    gather(board_->offered, ranks);
    const std::span<const std::byte> offers(board_->offers[0],
                                            static_cast<std::size_t>(ranks) * offer.kBytes);
    auto opened = SharedMemoryGroup::open(std::move(offer), offers, timeout);
    require(opened.group != nullptr, opened.why);
    gather(board_->opened, ranks);
    body({*opened.group, opened.group, board_->progress[rank]});
  }

  static std::string report_of(const std::function<void()>& body) {
    try {
      body();
    } catch (const DivergenceError& e) {
      return std::string("DivergenceError\n") + e.what();
    } catch (const ExchangeTimeout& e) {
      return std::string("ExchangeTimeout\n") + e.what();
    } catch (const PeerLost& e) {
      return std::string("PeerLost\n") + e.what();
    } catch (const std::exception& e) {
      return std::string("another error\n") + e.what();
    }
    return "\n";
  }

  static Outcome outcome_of(int status, int pipe) {
    Outcome outcome;
    outcome.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    std::string report(65536, '\0');
    const ssize_t got = read(pipe, report.data(), report.size());
    report.resize(static_cast<std::size_t>(got > 0 ? got : 0));
    const std::size_t cut = report.find('\n');
    if (cut == std::string::npos) {
      outcome.error = "no report";
    } else {
      outcome.error = report.substr(0, cut);
      outcome.text = report.substr(cut + 1);
    }
    return outcome;
  }

  Board* board_;
  std::vector<Child> children_;
};

/// Longer than any wait of these tests on a busy machine.
inline constexpr auto kLong = std::chrono::seconds(50);

inline std::vector<std::int64_t> message(std::int64_t length, int rank, std::int64_t exchange) {
  Random random(static_cast<std::uint64_t>(exchange * 100 + rank));
  std::vector<std::int64_t> words(static_cast<std::size_t>(length));
  for (std::int64_t& word : words) {
    word = static_cast<std::int64_t>(random.bits());
  }
  return words;
}

/// An exchange whose every word is checked.
inline void sum(Communicator& group, std::int64_t length, std::int64_t exchange) {
  std::vector<std::int64_t> words = message(length, group.rank(), exchange);
  std::vector<std::uint64_t> expected(words.size());
  for (int r = 0; r < group.size(); ++r) {
    const auto theirs = message(length, r, exchange);
    for (std::size_t i = 0; i < theirs.size(); ++i) {
      expected[i] += static_cast<std::uint64_t>(theirs[i]);
    }
  }
  group.all_reduce_sum(words);
  for (std::size_t i = 0; i < words.size(); ++i) {
    require(static_cast<std::uint64_t>(words[i]) == expected[i],
            "word " + std::to_string(i) + " of " + std::to_string(length));
  }
}

/// A rank's part in many exchanges, to which it comes now and then late.
inline void exchange_with_delays(Communicator& group, int exchanges) {
  Random mine(static_cast<std::uint64_t>(group.rank()));
  Random common(52);
  for (int i = 0; i < exchanges; ++i) {
    if (mine.one_in(100)) {
      std::this_thread::sleep_for(std::chrono::microseconds(mine.between(1, 300)));
    } else if (mine.one_in(5)) {
      std::this_thread::yield();
    }
    sum(group, common.between(0, 50), i);
  }
}

/// What one rank brings differs in length: an error on every rank, and the group goes on.
inline void disagree(Communicator& group, const std::vector<std::int64_t>& lengths) {
  const auto expect_error = [](const auto& call, const std::vector<std::string>& parts) {
    try {
      call();
    } catch (const DivergenceError& e) {
      for (const std::string& part : parts) {
        require(std::string(e.what()).find(part) != std::string::npos, e.what());
      }
      return;
    }
    require(false, "ranks that disagree exchange");
  };
  for (const int which : {0, 1, group.size() - 1}) {
    const bool odd = group.rank() == which;
    for (const std::int64_t length : lengths) {
      for (const std::int64_t other : {length + 1, length + 40000}) {
        expect_error(
            [&] { sum(group, odd ? other : length, 1); },
            {"brought " + std::to_string(8 * length), "brought " + std::to_string(8 * other)});
        sum(group, 7, 2);
      }
    }
  }
}

/// How a rank's later call fails once the group is broken.
inline void require_broken(SharedMemoryGroup& group) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    sum(group, 4, 0);
  } catch (const PeerLost&) {
    require(std::chrono::steady_clock::now() - begin < kLong / 10,
            "a broken group lets a rank wait");
    return;
  }
  require(false, "a broken group works");
}

}  // namespace syncbn::testing
