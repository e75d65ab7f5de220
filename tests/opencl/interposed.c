/* Stands between ditorch's library and OpenCL (LD_PRELOAD) and makes a device fail as FAULT says:
 * "no_svm": it has no shared virtual memory; "no_build": no program builds; "lost": its kernels
 * fail to launch; "softmax": that kernel divides by 1.5 times the sum. */
#define _GNU_SOURCE
#include <CL/cl.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

static int fails(const char* how) {
  const char* fault = getenv("FAULT");
  return fault && strcmp(fault, how) == 0;
}

static void* real(const char* name) { return dlsym(dlopen("libOpenCL.so.1", RTLD_NOW), name); }

cl_int clGetDeviceInfo(cl_device_id device, cl_device_info what, size_t size, void* value,
                       size_t* written) {
  cl_int (*get)(cl_device_id, cl_device_info, size_t, void*, size_t*) = real("clGetDeviceInfo");
  const cl_int code = get(device, what, size, value, written);
  if (what == CL_DEVICE_SVM_CAPABILITIES && value && fails("no_svm")) memset(value, 0, size);
  return code;
}

cl_program clCreateProgramWithSource(cl_context context, cl_uint count, const char** sources,
                                     const size_t* lengths, cl_int* code) {
  cl_program (*create)(cl_context, cl_uint, const char**, const size_t*, cl_int*) =
      real("clCreateProgramWithSource");
  const char* kernel = strstr(sources[0], "kernel void softmax(");
  if (!fails("softmax") || !kernel) return create(context, count, sources, lengths, code);
  const char *divided = strstr(kernel, "/ sum"), *wrong = "/ 1.5f ";
  if (!divided) abort(); /* the kernel is written in another way by now */
  const char* parts[] = {sources[0], wrong, divided};
  const size_t sizes[] = {divided - sources[0], strlen(wrong), strlen(divided)};
  return create(context, 3, parts, sizes, code);
}

cl_int clBuildProgram(cl_program program, cl_uint count, const cl_device_id* devices,
                      const char* options, void(CL_CALLBACK* done)(cl_program, void*), void* data) {
  cl_int (*build)(cl_program, cl_uint, const cl_device_id*, const char*,
                  void(CL_CALLBACK*)(cl_program, void*), void*) = real("clBuildProgram");
  if (!fails("no_build")) return build(program, count, devices, options, done, data);
  return build(program, count, devices, "-DCOMPUTE=nonsense", done, data);
}

cl_int clEnqueueNDRangeKernel(cl_command_queue queue, cl_kernel kernel, cl_uint dimensions,
                              const size_t* offset, const size_t* global, const size_t* local,
                              cl_uint count, const cl_event* awaited, cl_event* event) {
  cl_int (*enqueue)(cl_command_queue, cl_kernel, cl_uint, const size_t*, const size_t*,
                    const size_t*, cl_uint, const cl_event*, cl_event*) =
      real("clEnqueueNDRangeKernel");
  if (fails("lost")) return CL_OUT_OF_RESOURCES;
  return enqueue(queue, kernel, dimensions, offset, global, local, count, awaited, event);
}
