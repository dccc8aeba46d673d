// SPDX-License-Identifier: Apache-2.0
// A simulated libamdhip64.so.7: the calls that KVHaven makes of AMD's runtime.
#include "driver.h"

namespace {

const Driver* driver = nullptr;

// Every call leaves its error behind in its thread.
int left(int error) {
  if (error && driver) driver->leave_error(error);
  return error;
}

int copy_one(void* target, void* source, size_t size, void* stream) {
  if (!driver) return kNotInitialized;
  const Copies copies{&target, &source, &size, 1, stream, false, nullptr};
  return left(driver->copy(&copies));
}

}  // namespace

extern "C" {

void simulator_attach(const Driver* found) { driver = found; }

int hipMemcpyDtoHAsync(void* target, void* source, size_t size, void* stream) {
  return copy_one(target, source, size, stream);
}
int hipMemcpyHtoDAsync(void* target, void* source, size_t size, void* stream) {
  return copy_one(target, source, size, stream);
}
int hipHostRegister(void* address, size_t size, unsigned) {
  return driver ? left(driver->host_register(address, size)) : kNotInitialized;
}
int hipHostUnregister(void* address) {
  return driver ? left(driver->host_unregister(address)) : kNotInitialized;
}
int hipThreadExchangeStreamCaptureMode(int* mode) {
  return driver ? left(driver->exchange_capture_mode(mode)) : 0;
}
int hipGetLastError() { return driver ? driver->take_error() : 0; }

}  // extern "C"
