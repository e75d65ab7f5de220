// Functions of shared libraries, by name and version.
#pragma once

#include <dlfcn.h>

#include <string>

#include "core/communicator.h"
#include "core/text.h"

namespace dicomm {

// Stays loaded for good: its threads and handlers do. Throws Error.
inline void* load_library(const std::string& file, const char* name, const char* variable) {
  void* library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library)
    throw Error(text("cannot load ", name, " (", ::dlerror(),
                     "): install rdma-core, or name the file in ", variable));
  return library;
}

template <class F>
void find_function(void* library, const std::string& file, const char* name, const char* version,
                   F*& function) {
  function = reinterpret_cast<F*>(::dlvsym(library, name, version));
  if (!function)
    throw Error(text("'", file, "' has no ", name, " of version ", version,
                     ": is it of a recent rdma-core?"));
}

}  // namespace dicomm
