// What becomes of dicomm in a process that a rank forks off.
//
// Such a child has its parent's memory and descriptors, but none of its threads. If it kept the
// parent's connections open, peers would notice the parent's death only once the child ends, too;
// so it closes them before anything else. Whatever was made before the fork refuses to work in the
// child, and leaves alone what it shares with the parent when it is destroyed there.
#pragma once

namespace dicomm {

namespace fork_details {

extern unsigned forks;  // that lie between the first process and this one

}  // namespace fork_details

// Where something was made.
class Origin {
 public:
  // Whether that was this process, and not one that it was forked from.
  bool is_here() const { return forks_ == fork_details::forks; }

 private:
  unsigned forks_ = fork_details::forks;
};

// Has a descriptor closed in every child that is forked while this lives; somebody else closes it
// here.
class ClosedInChildren {
 public:
  explicit ClosedInChildren(int fd);
  ~ClosedInChildren();
  ClosedInChildren(const ClosedInChildren&) = delete;
  ClosedInChildren& operator=(const ClosedInChildren&) = delete;

 private:
  const int fd_;
  const Origin origin_;
};

// The two halves of that for Fd, which closes the descriptor itself.
void close_in_children(int fd);
void close_here(int fd);

}  // namespace dicomm
