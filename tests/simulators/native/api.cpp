// SPDX-License-Identifier: Apache-2.0
// What Python calls, by ctypes (which gives up Python's global lock for the time), and the notes.
#include "api.h"

#include <functional>
#include <map>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>

#include "driver.h"
#include "memory.h"

namespace simulator {

namespace {

using OnSynchronization = void (*)(int kind, const char* what);
using OnShape = void (*)(const char* shape, int64_t count);

// What is noted of one kind of device.
struct Notes {
  std::map<std::string, Allowed> allowed;  // set before the world is opened, then only read

  std::mutex mutex;  // guards all below
  std::map<std::string, int64_t> shapes;
  std::map<size_t, int64_t> graphs;  // of lazy mode: a hash of all that was recorded between flushes
  size_t graph = 0;
  std::set<std::string> new_shapes;  // since a limit was set
  int64_t limit = -1;                // of their number; -1: none
  Call failing = Call::kCalls;       // what is to fail; kCalls: nothing
  int64_t calls_before = 0;          // that do not fail yet
  int64_t failures = 0;              // how many then fail
  int64_t failed = 0;                // and have
  bool capturing = false;            // a thread captures a graph
  bool capture_valid = true;
  std::thread::id capturer;
};

std::atomic<OnSynchronization> on_synchronization = nullptr;

World& world_number(int kind) { return world_of(kTypes[kind]); }

int number_of(const World& world) {
  int kind = 0;
  while (&world != &world_number(kind)) kind++;
  return kind;
}

Notes& notes_of(const World& world) {
  static Notes* const all = new Notes[kKinds];
  return all[number_of(world)];
}

// For Python: null if all went well, or what went wrong.
const char* message(const std::function<void()>& call) {
  thread_local std::string text;
  try {
    call();
    return nullptr;
  } catch (const std::exception& error) {
    text = error.what();
    return text.c_str();
  }
}

}  // namespace

Allowed allowed(const World& world, const std::string& op) {
  const auto& all = notes_of(world).allowed;
  const auto found = all.find(op);
  return found == all.end() ? Allowed::kNo : found->second;
}

void note_synchronization(const World& world, const char* what) {
  if (const OnSynchronization call = on_synchronization) call(number_of(world), what);
}

bool fails(const World& world, Call call) {
  Notes& notes = notes_of(world);
  const std::lock_guard lock(notes.mutex);
  if (notes.failing != call || notes.calls_before-- > 0 || notes.failed == notes.failures)
    return false;
  notes.failed++;
  return true;
}

void may_fail(const World& world, Call call) {
  static const char* const names[] = {"event",    "record",   "wait",        "copy",
                                      "kernel",   "allocate", "synchronize", "flush"};
  if (fails(world, call))
    throw std::runtime_error(std::string("the test lets this fail: ") +
                             names[static_cast<int>(call)]);
}

void require_no_capture(World& world, const char* what) {
  constexpr int kGlobal = 0, kRelaxed = 2;
  Notes& notes = notes_of(world);
  const std::lock_guard lock(notes.mutex);
  if (!notes.capturing || world.capture_mode() == kRelaxed) return;
  if (notes.capturer != std::this_thread::get_id() && world.capture_mode() != kGlobal) return;
  notes.capture_valid = false;
  throw std::runtime_error(std::string(what) + ": operation not permitted when stream is capturing");
}

void check_pending_error(World& world) {
  const int error = std::exchange(world.pending_error(), 0);
  if (error)
    throw std::runtime_error("an earlier call left error " + std::to_string(error) + " behind");
}

void note_shape(const World& world, const std::string& shape) {
  Notes& notes = notes_of(world);
  const std::lock_guard lock(notes.mutex);
  if (world.settings().lazy)
    notes.graph = notes.graph * 1099511628211u + std::hash<std::string>()(shape) + 1;
  const bool is_new = notes.shapes[shape]++ == 0;
  if (!is_new || notes.limit < 0) return;
  notes.new_shapes.insert(shape);
  if (static_cast<int64_t>(notes.new_shapes.size()) > notes.limit)
    throw std::runtime_error("graph shape " + std::to_string(notes.new_shapes.size()) + " of " +
                             std::to_string(notes.limit) + " allowed: " + shape);
}

void flush(World& world) {
  {
    Notes& notes = notes_of(world);
    const std::lock_guard lock(notes.mutex);
    if (notes.graph) notes.graphs[notes.graph]++;
    notes.graph = 0;
  }
  world.mark_step();
}

}  // namespace simulator

using namespace simulator;

extern "C" {

void simulator_register() {
  static const bool once = (register_guards(), true);
  static_cast<void>(once);
}

void simulator_on_synchronization(OnSynchronization call) { on_synchronization = call; }

void simulator_allow(int kind, const char* op, int how) {
  notes_of(world_number(kind)).allowed[op] = static_cast<Allowed>(how);
}

const char* simulator_open(int kind, uint64_t seed, int devices, int lazy, int unpinned_waits,
                           uint64_t memory) {
  return message([&] {
    Settings settings;
    settings.seed = seed;
    settings.devices = devices;
    settings.lazy = lazy;
    settings.unpinned_waits = unpinned_waits;
    settings.memory = memory;
    world_number(kind).open(settings);
  });
}

void simulator_close(int kind) { world_number(kind).close(); }
void simulator_reseed(int kind, uint64_t seed) { world_number(kind).reseed(seed); }
int simulator_tick(int kind) { return world_number(kind).tick(); }
void simulator_background(int kind, int on) { world_number(kind).background(on); }
uint64_t simulator_pending(int kind) { return world_number(kind).pending(); }
uint64_t simulator_recorded(int kind) { return world_number(kind).recorded(); }

double simulator_clock(int kind, double kernel, double byte) {
  return world_number(kind).clock({kernel, byte});
}

const char* simulator_drain(int kind) {
  return message([&] {
    flush(world_number(kind));
    world_number(kind).drain();
  });
}

const char* simulator_mark_step(int kind) {
  return message([&] {
    may_fail(world_number(kind), Call::kFlush);
    flush(world_number(kind));
  });
}

// --- failures -----------------------------------------------------------------------------------

// Let so many calls of a kind fail, from the nth on.
void simulator_fail(int kind, int call, int64_t nth, int64_t failures) {
  Notes& notes = notes_of(world_number(kind));
  const std::lock_guard lock(notes.mutex);
  notes.failing = static_cast<Call>(call);
  notes.calls_before = nth - 1;
  notes.failures = failures;
  notes.failed = 0;
}

int64_t simulator_failed(int kind) {
  Notes& notes = notes_of(world_number(kind));
  const std::lock_guard lock(notes.mutex);
  return notes.failed;
}

const char* simulator_new_event(int kind) {
  return message([&] { may_fail(world_number(kind), Call::kEvent); });
}

// --- captures -----------------------------------------------------------------------------------

void simulator_begin_capture(int kind) {
  Notes& notes = notes_of(world_number(kind));
  const std::lock_guard lock(notes.mutex);
  notes.capturing = notes.capture_valid = true;
  notes.capturer = std::this_thread::get_id();
}

int simulator_end_capture(int kind) {
  Notes& notes = notes_of(world_number(kind));
  const std::lock_guard lock(notes.mutex);
  notes.capturing = false;
  return notes.capture_valid;
}

// --- the driver of CUDA and HIP ---------------------------------------------------------------

void simulator_open_driver(int version, int contexts, uint64_t registered_bytes) {
  open_driver({version, contexts != 0, registered_bytes});
}

const void* simulator_driver() { return &driver(); }

int simulator_runtime_host_register(uint64_t address, uint64_t size) {
  return runtime_host_register(reinterpret_cast<void*>(address), size);
}

uint32_t simulator_contexts(int kind) { return world_number(kind).contexts(); }

// --- this thread's device and stream ----------------------------------------------------------

int simulator_device(int kind) { return world_number(kind).device(); }

const char* simulator_set_device(int kind, int device) {
  return message([&] { world_number(kind).set_device(device); });
}

int64_t simulator_stream(int kind, int device) { return world_number(kind).stream(device); }

const char* simulator_set_stream(int kind, int device, int64_t stream) {
  return message([&] { world_number(kind).set_stream({device, stream}); });
}

const char* simulator_synchronize(int kind, int device) {
  return message([&] {
    World& world = world_number(kind);
    require_no_capture(world, "synchronize");
    may_fail(world, Call::kSynchronize);
    world.touch(device);
    note_synchronization(world, "synchronize");
    world.synchronize_device(device);
  });
}

uint64_t simulator_allocated(int kind, int device) { return world_number(kind).allocated(device); }
uint64_t simulator_peak(int kind, int device) { return world_number(kind).peak(device); }

void simulator_pin(uint64_t address, uint64_t size) {
  pin(reinterpret_cast<const void*>(address), size);
}
void simulator_unpin(uint64_t address) { unpin(reinterpret_cast<const void*>(address)); }

// --- graph shapes -----------------------------------------------------------------------------

void simulator_shapes(int kind, OnShape call) {
  Notes& notes = notes_of(world_number(kind));
  std::map<std::string, int64_t> shapes;
  {
    const std::lock_guard lock(notes.mutex);
    shapes = notes.shapes;
  }
  for (const auto& [shape, count] : shapes) call(shape.c_str(), count);
}

uint64_t simulator_graphs(int kind) {
  Notes& notes = notes_of(world_number(kind));
  const std::lock_guard lock(notes.mutex);
  return notes.graphs.size();
}

void simulator_forget_shapes(int kind) {
  Notes& notes = notes_of(world_number(kind));
  const std::lock_guard lock(notes.mutex);
  notes.shapes.clear();
  notes.graphs.clear();
  notes.graph = 0;
  notes.new_shapes.clear();
}

void simulator_limit_shapes(int kind, int64_t limit) {
  Notes& notes = notes_of(world_number(kind));
  const std::lock_guard lock(notes.mutex);
  notes.new_shapes.clear();
  notes.limit = limit;
}

}  // extern "C"
