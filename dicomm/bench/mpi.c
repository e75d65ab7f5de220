// The MPI side of dicomm-bench: rank 0 reads an order a line, "KIND BYTES WINDOW COUNT", all ranks
// do it, and rank 0 answers "P50_US P99_US". The kinds are those of timing.py and
// torch_collectives.py.
#define _GNU_SOURCE
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef struct Order {
  char kind[32];
  long bytes, window, count;
} Order;

enum { kMaxWindow = 64, kTag = 1 };

static int rank, size;
static char *out, *into;
static MPI_Request requests[2 * kMaxWindow];

static double now_us(void) {
  struct timespec moment;
  clock_gettime(CLOCK_MONOTONIC, &moment);
  return moment.tv_sec * 1e6 + moment.tv_nsec * 1e-3;
}

// Page-aligned, in huge pages where it is long, and written once.
static char* memory(size_t bytes) {
  void* pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) {
    fprintf(stderr, "no memory for %zu bytes\n", bytes);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  madvise(pages, bytes, MADV_HUGEPAGE);
  memset(pages, 0, bytes);
  return pages;
}

static void send(char* data, long bytes) {
  MPI_Send(data, (int)bytes, MPI_BYTE, 1 - rank, kTag, MPI_COMM_WORLD);
}

static void receive(char* data, long bytes) {
  MPI_Recv(data, (int)bytes, MPI_BYTE, 1 - rank, kTag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

static void latency(const Order* order) {
  if (rank == 0) {
    send(out, order->bytes);
    receive(into, order->bytes);
  } else {
    receive(into, order->bytes);
    send(out, order->bytes);
  }
}

static int post_send(const Order* order, int posted) {
  MPI_Isend(out, (int)order->bytes, MPI_BYTE, 1 - rank, kTag, MPI_COMM_WORLD, &requests[posted]);
  return posted + 1;
}

static int post_receive(const Order* order, int posted) {
  MPI_Irecv(into, (int)order->bytes, MPI_BYTE, 1 - rank, kTag, MPI_COMM_WORLD, &requests[posted]);
  return posted + 1;
}

static void uni(const Order* order) {
  int posted = 0;
  while (posted < order->window)
    posted = rank == 0 ? post_send(order, posted) : post_receive(order, posted);
  MPI_Waitall(posted, requests, MPI_STATUSES_IGNORE);
  char answer = 0;
  if (rank == 0)
    receive(&answer, 1);
  else
    send(&answer, 1);
}

static void bi(const Order* order) {
  int posted = 0;
  while (posted < 2 * order->window) posted = post_send(order, post_receive(order, posted));
  MPI_Waitall(posted, requests, MPI_STATUSES_IGNORE);
}

// One call for each rank as the root; the rootless ones are called once.
static int collective(const Order* order) {
  const int part = (int)((order->bytes + 4L * size - 1) / (4L * size));
  const int whole = part * size;
  const MPI_Comm all = MPI_COMM_WORLD;
  if (!strcmp(order->kind, "barrier")) return MPI_Barrier(all), 1;
  if (!strcmp(order->kind, "allreduce"))
    return MPI_Allreduce(MPI_IN_PLACE, out, whole, MPI_FLOAT, MPI_SUM, all), 1;
  if (!strcmp(order->kind, "allgather"))
    return MPI_Allgather(out, part, MPI_FLOAT, into, part, MPI_FLOAT, all), 1;
  if (!strcmp(order->kind, "reduce_scatter"))
    return MPI_Reduce_scatter_block(out, into, part, MPI_FLOAT, MPI_SUM, all), 1;
  if (!strcmp(order->kind, "alltoall"))
    return MPI_Alltoall(out, part, MPI_FLOAT, into, part, MPI_FLOAT, all), 1;
  for (int root = 0; root < size; ++root) {
    if (!strcmp(order->kind, "broadcast"))
      MPI_Bcast(out, whole, MPI_FLOAT, root, all);
    else if (!strcmp(order->kind, "reduce"))
      MPI_Reduce(rank == root ? MPI_IN_PLACE : out, out, whole, MPI_FLOAT, MPI_SUM, root, all);
    else if (!strcmp(order->kind, "gather"))
      MPI_Gather(out, part, MPI_FLOAT, into, part, MPI_FLOAT, root, all);
    else if (!strcmp(order->kind, "scatter"))
      MPI_Scatter(into, part, MPI_FLOAT, out, part, MPI_FLOAT, root, all);
    else
      return 0;
  }
  return size;
}

// Does one step; by how much its time is divided, 0 for an unknown kind.
static int step(const Order* order) {
  if (!strcmp(order->kind, "latency")) return latency(order), 2;
  if (!strcmp(order->kind, "uni")) return uni(order), 1;
  if (!strcmp(order->kind, "bi")) return bi(order), 1;
  return collective(order);
}

static int compare(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static void perform(const Order* order) {
  double* samples = malloc(order->count * sizeof *samples);
  int parts = 0;
  for (long i = 0; i < order->count / 10 + 1; ++i) parts = step(order);
  double before = now_us();
  for (long i = 0; i < order->count && parts; ++i) {
    step(order);
    const double now = now_us();
    samples[i] = (now - before) / parts;
    before = now;
  }
  if (rank == 0 && parts) {
    qsort(samples, order->count, sizeof *samples, compare);
    const long n = order->count;
    const double median = (samples[(n - 1) / 2] + samples[n / 2]) / 2;
    printf("%.4f %.4f\n", median, samples[(n * 99 + 99) / 100 - 1]);
  } else if (rank == 0) {
    printf("MPI has no %s here\n", order->kind);
  }
  fflush(stdout);
  free(samples);
}

// Rank 0 reads the next order and tells it to the others, who sleep meanwhile: ranks that spin
// between orders would disturb whatever is measured beside them. An empty kind: the end.
static Order next_order(void) {
  Order order;
  memset(&order, 0, sizeof order);
  if (rank == 0) {
    if (scanf("%31s %ld %ld %ld", order.kind, &order.bytes, &order.window, &order.count) != 4)
      order.kind[0] = 0;
    for (int peer = 1; peer < size; ++peer)
      MPI_Send(&order, sizeof order, MPI_BYTE, peer, 0, MPI_COMM_WORLD);
    return order;
  }
  for (int there = 0; !there;) {
    MPI_Iprobe(0, 0, MPI_COMM_WORLD, &there, MPI_STATUS_IGNORE);
    if (!there) usleep(5000);
  }
  MPI_Recv(&order, sizeof order, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  return order;
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (rank == 0) {
    printf("ready\n");
    fflush(stdout);
  }
  long held_bytes = 0;
  for (Order order = next_order(); order.kind[0]; order = next_order()) {
    const long needed_bytes = order.bytes + 4L * size;
    if (needed_bytes != held_bytes) {
      if (held_bytes) munmap(out, held_bytes), munmap(into, held_bytes);
      out = memory(needed_bytes);
      into = memory(needed_bytes);
      held_bytes = needed_bytes;
    }
    perform(&order);
  }
  MPI_Finalize();
  return 0;
}
