// SPDX-License-Identifier: Apache-2.0
#include "comm/shared_segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <system_error>

namespace syncbn {
namespace {

// SYS_pidfd_open, which headers of older systems lack; the same on every architecture but Alpha.
constexpr long kPidfdOpen = 434;

/// Of the memory: its size is what the mappings rely on, and nobody changes it.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

std::string system_text(const std::string& what, int error) {
  return what + ": " + std::generic_category().message(error);
}

/// A small file under /proc, or nothing.
std::string read_text(const std::string& path) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  char text[1024];
  const ssize_t got = file.get() < 0 ? 0 : read(file.get(), text, sizeof(text));
  return {text, static_cast<std::size_t>(std::max<ssize_t>(got, 0))};
}

/// When the process started, in clock ticks since the node did; 0 if it is not there.
std::uint64_t start_time(const std::string& process) {
  const std::string stat = read_text("/proc/" + process + "/stat");
  // Field 22; the second one, the program's name in parentheses, may hold anything.
  std::size_t at = stat.rfind(')');
  for (int field = 2; field < 22 && at != std::string::npos; ++field) {
    at = stat.find(' ', at + 1);
  }
  std::uint64_t ticks = 0;
  if (at != std::string::npos) {
    std::from_chars(stat.data() + at + 1, stat.data() + stat.size(), ticks);
  }
  return ticks;
}

std::string describe_process(OfferContent& content) {
  content.process = getpid();
  content.start_time = start_time("self");
  const std::string boot_id = read_text("/proc/sys/kernel/random/boot_id");
  struct stat names{};
  if (content.start_time == 0 || boot_id.empty() || stat("/proc/self/ns/pid", &names) != 0) {
    return "/proc cannot be read";
  }
  content.pid_namespace = names.st_ino;
  std::copy_n(boot_id.begin(), std::min(boot_id.size(), content.boot_id.size() - 1),
              content.boot_id.begin());
  return "";
}

std::string make_memory(std::size_t bytes, LocalOffer& out) {
  OfferContent& content = out.content;
  // Beyond this limit the kernel would end the process with SIGXFSZ.
  rlimit file_size{};
  if (getrlimit(RLIMIT_FSIZE, &file_size) == 0 && file_size.rlim_cur < bytes) {
    return "the limit on the size of files (ulimit -f) is " + std::to_string(file_size.rlim_cur) +
           " bytes, expected at least " + std::to_string(bytes);
  }
  out.memory_file = Descriptor(memfd_create("syncbn", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (out.memory_file.get() < 0) {
    return system_text("memfd_create", errno);
  }
  // Takes the pages now: a full node is an error here and not a signal in the middle of training.
  int error = 0;
  do {
    error = posix_fallocate(out.memory_file.get(), 0, static_cast<off_t>(bytes));
  } while (error == EINTR);
  if (error != 0) {
    return system_text("posix_fallocate of " + std::to_string(bytes) + " bytes", error);
  }
  if (fcntl(out.memory_file.get(), F_ADD_SEALS, kSeals) != 0) {
    return system_text("F_ADD_SEALS", errno);
  }
  out.memory = Mapping(out.memory_file.get(), bytes);
  if (out.memory.data() == nullptr) {
    return system_text("mmap", errno);
  }
  if (getrandom(content.nonce.data(), content.nonce.size(), 0) !=
      static_cast<ssize_t>(content.nonce.size())) {
    return system_text("getrandom", errno);
  }
  std::memcpy(out.memory.data(), content.nonce.data(), content.nonce.size());
  content.memory_bytes = bytes;
  content.descriptor = out.memory_file.get();
  return "";
}

/// What speaks against a rank by its offer alone, or nothing. bytes: of rank 0's memory.
std::string objection(const OfferContent& mine, const OfferContent& other, int rank,
                      std::size_t bytes) {
  if (other.format == 0) {
    return "brought an offer of zeros; gather puts every rank's bytes in their place";
  }
  if (other.format != OfferContent::kFormat) {
    return "has another version of the exchange";
  }
  if (other.rank != rank || other.size != mine.size) {
    return "made an offer as rank " + std::to_string(other.rank) + " of " +
           std::to_string(other.size) + ", expected rank " + std::to_string(rank) + " of " +
           std::to_string(mine.size);
  }
  if (other.failure[0] != '\0') {
    return "cannot share memory: " +
           std::string(other.failure.data(), strnlen(other.failure.data(), other.failure.size()));
  }
  if (other.boot_id != mine.boot_id) {
    return "is on another node";
  }
  if (other.pid_namespace != mine.pid_namespace) {
    return "is in another container (PID namespace)";
  }
  if (rank == 0 && other.memory_bytes != bytes) {
    return "offers a memory of " + std::to_string(other.memory_bytes) + " bytes, expected " +
           std::to_string(bytes);
  }
  return "";
}

/// Watches the process of an offer.
std::string watch(const OfferContent& offer, std::vector<Peer>& peers) {
  const std::string process = std::to_string(offer.process);
  Descriptor alive(static_cast<int>(syscall(kPidfdOpen, static_cast<pid_t>(offer.process), 0)));
  if (alive.get() < 0) {
    return system_text("process " + process + " cannot be watched", errno);
  }
  const std::uint64_t started = start_time(process);
  if (started == 0) {
    return "process " + process + " cannot be seen in /proc (hidepid?)";
  }
  if (started != offer.start_time) {
    return "process " + process + " is not the one that made the offer";
  }
  peers.push_back({offer.rank, static_cast<pid_t>(offer.process), std::move(alive)});
  return "";
}

std::string map_memory(const OfferContent& offer, Mapping& memory) {
  const std::string path =
      "/proc/" + std::to_string(offer.process) + "/fd/" + std::to_string(offer.descriptor);
  const Descriptor file(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (file.get() < 0) {
    return system_text("its memory " + path + " cannot be opened", errno);
  }
  struct stat status{};
  if (fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode) ||
      static_cast<std::uint64_t>(status.st_size) != offer.memory_bytes) {
    return path + " is not its memory";
  }
  if (const int seals = fcntl(file.get(), F_GET_SEALS); seals < 0 || (seals & kSeals) != kSeals) {
    return path + " is not sealed against another size";
  }
  memory = Mapping(file.get(), offer.memory_bytes);
  if (memory.data() == nullptr) {
    return system_text("its memory cannot be mapped", errno);
  }
  return "";
}

}  // namespace

void Descriptor::reset() {
  if (number_ >= 0) {
    close(std::exchange(number_, -1));
  }
}

Mapping::Mapping(int descriptor, std::size_t bytes) : bytes_(bytes), owner_(getpid()) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (address != MAP_FAILED) {
    madvise(address, bytes, MADV_DONTFORK);
    address_ = static_cast<std::byte*>(address);
  }
}

Mapping::~Mapping() {
  // A forked child does not have it, and may have something else there.
  if (address_ != nullptr && owner_ == getpid()) {
    munmap(address_, bytes_);
  }
}

void make_offer(int rank, int size, std::size_t bytes, LocalOffer& out) {
  OfferContent& content = out.content;
  content.rank = rank;
  content.size = size;
  std::string failure = describe_process(content);
  if (failure.empty() && rank == 0) {
    failure = make_memory(bytes, out);
  }
  std::copy_n(failure.begin(), std::min(failure.size(), content.failure.size() - 1),
              content.failure.begin());
}

Segment open_segment(LocalOffer& mine, const std::vector<OfferContent>& offers, std::size_t bytes) {
  const OfferContent& own = mine.content;
  Segment segment;
  // Everything that all ranks can see alike comes first, so that they give the same reason.
  for (std::size_t r = 0; r < offers.size() && segment.why.empty(); ++r) {
    segment.why = objection(own, offers[r], static_cast<int>(r), bytes);
    if (!segment.why.empty()) {
      segment.why = "rank " + std::to_string(r) + " " + segment.why;
    }
  }
  for (std::size_t r = 0; r < offers.size() && segment.why.empty(); ++r) {
    if (offers[r].process != own.process) {
      segment.why = watch(offers[r], segment.peers);
    }
    if (segment.why.empty() && r == 0) {
      if (own.rank == 0) {
        segment.memory = std::move(mine.memory);
      } else {
        segment.why = map_memory(offers[0], segment.memory);
      }
      if (segment.why.empty() &&
          std::memcmp(segment.memory.data(), offers[0].nonce.data(), offers[0].nonce.size()) != 0) {
        segment.why = "its memory does not begin with what the offer says";
      }
    }
    if (!segment.why.empty()) {
      segment.why = "rank " + std::to_string(r) + ": " + segment.why;
    }
  }
  return segment;
}

}  // namespace syncbn
