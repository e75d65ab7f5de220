// The text of kernels/*.cl, which CMake writes into the library.
#pragma once

#include <string>

namespace opencl {

// `name` is the file's, without its ending.
const char* source_of(const std::string& name);

}  // namespace opencl
