#include "core/host.h"

#include <sched.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <fstream>

#include "core/text.h"

namespace dicomm {

namespace {

std::string namespace_id(const char* name) {
  struct stat status{};
  if (::stat(text("/proc/self/ns/", name).c_str(), &status) != 0) return "?";
  return text(status.st_dev, ":", status.st_ino);
}

}  // namespace

std::string host_id() {
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  if (boot_id.empty()) boot_id = host_name();
  return text(boot_id, "/", namespace_id("net"), "/", namespace_id("pid"), "/",
              namespace_id("user"), "/", ::geteuid());
}

std::string host_name() {
  char name[256] = "?";
  ::gethostname(name, sizeof name - 1);
  return name;
}

int usable_cores() {
  cpu_set_t cores;
  const int ours = ::sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
  // A rank bound to one core has peers that are bound to others.
  return ours > 1 ? ours : static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
}

bool host_can_read(const void* address) {
  char byte;
  const iovec local{&byte, 1};
  const iovec remote{const_cast<void*>(address), 1};
  return ::process_vm_readv(::getpid(), &local, 1, &remote, 1, 0) == 1;
}

}  // namespace dicomm
