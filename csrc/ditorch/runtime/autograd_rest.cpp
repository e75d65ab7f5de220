// backward() returns when its graph is computed; autograd's thread for the device destroys the
// graph a moment later, and with it Python objects. If Python ends in that moment, it stops the
// thread inside a destructor, and C++ answers with std::terminate.
//
// The thread takes tasks in turn, so once it has run a new one it is done with all before. The new
// one comes from a thread that has never seen Python: its graph holds no Python object.
#include "runtime/autograd_rest.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd.h>

#include <chrono>
#include <exception>
#include <future>
#include <thread>

namespace ditorch {
namespace {

void run_empty_backward(c10::Device device) {
  auto leaf = at::empty({0}, at::TensorOptions().device(device)).set_requires_grad(true);
  torch::autograd::backward({leaf.view({0})}, {at::empty({0}, leaf.options())});
}

}  // namespace

void let_autograd_rest(c10::Device device, double deadline_s) {
  std::promise<void> promise;
  auto rested = promise.get_future();
  std::thread([device, promise = std::move(promise)]() mutable {
    try {
      run_empty_backward(device);
    } catch (const std::exception&) {
      // A device that can no longer make an empty tensor has nothing left to wait for.
    }
    promise.set_value();
  }).detach();
  rested.wait_for(std::chrono::duration<double>(deadline_s));
}

}  // namespace ditorch
