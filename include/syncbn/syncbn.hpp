// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Includes all C++ headers of libsyncbn, and not those of the libraries beside it: syncbn/mpi.hpp,
/// syncbn/nccl.hpp and, for LibTorch, syncbn/torch.hpp.
#include "syncbn/batch_norm.hpp"
#include "syncbn/batch_norm_op.hpp"
#include "syncbn/communicator.hpp"
#include "syncbn/cuda_communicator.hpp"
#include "syncbn/diagnosis.hpp"
#include "syncbn/error.hpp"
#include "syncbn/executor.hpp"
#include "syncbn/framed_exchange.hpp"
#include "syncbn/message.hpp"
#include "syncbn/options.hpp"
#include "syncbn/shared_memory.hpp"
#include "syncbn/step.hpp"
#include "syncbn/tensor.hpp"
#include "syncbn/version.h"
