// The ranks of a program that measures: processes of this host, forked from the first one.
#pragma once

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <functional>
#include <random>
#include <string>

#include "core/communicator.h"

namespace dicomm::bench {

inline std::string random_secret() {
  std::random_device random;
  return std::to_string(random()) + std::to_string(random()) + std::to_string(random());
}

// The rank that this process is, once all are forked.
inline int fork_others(int ranks) {
  for (int rank = 1; rank < ranks; ++rank)
    if (::fork() == 0) return rank;
  return 0;
}

using RankMain = std::function<void(const Options&, const std::filesystem::path& store)>;

// Runs what each rank does; store: a folder of their own. Returns the program's exit code, 1 where
// a rank failed. Throws Error.
inline int run_forked(const char* program, int ranks, const std::string& transport,
                      const RankMain& rank_main) {
  std::string folder = (std::filesystem::temp_directory_path() / "dicomm-XXXXXX").string();
  if (!::mkdtemp(folder.data())) throw Error("cannot make a folder " + folder);
  Options options;
  options.world_size = ranks;
  options.secret = random_secret();
  options.transport = transport;
  options.listen_address = "127.0.0.1";
  options.rank = fork_others(ranks);
  bool failed = false;
  try {
    rank_main(options, folder);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: rank %d: %s\n", program, options.rank, error.what());
    failed = true;
  }
  if (options.rank != 0) ::_exit(failed);
  for (int status = 0; ::wait(&status) > 0;) failed |= status != 0;
  std::filesystem::remove_all(folder);
  return failed;
}

}  // namespace dicomm::bench
