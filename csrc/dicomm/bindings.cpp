// The Python binding of libdicomm, without torch: dicomm._dicomm.
#include <fcntl.h>
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "core/communicator.h"

namespace py = pybind11;

void bind_topology(py::module_& m);  // bindings_topology.cpp

namespace {

using dicomm::Communicator;
using dicomm::Request;
using Seconds = std::chrono::duration<double>;

double seconds(Seconds duration) { return duration.count(); }

std::chrono::milliseconds to_milliseconds(double timeout_s) {
  if (std::isnan(timeout_s)) throw dicomm::Error("timeout_s is nan, expected a number of seconds");
  constexpr Seconds most = dicomm::kForEver;
  return std::chrono::ceil<std::chrono::milliseconds>(std::clamp(Seconds(timeout_s), -most, most));
}

// With a duplicate of the descriptor, which goes when the memory is forgotten.
dicomm::MemoryRegion memory_region(std::uint64_t address, std::uint64_t bytes, int dmabuf_fd,
                                   std::uint64_t dmabuf_offset) {
  dicomm::MemoryRegion region{address, bytes};
  if (dmabuf_fd < 0) return region;
  const auto kept = std::make_shared<const dicomm::Fd>(::fcntl(dmabuf_fd, F_DUPFD_CLOEXEC, 0));
  if (!*kept)
    throw dicomm::Error("declare_memory: dmabuf_fd is " + std::to_string(dmabuf_fd) +
                        ", expected an open descriptor");
  region.export_dmabuf = [=](std::uint64_t first, std::uint64_t) -> std::optional<dicomm::Dmabuf> {
    dicomm::Fd own(::fcntl(kept->get(), F_DUPFD_CLOEXEC, 0));
    if (!own) return std::nullopt;
    return dicomm::Dmabuf{std::move(own), dmabuf_offset + first - address};
  };
  return region;
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
class Memory {
 public:
  Memory(const py::handle& object, bool writable) {
    if (PyTuple_Check(object.ptr())) {
      const auto [address, bytes] = object.cast<std::pair<std::uintptr_t, std::size_t>>();
      view_.buf = reinterpret_cast<void*>(address);
      view_.len = static_cast<Py_ssize_t>(bytes);
    } else if (PyObject_GetBuffer(object.ptr(), &view_,
                                  writable ? PyBUF_CONTIG : PyBUF_CONTIG_RO)) {
      throw py::error_already_set();
    }
  }
  // The object stays alive, and its size fixed, until then; needs the interpreter's lock.
  ~Memory() { PyBuffer_Release(&view_); }
  Memory(Memory&& other) noexcept : view_(std::exchange(other.view_, Py_buffer{})) {}

  void* data() const { return view_.buf; }
  std::size_t bytes() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

void sleep_until_ns(std::int64_t t) {
  const timespec moment{t / 1'000'000'000, t % 1'000'000'000};
  while (::clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &moment, nullptr) == EINTR) {
  }
}

// Waits in slices, so that Ctrl-C is noticed. The interpreter's lock is let go of only to wait:
// that costs as much as a short message.
std::size_t finish(Request& request, double timeout_s, bool until_delivered) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds slice(200);
  if (request.finished() && request.delivered_at_ns() == 0) return request.wait();
  auto left = to_milliseconds(timeout_s);
  const auto start = Clock::now();
  while (true) {
    try {
      py::gil_scoped_release release;
      const std::size_t bytes = request.wait(std::clamp(left, {}, slice));
      if (until_delivered && request.delivered_at_ns() > 0)
        sleep_until_ns(request.delivered_at_ns());
      return bytes;
    } catch (const dicomm::TimeoutError&) {
      left = std::chrono::ceil<std::chrono::milliseconds>(start + to_milliseconds(timeout_s) -
                                                          Clock::now());
      if (left.count() <= 0) throw;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

class PythonRequest {
 public:
  PythonRequest(std::shared_ptr<Request> request, Memory memory, double timeout_s)
      : memory_(std::move(memory)), request_(std::move(request)), timeout_s_(timeout_s) {}
  PythonRequest(PythonRequest&&) = default;
  ~PythonRequest() {
    if (!request_ || request_->finished()) return;
    py::gil_scoped_release release;  // its end may take a while
    request_.reset();                // before its memory
  }

  bool test() {
    py::gil_scoped_release release;
    return request_->test();
  }

  std::size_t wait(std::optional<double> timeout_s, bool until_delivered) {
    return finish(*request_, timeout_s.value_or(timeout_s_), until_delivered);
  }

  int peer() const { return request_->peer(); }
  std::int64_t delivered_at_ns() const { return request_->delivered_at_ns(); }

 private:
  Memory memory_;
  std::shared_ptr<Request> request_;
  double timeout_s_;
};

// Those that a script leaves open are closed while Python still runs: their threads use its store.
std::vector<std::weak_ptr<Communicator>> left_open;

void close_left_open() {
  for (const auto& weak : std::exchange(left_open, {}))
    if (const auto communicator = weak.lock()) {
      py::gil_scoped_release release;
      communicator->close();
    }
}

void remember(const std::shared_ptr<Communicator>& communicator) {
  std::erase_if(left_open, [](const auto& weak) { return weak.expired(); });
  left_open.push_back(communicator);
}

std::shared_ptr<Communicator> create(int rank, int world_size, py::object store,
                                     const std::string& secret, const std::string& transport,
                                     double timeout_s, const std::string& name,
                                     const std::string& rank_label,
                                     const std::string& listen_address, const std::string& chip,
                                     const std::string& nics, const dicomm::VerbsOptions& verbs) {
  dicomm::Options options;
  options.rank = rank;
  options.world_size = world_size;
  options.secret = secret;
  options.name = name;
  options.rank_label = rank_label;
  options.transport = dicomm::known_transport(transport);
  options.listen_address = listen_address;
  options.chip = chip;
  options.nics = nics;
  options.verbs = verbs;
  options.timeout = to_milliseconds(timeout_s);
  auto python_store = std::make_shared<PythonStore>(std::move(store));
  std::shared_ptr<Communicator> communicator;
  {
    py::gil_scoped_release release;
    communicator = Communicator::create(std::move(python_store), options);
  }
  remember(communicator);
  // The last reference may be dropped with the interpreter's lock held, which the store needs.
  return {communicator.get(), [communicator](Communicator*) mutable {
            py::gil_scoped_release unlocked;
            communicator.reset();
          }};
}

using Number = std::optional<int>;

std::shared_ptr<Communicator> create_with_keywords(
    int rank, int world_size, py::object store, const std::string& secret,
    const std::string& transport, double timeout_s, const std::string& name,
    const std::string& rank_label, const std::string& listen_address, const std::string& chip,
    const std::string& nics, Number gid_index, Number mtu_bytes, Number traffic_class,
    Number hop_limit, Number qp_timeout, Number retry_count, Number rnr_retry,
    const std::string& connect) {
  return create(rank, world_size, std::move(store), secret, transport, timeout_s, name, rank_label,
                listen_address, chip, nics,
                {gid_index, mtu_bytes, traffic_class, hop_limit, qp_timeout, retry_count, rnr_retry,
                 connect});
}

py::dict describe_link(const Communicator& self, int peer) {
  const dicomm::LinkDescription link = self.describe_link(peer);
  py::list rails;
  for (const dicomm::RailDescription& rail : link.rails) {
    py::dict words;
    words["device"] = rail.device;
    words["gid"] = rail.gid;
    words["peer_gid"] = rail.peer_gid;
    words["mtu_bytes"] = rail.mtu_bytes;
    words["up"] = rail.up;
    words["connect"] = rail.connect;
    rails.append(words);
  }
  py::dict result;
  result["transport"] = link.transport;
  result["rails"] = rails;
  result["protection"] = link.protection;
  return result;
}

PythonRequest isend(Communicator& self, const py::object& buffer, int peer, std::uint64_t tag,
                    std::int64_t ready_at_ns) {
  Memory memory(buffer, false);
  auto request = self.isend(memory.data(), memory.bytes(), peer, tag, ready_at_ns);
  return {std::move(request), std::move(memory), seconds(self.timeout())};
}

PythonRequest irecv(Communicator& self, const py::object& buffer, int peer, std::uint64_t tag) {
  Memory memory(buffer, true);
  auto request = self.irecv(memory.data(), memory.bytes(), peer, tag);
  return {std::move(request), std::move(memory), seconds(self.timeout())};
}

}  // namespace

PYBIND11_MODULE(_dicomm, m) {
  m.doc() = "libdicomm: tagged messages between the ranks of one job.";
  py::module_::import("atexit").attr("register")(py::cpp_function(close_left_open));
  m.attr("ANY_SOURCE") = Communicator::any_source;

  const auto error = py::register_exception<dicomm::Error>(m, "Error", PyExc_RuntimeError);
  const auto also = [&](const char* builtin) {
    return py::make_tuple(error, py::module_::import("builtins").attr(builtin));
  };
  py::register_exception<dicomm::TimeoutError>(m, "TimeoutError", also("TimeoutError"));
  py::register_exception<dicomm::PeerError>(m, "PeerError", also("ConnectionError"));
  py::register_exception<dicomm::AbortedError>(m, "AbortedError", error);

  bind_topology(m);

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
      .def(py::init(&create_with_keywords), py::arg("rank"), py::arg("world_size"),
           py::arg("store"), py::kw_only(), py::arg("secret"), py::arg("transport") = "auto",
           py::arg("timeout_s") = 300.0, py::arg("name") = "default", py::arg("rank_label") = "",
           py::arg("listen_address") = "", py::arg("chip") = "", py::arg("nics") = "",
           py::arg("gid_index") = py::none(), py::arg("mtu_bytes") = py::none(),
           py::arg("traffic_class") = py::none(), py::arg("hop_limit") = py::none(),
           py::arg("qp_timeout") = py::none(), py::arg("retry_count") = py::none(),
           py::arg("rnr_retry") = py::none(), py::arg("connect") = "",
           "store: set(key, bytes) and get(key, timeout_s) -> bytes, shared by all ranks.\n"
           "transport: auto, shm, tcp or verbs. chip: the PCI address of this rank's chip, for the "
           "choice of its NICs; nics: device[:port],... instead of that choice. What else is said "
           "of verbs is chosen where it is not given (or set by DICOMM_GID_INDEX, ...).")
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
      .def("describe_link", &describe_link, py::arg("peer"),
           "{'transport': 'shm', 'tcp', 'verbs' or '' while not connected, 'rails': [{'device', "
           "'gid', 'peer_gid', 'mtu_bytes', 'up', 'connect'}], 'protection': such as "
           "'integrity by AES-128-GCM', or ''}")
      .def(
          "declare_memory",
          [](Communicator& self, std::uint64_t address, std::uint64_t bytes, int dmabuf_fd,
             std::uint64_t dmabuf_offset) {
            self.declare_memory(memory_region(address, bytes, dmabuf_fd, dmabuf_offset));
          },
          py::arg("address"), py::arg("bytes"), py::arg("dmabuf_fd") = -1,
          py::arg("dmabuf_offset") = 0, py::call_guard<py::gil_scoped_release>(),
          "Memory that keeps its pages until forget_memory(): RDMA registers it once. dmabuf_fd "
          "stays the caller's, who may close it at once.")
      .def("forget_memory", &Communicator::forget_memory, py::arg("address"), py::arg("bytes"),
           py::call_guard<py::gil_scoped_release>())
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
