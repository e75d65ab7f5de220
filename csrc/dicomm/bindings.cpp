// The Python binding of libdicomm, without torch: dicomm._dicomm.
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <ctime>

#include "core/communicator.h"

namespace py = pybind11;

namespace {

using dicomm::Communicator;
using dicomm::Request;
using Seconds = std::chrono::duration<double>;

double seconds(Seconds duration) { return duration.count(); }

std::chrono::milliseconds to_milliseconds(double seconds) {
  return std::chrono::ceil<std::chrono::milliseconds>(Seconds(seconds));
}

// Any Python object with set(key, value) and get(key, timeout_s), which raises TimeoutError.
class PythonStore final : public dicomm::Store {
 public:
  explicit PythonStore(py::object store) : store_(std::move(store)) {}
  ~PythonStore() override {
    py::gil_scoped_acquire gil;
    store_ = py::object();
  }

  void set(const std::string& key, const std::string& value) override {
    py::gil_scoped_acquire gil;
    guarded(key, [&] { store_.attr("set")(key, py::bytes(value)); });
  }

  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    py::gil_scoped_acquire gil;
    std::string value;
    guarded(key,
            [&] { value = store_.attr("get")(key, Seconds(timeout).count()).cast<std::string>(); });
    return value;
  }

 private:
  template <class F>
  static void guarded(const std::string& key, F&& function) {
    try {
      function();
    } catch (py::error_already_set& error) {
      if (error.matches(PyExc_TimeoutError)) throw dicomm::TimeoutError(error.what());
      throw dicomm::Error("store: key '" + key + "': " + error.what());
    }
  }

  py::object store_;
};

// A contiguous buffer, or (address, bytes) of memory that its owner keeps alive.
struct Memory {
  void* data = nullptr;
  std::size_t bytes = 0;
  std::shared_ptr<Py_buffer> view;  // keeps an object with a buffer alive, and its size fixed
};

Memory memory(const py::object& object, bool writable) {
  Memory memory;
  if (py::isinstance<py::tuple>(object)) {
    const auto [address, bytes] = object.cast<std::pair<std::uintptr_t, std::size_t>>();
    memory.data = reinterpret_cast<void*>(address);
    memory.bytes = bytes;
    return memory;
  }
  Py_buffer view;
  if (PyObject_GetBuffer(object.ptr(), &view, writable ? PyBUF_CONTIG : PyBUF_CONTIG_RO) != 0)
    throw py::error_already_set();
  memory.data = view.buf;
  memory.bytes = view.len;
  memory.view = {new Py_buffer(view), [](Py_buffer* held) {
                   PyBuffer_Release(held);
                   delete held;
                 }};
  return memory;
}

void sleep_until_ns(std::int64_t t) {
  const timespec moment{t / 1'000'000'000, t % 1'000'000'000};
  while (::clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &moment, nullptr) == EINTR) {
  }
}

class PythonRequest {
 public:
  PythonRequest(std::shared_ptr<Request> request, Memory memory, double timeout_s)
      : memory_(std::move(memory)), request_(std::move(request)), timeout_s_(timeout_s) {}
  PythonRequest(PythonRequest&&) = default;
  ~PythonRequest() {
    py::gil_scoped_release release;
    request_.reset();  // before its memory
  }

  bool test() {
    py::gil_scoped_release release;
    return request_->test();
  }

  // In slices, so that Ctrl-C is noticed.
  std::size_t wait(std::optional<double> timeout_s, bool until_delivered) {
    using Clock = std::chrono::steady_clock;
    const auto deadline = Clock::now() + to_milliseconds(timeout_s.value_or(timeout_s_));
    constexpr std::chrono::milliseconds slice(200);
    while (true) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
      try {
        py::gil_scoped_release release;
        const std::size_t bytes = request_->wait(std::clamp(left, {}, slice));
        if (until_delivered && request_->delivered_at_ns() > 0)
          sleep_until_ns(request_->delivered_at_ns());
        return bytes;
      } catch (const dicomm::TimeoutError&) {
        if (left <= slice) throw;
      }
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
  }

  int peer() const { return request_->peer(); }
  std::int64_t delivered_at_ns() const { return request_->delivered_at_ns(); }

 private:
  Memory memory_;
  std::shared_ptr<Request> request_;
  double timeout_s_;
};

dicomm::Transport transport_named(const std::string& name) {
  if (name == "auto") return dicomm::Transport::automatic;
  if (name == "shm") return dicomm::Transport::shm;
  if (name == "tcp") return dicomm::Transport::tcp;
  throw dicomm::Error("transport '" + name + "': expected auto, shm or tcp");
}

std::shared_ptr<Communicator> create(int rank, int world_size, py::object store,
                                     const std::string& secret, const std::string& transport,
                                     double timeout_s, const std::string& name,
                                     const std::string& rank_label,
                                     const std::string& listen_address) {
  dicomm::Options options;
  options.rank = rank;
  options.world_size = world_size;
  options.secret = secret;
  options.name = name;
  options.rank_label = rank_label;
  options.transport = transport_named(transport);
  options.listen_address = listen_address;
  options.timeout = to_milliseconds(timeout_s);
  auto python_store = std::make_shared<PythonStore>(std::move(store));
  py::gil_scoped_release release;
  auto communicator = Communicator::create(std::move(python_store), options);
  // The last reference may be dropped with the interpreter's lock held, which the store needs.
  return {communicator.get(), [communicator](Communicator*) mutable {
            py::gil_scoped_release unlocked;
            communicator.reset();
          }};
}

PythonRequest isend(Communicator& self, const py::object& buffer, int peer, std::uint64_t tag,
                    std::int64_t ready_at_ns) {
  Memory data = memory(buffer, false);
  py::gil_scoped_release release;
  auto request = self.isend(data.data, data.bytes, peer, tag, ready_at_ns);
  return {std::move(request), std::move(data), seconds(self.timeout())};
}

PythonRequest irecv(Communicator& self, const py::object& buffer, int peer, std::uint64_t tag) {
  Memory data = memory(buffer, true);
  py::gil_scoped_release release;
  auto request = self.irecv(data.data, data.bytes, peer, tag);
  return {std::move(request), std::move(data), seconds(self.timeout())};
}

}  // namespace

PYBIND11_MODULE(_dicomm, m) {
  m.doc() = "libdicomm: tagged messages between the ranks of one job.";
  m.attr("ANY_SOURCE") = Communicator::any_source;

  const auto error = py::register_exception<dicomm::Error>(m, "Error", PyExc_RuntimeError);
  const auto also = [&](const char* builtin) {
    return py::make_tuple(error, py::module_::import("builtins").attr(builtin));
  };
  py::register_exception<dicomm::TimeoutError>(m, "TimeoutError", also("TimeoutError"));
  py::register_exception<dicomm::PeerError>(m, "PeerError", also("ConnectionError"));
  py::register_exception<dicomm::AbortedError>(m, "AbortedError", error);

  py::class_<PythonRequest>(m, "Request",
                            "One send or receive in flight. Keeps its buffer alive; dropping it "
                            "before it is done cancels it.")
      .def("test", &PythonRequest::test, "True when finished; raises what wait() would raise.")
      .def("wait", &PythonRequest::wait, py::arg("timeout_s") = py::none(),
           py::arg("until_delivered") = true,
           "Returns the number of bytes moved. On a paced link also sleeps until the emulated "
           "delivery, unless until_delivered is false.")
      .def_property_readonly("peer", &PythonRequest::peer)
      .def_property_readonly("delivered_at_ns", &PythonRequest::delivered_at_ns,
                             "CLOCK_MONOTONIC ns of the emulated delivery; 0 if not paced.");

  py::class_<Communicator, std::shared_ptr<Communicator>>(m, "Communicator")
      .def(py::init(&create), py::arg("rank"), py::arg("world_size"), py::arg("store"),
           py::kw_only(), py::arg("secret"), py::arg("transport") = "auto",
           py::arg("timeout_s") = 300.0, py::arg("name") = "default", py::arg("rank_label") = "",
           py::arg("listen_address") = "",
           "store: set(key, bytes) and get(key, timeout_s) -> bytes, shared by all ranks.")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("world_size", &Communicator::world_size)
      .def("isend", &isend, py::arg("buffer"), py::arg("peer"), py::arg("tag") = 0,
           py::arg("ready_at_ns") = 0,
           "buffer: any contiguous buffer, or (address, bytes) of memory the caller keeps alive.")
      .def("irecv", &irecv, py::arg("buffer"), py::arg("peer"), py::arg("tag") = 0)
      .def(
          "send",
          [](Communicator& self, const py::object& buffer, int peer, std::uint64_t tag,
             std::optional<double> timeout_s) {
            return isend(self, buffer, peer, tag, 0).wait(timeout_s, false);
          },
          py::arg("buffer"), py::arg("peer"), py::arg("tag") = 0, py::arg("timeout_s") = py::none())
      .def(
          "recv",
          [](Communicator& self, const py::object& buffer, int peer, std::uint64_t tag,
             std::optional<double> timeout_s) {
            return irecv(self, buffer, peer, tag).wait(timeout_s, true);
          },
          py::arg("buffer"), py::arg("peer"), py::arg("tag") = 0, py::arg("timeout_s") = py::none(),
          "Returns the length of the message in bytes.")
      .def(
          "set_link",
          [](Communicator& self, int peer, double latency_s, double bytes_per_s) {
            self.set_link(peer, {latency_s, bytes_per_s});
          },
          py::arg("peer"), py::arg("latency_s"), py::arg("bytes_per_s"),
          "Paces messages to a peer; bytes_per_s = 0: not paced.")
      .def("bytes_sent", &Communicator::bytes_sent, py::arg("peer"))
      .def("abort", &Communicator::abort, py::arg("reason"),
           py::call_guard<py::gil_scoped_release>())
      .def("close", &Communicator::close, py::call_guard<py::gil_scoped_release>())
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](Communicator& self, const py::args&) {
        py::gil_scoped_release release;
        self.close();
      });
}
