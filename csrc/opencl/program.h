// The kernels of a device: built from the sources in kernels/ when first asked for.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <string>

#include "device.h"

namespace opencl {

class Programs {
 public:
  explicit Programs(Device& device) : device_(device) {}

  // `file` is one of kernels/, without its ending; `options` are the compiler's. Throws one
  // sentence with the first line of the compiler's log if the driver does not build it.
  cl_kernel kernel(const std::string& file, const std::string& options, const std::string& name);

  // The same of a text that is made when it is first asked for under this key.
  cl_kernel kernel_of_text(const std::string& key, const std::function<std::string()>& text_of,
                           const std::string& options, const std::string& name);

 private:
  cl_kernel make(const std::string& label, const std::string& text, const std::string& options,
                 const std::string& name);
  cl_program program(const std::string& label, const std::string& text, const std::string& options);
  cl_program from_cache(const std::string& name, const std::string& options);
  void build(cl_program program, const std::string& label, const std::string& options);
  void keep(cl_program program, const std::string& name);

  Device& device_;
  std::mutex mutex_;
  std::map<std::string, cl_program> programs_;  // by text and options
  std::map<std::string, cl_kernel> kernels_;    // by file or key, options and name
};

}  // namespace opencl
