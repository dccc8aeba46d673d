// SPDX-License-Identifier: Apache-2.0
// A GPU's driver: copies by DMA, registered host memory, contexts. For CUDA and for HIP.
#pragma once

#include "vendors/driver.h"

namespace simulator {

struct DriverSettings {
  int version = 0;
  bool contexts = true;            // CUDA: a thread needs one for the driver's calls
  size_t registered_bytes = 0;     // the most host memory that may be registered
};

void open_driver(const DriverSettings& settings);
const Driver& driver();

// The runtime's own call for it, which leaves its error behind.
int runtime_host_register(void* address, size_t size);

}  // namespace simulator
