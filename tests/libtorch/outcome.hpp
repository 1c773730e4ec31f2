// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>
#include <syncbn/torch.hpp>

#include <stdexcept>
#include <string>
#include <vector>

using syncbn::torch::ProcessGroupCommunicator;
using syncbn::torch::SyncBatchNorm;
using syncbn::torch::SyncBatchNormOptions;

template <class Body>
std::string outcome(const Body& body) {
  try {
    body();
    return "ok";
  } catch (const syncbn::DivergenceError& error) {
    return std::string("DivergenceError: ") + error.what();
  } catch (const syncbn::ExchangeTimeout& error) {
    return std::string("ExchangeTimeout: ") + error.what();
  } catch (const syncbn::PeerLost& error) {
    return std::string("PeerLost: ") + error.what();
  } catch (const syncbn::InvalidArgument& error) {
    return std::string("InvalidArgument: ") + error.what();
  } catch (const c10::Error& error) {
    return std::string("c10::Error: ") + error.what_without_backtrace();
  } catch (const std::runtime_error& error) {
    return std::string("runtime_error: ") + error.what();
  }
}

using Lines = std::vector<std::string>;
