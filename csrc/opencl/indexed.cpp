// Elements of a table that an index names.
#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <vector>

#include "kernels.h"
#include "rows.h"
#include "sort.h"

namespace opencl {
namespace {

constexpr int64_t kMostIndexedDimensions = 8;
constexpr int64_t kPositionsOfProcessor = 64;  // of one item; a GPU's have one each
constexpr int64_t kSearchers = 256;            // items that look for faulty indices

// Some of the dimensions: `walk` of the kernels.
struct IndexedWalk {
  cl_long dimensions = 0;
  cl_long sizes[kMostIndexedDimensions], dense[kMostIndexedDimensions],
      index[kMostIndexedDimensions], table[kMostIndexedDimensions];

  // Makes it one with the dimension before where that is the same. False if there is no room.
  bool add(const ditorch_indexed& call, int32_t d) {
    const cl_long size = call.sizes[d];
    const cl_long of_dense = call.dense.strides[d], of_index = call.index.strides[d],
                  of_table = call.table.strides[d];
    if (size == 1) return true;
    const cl_long before = dimensions - 1;
    if (dimensions > 0 && dense[before] == size * of_dense && index[before] == size * of_index &&
        table[before] == size * of_table) {
      set(before, sizes[before] * size, of_dense, of_index, of_table);
      return true;
    }
    if (dimensions == kMostIndexedDimensions) return false;
    set(dimensions++, size, of_dense, of_index, of_table);
    return true;
  }

  // Kernels walk over one dimension at least.
  void finish() {
    if (dimensions == 0) set(dimensions++, 1, 0, 0, 0);
  }

  int64_t places(cl_long end) const {
    int64_t product = 1;
    for (cl_long d = 0; d < end; ++d) product *= sizes[d];
    return product;
  }
  int64_t places() const { return places(dimensions); }
  cl_long last_size() const { return sizes[dimensions - 1]; }
  bool is_row() const {
    const cl_long last = dimensions - 1;
    return dense[last] == 1 && index[last] == 0 && table[last] == 1;
  }

 private:
  void set(cl_long d, cl_long size, cl_long of_dense, cl_long of_index, cl_long of_table) {
    sizes[d] = size, dense[d] = of_dense, index[d] = of_index, table[d] = of_table;
  }
};

// `lookup` of the kernels.
struct Lookup {
  cl_long stride, length, skipped;
};

struct IndexedWalks {
  IndexedWalk all;     // every dimension
  IndexedWalk places;  // those along which the index changes, or the table stands still
  IndexedWalk row;     // the others: what lies behind one place, all of it apart in the table
  // Places that may name one element lie in one group of so many: the dimensions along which the
  // table stands still come last.
  int64_t group = 1;
};

std::optional<IndexedWalks> walks_of(const ditorch_indexed& call) {
  IndexedWalks walks;
  bool fits = true;
  for (int32_t d = 0; d < call.dimensions; ++d) {
    fits &= walks.all.add(call, d);
    if (call.table.strides[d] == 0) continue;
    fits &= (call.index.strides[d] == 0 ? walks.row : walks.places).add(call, d);
  }
  for (int32_t d = 0; d < call.dimensions; ++d) {
    if (call.table.strides[d] != 0) continue;
    fits &= walks.places.add(call, d);
    walks.group *= call.sizes[d];
  }
  if (!fits) return std::nullopt;
  for (IndexedWalk* walk : {&walks.all, &walks.places, &walks.row}) walk->finish();
  return walks;
}

Lookup lookup_of(const ditorch_indexed& call) {
  return {call.table_stride, call.table_length, call.skipped};
}

// Of a program for elements that the kernels call `data`.
std::string options_of(const Device& device, const ditorch_indexed& call, const std::string& data) {
  return compute_options(device, call.dense.dtype) + " -DDATA=" + data +
         " -DINDEX=" + element_of(device, call.index.dtype) +
         " -DMOST_DIMENSIONS=" + std::to_string(kMostIndexedDimensions);
}

// What is only moved is an integer of its size, whether or not the device computes in its dtype.
std::string moved_as(ditorch_dtype dtype) { return "i" + std::to_string(8 * bytes_of(dtype)); }

bool is_known(const ditorch_indexed& call) {
  return call.dense.dtype <= DITORCH_BOOL && call.dense.dtype == call.table.dtype &&
         (call.index.dtype == DITORCH_INT64 || call.index.dtype == DITORCH_INT32);
}

// Waits for the index to be there, as a host that has to name a faulty one must. That is said
// before anything is written, and always: a check that depended on how busy the stream is would
// find the same fault in some runs only.
bool has_faults(Submission& submission, const ditorch_indexed& call, const IndexedWalk& places,
                const std::string& options) {
  const int64_t count = places.places();
  const auto items = static_cast<size_t>(std::min(count, kSearchers));
  void* faults = submission.scratch(items);
  submission.launch_items(submission.device().programs->kernel("indexed", options, "find_faults"),
                          {items, 1, 1}, call.index.data, faults, static_cast<cl_long>(items),
                          cl_long{count}, places, lookup_of(call));
  std::array<cl_uchar, kSearchers> found{};
  submission.copy(found.data(), faults, items, true);
  return std::any_of(found.begin(), found.end(), [](cl_uchar fault) { return fault != 0; });
}

ditorch_status move(const ditorch_context* context, const ditorch_indexed& call,
                    const char* kernel) {
  return guarded([&] {
    Device& device = device_at(context->device);
    const auto walks = walks_of(call);
    if (!is_known(call) || !walks) return DITORCH_NOT_IMPLEMENTED;
    const IndexedWalk& all = walks->all;
    const int64_t run = run_of_item(device);
    const std::string options = options_of(device, call, moved_as(call.dense.dtype)) +
                                " -DRUN=" + std::to_string(run) + (all.is_row() ? " -DIS_ROW" : "");
    Submission submission(device.streams->of(context->stream));
    if (has_faults(submission, call, walks->places, options)) return DITORCH_NOT_IMPLEMENTED;
    submission.launch_items(
        device.programs->kernel("indexed", options, kernel),
        {count_of(all.last_size(), run), static_cast<size_t>(all.places(all.dimensions - 1)), 1},
        call.dense.data, call.index.data, call.table.data, all, lookup_of(call));
    return DITORCH_OK;
  });
}

}  // namespace

ditorch_status gather(const ditorch_context* context, const ditorch_indexed* call) {
  return move(context, *call, "gather");
}

ditorch_status scatter(const ditorch_context* context, const ditorch_indexed* call) {
  return move(context, *call, "scatter");
}

ditorch_status scatter_add(const ditorch_context* context, const ditorch_indexed* call) {
  return guarded([&] {
    Device& device = device_at(context->device);
    const auto walks = walks_of(*call);
    const std::string data = name_of(device, call->dense.dtype);
    if (!is_known(*call) || data.empty() || !walks ||
        walks->group > std::numeric_limits<cl_uint>::max()) {
      return DITORCH_NOT_IMPLEMENTED;
    }
    const IndexedWalk& row = walks->row;
    const cl_long places = walks->places.places();
    const int64_t positions = device.is_cpu ? kPositionsOfProcessor : 1;
    const std::string options =
        options_of(device, *call, data) + " -DIS_SUM -DPOSITIONS=" + std::to_string(positions);
    Submission submission(device.streams->of(context->stream));
    if (has_faults(submission, *call, walks->places, options)) return DITORCH_NOT_IMPLEMENTED;

    const cl_long group = walks->group;
    Rows rows{nullptr, DITORCH_INT64, places / group, group, group, false};
    auto* targets = static_cast<cl_long*>(submission.scratch(
        static_cast<size_t>(places) * 2 * sizeof(cl_long) + bytes_of_order(rows)));
    auto* sources = targets + places;
    rows.data = targets;
    submission.launch_items(device.programs->kernel("indexed", options, "find_rows"),
                            {static_cast<size_t>(places), 1, 1}, call->index.data, targets, sources,
                            places, walks->places, lookup_of(*call));
    const cl_uint* order = order_of(submission, rows, sources + places);
    submission.launch_items(
        device.programs->kernel("indexed", options, "add_rows"),
        {count_of(row.last_size(), vector_width(device, call->dense.dtype)),
         static_cast<size_t>(row.places(row.dimensions - 1)), count_of(places, positions)},
        call->dense.data, call->table.data, targets, sources, order, places, group, row);
    return DITORCH_OK;
  });
}

}  // namespace opencl
