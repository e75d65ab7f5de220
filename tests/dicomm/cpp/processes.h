// Ranks as processes, in C++.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>

#include "file_store.h"

namespace dicomm::testing {

// Forks before there are threads; the body's failures end the child with 1.
class Processes {
 public:
  Processes(int count, const std::string& transport, const RankBody& body) {
    for (int rank = 0; rank < count; ++rank) {
      const pid_t child = ::fork();
      if (child == 0) {
        int code = 0;
        try {
          body(Communicator::create(std::make_shared<FileStore>(folder_.path()),
                                    options(rank, count, transport)));
        } catch (const std::exception& error) {
          std::cerr << "rank " << rank << ": " << error.what() << std::endl;
          code = 1;
        }
        std::quick_exit(code);
      }
      children_.push_back(child);
    }
  }

  pid_t pid(int rank) const { return children_[rank]; }

  // Its exit code; -1 where a signal ended it.
  int exit_code(int rank) const {
    int status = 0;
    ::waitpid(children_[rank], &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  TemporaryFolder folder_;
  std::vector<pid_t> children_;
};

inline void require(bool holds, const std::string& what) {
  if (!holds) throw Error(what);
}

}  // namespace dicomm::testing
