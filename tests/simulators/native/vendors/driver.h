// SPDX-License-Identifier: Apache-2.0
// What the simulated drivers' libraries get from the extension. They only add a vendor's names.
#pragma once

#include <cstddef>

// Errors have the same numbers in CUDA and HIP.
enum DriverError {
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotFound = 500,
  kAlreadyRegistered = 712,
  kNotRegistered = 713,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kUnknown = 999,
};

struct Copies {
  void* const* targets;
  void* const* sources;
  const size_t* sizes;
  size_t count;
  void* stream;
  bool batch;
  size_t* failed;  // of a batch: which of them was wrong; may be null
};

struct Driver {
  int (*version)();  // 12040, 12080, 13000; HIP's 70000
  int (*copy)(const Copies* copies);
  int (*host_register)(void* address, size_t size);
  int (*host_unregister)(void* address);
  int (*exchange_capture_mode)(int* mode);
  int (*context)(void** context);
  int (*primary_context)(void** context, int device);
  int (*set_context)(void* context);
  void (*leave_error)(int error);  // HIP: for the next kernel to find
  int (*take_error)();
};
