// SPDX-License-Identifier: Apache-2.0
// What the parts of the extension offer each other, and what it notes for the tests.
#pragma once

#include <string>

#include "scheduler.h"

namespace simulator {

// What may be done with an operator on a device.
enum class Allowed { kNo = 0, kLater = 1, kWaits = 2 };
Allowed allowed(const World& world, const std::string& op);

// A thread is about to wait for the device: say so to the test, with what it does.
void note_synchronization(const World& world, const char* what);

// What a test can let fail.
enum class Call { kEvent, kRecord, kWait, kCopy, kKernel, kAllocate, kSynchronize, kFlush, kCalls };

// Throws if the test wants this call of the runtime to fail.
void may_fail(const World& world, Call call);
bool fails(const World& world, Call call);  // the same for callers that return errors

// A call that waits for the device, or may, is about to be made, or host memory to be pinned: throws
// while this or another thread captures a graph, unless this thread's mode allows it. That capture
// is void then.
void require_no_capture(World& world, const char* what);

// A kernel is about to be launched: throws what an earlier call in this thread left behind.
void check_pending_error(World& world);

// Work of this shape was issued. Throws if that is a new one above the test's limit.
void note_shape(const World& world, const std::string& shape);

// Start what is recorded (lazy mode), which is a graph of its own.
void flush(World& world);

void register_guards();

}  // namespace simulator
