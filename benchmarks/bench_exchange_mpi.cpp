// SPDX-License-Identifier: Apache-2.0
// As bench_exchange, between ranks of MPI: mpiexec -n 2 bench_exchange_mpi [--rounds=] [--json=]
#include <mpi.h>

#include <syncbn/mpi.hpp>
#include <thread>

#include "exchange_times.hpp"

namespace {

/// Exchanges of ranks that share memory with those of their node; ranks of one node follow one
/// another.
void measure(const char* engine, int nodes, const syncbn::bench::ExchangeOptions& options,
             syncbn::bench::ExchangeRows& rows) {
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Comm node = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank * nodes / size, rank, &node);
  syncbn::MpiCommunicator group(MPI_COMM_WORLD, syncbn::MpiCommunicator::kDefaultTimeout, node);
  MPI_Comm_free(&node);
  for (const std::int64_t channels : syncbn::bench::kExchangeChannels) {
    const auto times = syncbn::bench::measure_exchange(
        group, syncbn::bench::exchange_words(channels), options.rounds);
    if (rank == 0) {
      rows.add(engine, size, channels, times);
    }
  }
}

void run(const syncbn::bench::ExchangeOptions& options) {
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  syncbn::bench::ExchangeRows rows;
  if (rank == 0) {
    rows.print_heading(std::thread::hardware_concurrency());
  }
  measure("MPI", size, options, rows);
  if (size > 2) {
    measure("MPI, 2 nodes", 2, options, rows);
  }
  if (rank == 0) {
    rows.write(options.json);
  }
}

}  // namespace

int main(int count, char** arguments) {
  const syncbn::bench::ExchangeOptions options(count, arguments);
  MPI_Init(&count, &arguments);
  run(options);  // the groups end before MPI does
  MPI_Finalize();
}
