// A file descriptor that closes itself, here and in every forked child.
#pragma once

#include <utility>

#include "core/fork.h"

namespace dicomm {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {
    if (fd >= 0) close_in_children(fd);
  }
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)), origin_(other.origin_) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(origin_, other.origin_);
    return *this;
  }
  ~Fd() {
    if (fd_ >= 0 && origin_.is_here()) close_here(fd_);
  }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
  Origin origin_;
};

}  // namespace dicomm
