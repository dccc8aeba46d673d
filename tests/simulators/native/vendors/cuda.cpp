// SPDX-License-Identifier: Apache-2.0
// A simulated libcuda.so.1: the calls that KVHaven makes of CUDA's driver, by cuda.h's signatures.
#include <cstdint>
#include <cstring>

#include "driver.h"

namespace {

const Driver* driver = nullptr;

// CUmemcpyAttributes
struct Attributes {
  unsigned source_access_order;
  unsigned source_hint[2];
  unsigned destination_hint[2];
  unsigned flags;
};

constexpr unsigned kStreamOrder = 1;

int copy_batch(void** targets, void** sources, size_t* sizes, size_t count, Attributes* attributes,
               size_t* first, size_t attribute_count, size_t* failed, void* stream) {
  constexpr Attributes kPlain = {kStreamOrder, {0, 0}, {0, 0}, 0};
  if (failed) *failed = SIZE_MAX;
  if (attribute_count != 1 || first[0] != 0 || attributes->source_access_order == 0)
    return kInvalidValue;
  if (std::memcmp(attributes, &kPlain, sizeof kPlain) != 0) return kNotSupported;
  const Copies copies{targets, sources, sizes, count, stream, true, failed};
  return driver->copy(&copies);
}

// As of CUDA 13, without the place for what failed.
int copy_batch_13(void** targets, void** sources, size_t* sizes, size_t count,
                  Attributes* attributes, size_t* first, size_t attribute_count, void* stream) {
  return copy_batch(targets, sources, sizes, count, attributes, first, attribute_count, nullptr,
                    stream);
}

int copy_one(void* target, void* source, size_t size, void* stream) {
  const Copies copies{&target, &source, &size, 1, stream, false, nullptr};
  return driver->copy(&copies);
}

}  // namespace

extern "C" {

void simulator_attach(const Driver* found) { driver = found; }

int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t, void*) {
  *function = nullptr;
  const int known = driver->version();
  if (std::strcmp(name, "cuMemcpyBatchAsync") != 0 || known < 12080 || version < 12080 ||
      version > known)
    return kNotFound;
  *function = version >= 13000 ? reinterpret_cast<void*>(copy_batch_13)
                               : reinterpret_cast<void*>(copy_batch);
  return 0;
}

int cuMemcpyDtoHAsync_v2(void* target, void* source, size_t size, void* stream) {
  return copy_one(target, source, size, stream);
}
int cuMemcpyHtoDAsync_v2(void* target, void* source, size_t size, void* stream) {
  return copy_one(target, source, size, stream);
}

int cuMemHostRegister_v2(void* address, size_t size, unsigned) {
  return driver->host_register(address, size);
}
int cuMemHostUnregister(void* address) { return driver->host_unregister(address); }

int cuThreadExchangeStreamCaptureMode(int* mode) { return driver->exchange_capture_mode(mode); }

int cuCtxGetCurrent(void** context) { return driver->context(context); }
int cuCtxSetCurrent(void* context) { return driver->set_context(context); }
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  return driver->primary_context(context, device);
}

}  // extern "C"
