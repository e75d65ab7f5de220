#include "program.h"

#include "cache.h"
#include "sources.h"

namespace opencl {
namespace {

std::string first_line(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \n\t");
  if (begin == std::string::npos) return "the compiler gave no reason";
  return text.substr(begin, text.find('\n', begin) - begin);
}

}  // namespace

cl_kernel Programs::kernel(const std::string& file, const std::string& options,
                           const std::string& name) {
  std::lock_guard lock(mutex_);
  cl_kernel& kernel = kernels_[file + ' ' + options + ' ' + name];
  if (!kernel) kernel = make(file + ".cl", source_of(file), options, name);
  return kernel;
}

cl_kernel Programs::kernel_of_text(const std::string& key,
                                   const std::function<std::string()>& text_of,
                                   const std::string& options, const std::string& name) {
  std::lock_guard lock(mutex_);
  cl_kernel& kernel = kernels_[key + ' ' + options + ' ' + name];
  if (!kernel) kernel = make(name, text_of(), options, name);
  return kernel;
}

cl_kernel Programs::make(const std::string& label, const std::string& text,
                         const std::string& options, const std::string& name) {
  cl_int code;
  cl_kernel made = clCreateKernel(program(label, text, options), name.c_str(), &code);
  device_.check(code, ("make the kernel " + name).c_str());
  return made;
}

cl_program Programs::program(const std::string& label, const std::string& text,
                             const std::string& options) {
  cl_program& known = programs_[text + ' ' + options];
  if (known) return known;
  const std::string source = std::string(source_of("elements")) + text;
  const std::string cached = label.substr(0, label.find('.')) + "-" +
                             digest(source + options + device_.name + device_.driver) + ".bin";
  if (cl_program found = from_cache(cached, options)) return known = found;

  const char* whole = source.c_str();
  cl_int code;
  cl_program made = clCreateProgramWithSource(device_.context, 1, &whole, nullptr, &code);
  device_.check(code, "take a program");
  build(made, label, options);
  keep(made, cached);
  return known = made;
}

// Null where there is none, or the driver does not take it any more.
cl_program Programs::from_cache(const std::string& name, const std::string& options) {
  const auto content = load_cached(name);
  if (!content) return nullptr;
  const auto* bytes = reinterpret_cast<const unsigned char*>(content->data());
  const size_t length = content->size();
  cl_int code;
  cl_program program =
      clCreateProgramWithBinary(device_.context, 1, &device_.id, &length, &bytes, nullptr, &code);
  if (code != CL_SUCCESS) return nullptr;
  code = clBuildProgram(program, 1, &device_.id, options.c_str(), nullptr, nullptr);
  if (code == CL_SUCCESS) return program;
  clReleaseProgram(program);
  return nullptr;
}

void Programs::build(cl_program program, const std::string& label, const std::string& options) {
  const cl_int code = clBuildProgram(program, 1, &device_.id, options.c_str(), nullptr, nullptr);
  if (code == CL_SUCCESS) return;
  size_t bytes = 0;
  clGetProgramBuildInfo(program, device_.id, CL_PROGRAM_BUILD_LOG, 0, nullptr, &bytes);
  std::string log(bytes, '\0');
  clGetProgramBuildInfo(program, device_.id, CL_PROGRAM_BUILD_LOG, bytes, log.data(), nullptr);
  clReleaseProgram(program);
  fail(DITORCH_ERROR, "the OpenCL device " + device_.described() +
                          " does not build the kernels of " + label + ", " + name_of(code) + ": " +
                          first_line(log.c_str()));
}

void Programs::keep(cl_program program, const std::string& name) {
  size_t bytes = 0;
  clGetProgramInfo(program, CL_PROGRAM_BINARY_SIZES, sizeof bytes, &bytes, nullptr);
  if (bytes == 0) return;
  std::string binary(bytes, '\0');
  auto* begin = reinterpret_cast<unsigned char*>(binary.data());
  if (clGetProgramInfo(program, CL_PROGRAM_BINARIES, sizeof begin, &begin, nullptr) == CL_SUCCESS) {
    save_cached(name, binary);
  }
}

}  // namespace opencl
