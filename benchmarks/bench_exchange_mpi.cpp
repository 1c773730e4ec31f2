// SPDX-License-Identifier: Apache-2.0
// As bench_exchange, between ranks of MPI: mpiexec -n 2 bench_exchange_mpi [--rounds=] [--json=]
#include <mpi.h>

#include <syncbn/mpi.hpp>
#include <thread>

#include "exchange_times.hpp"

namespace {

void run(const syncbn::bench::ExchangeOptions& options) {
  syncbn::MpiCommunicator group(MPI_COMM_WORLD);
  syncbn::bench::ExchangeRows rows;
  if (group.rank() == 0) {
    rows.print_heading(std::thread::hardware_concurrency());
  }
  for (const std::int64_t channels : syncbn::bench::kExchangeChannels) {
    const auto times = syncbn::bench::measure_exchange(
        group, syncbn::bench::exchange_words(channels), options.rounds);
    if (group.rank() == 0) {
      rows.add("MPI", group.size(), channels, times);
    }
  }
  if (group.rank() == 0) {
    rows.write(options.json);
  }
}

}  // namespace

int main(int count, char** arguments) {
  const syncbn::bench::ExchangeOptions options(count, arguments);
  MPI_Init(&count, &arguments);
  run(options);  // the group ends before MPI does
  MPI_Finalize();
}
