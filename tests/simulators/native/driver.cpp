// SPDX-License-Identifier: Apache-2.0
#include "driver.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "api.h"
#include "memory.h"

namespace simulator {

namespace {

constexpr size_t kMostCopies = 4096;             // larger batches crash some drivers
constexpr size_t kMostRegistered = size_t{1} << 39;  // in one call, as NVIDIA's r580
constexpr int kParts = 3;                        // of a batch, at most: what others see of it

DriverSettings settings;
std::mutex mutex;  // guards what follows
std::map<void*, size_t> registered;  // sizes by addresses

size_t registered_bytes() {
  size_t bytes = 0;
  for (const auto& [address, size] : registered) bytes += size;
  return bytes;
}

World& world() { return world_of(c10::DeviceType::CUDA); }

// A copy that was checked: between a piece of device memory and a piece of the host's.
struct Piece {
  BlockPtr block;
  size_t offset;
  char* host;
  size_t size;
  bool to_host;

  char* device() const { return block->real + offset; }
  char* target() const { return to_host ? host : block->fake + offset; }
};

// A stream's handle says which device it is of; 0 is the legacy default stream.
bool place_of(void* handle, Place& place) {
  const auto value = reinterpret_cast<uintptr_t>(handle);
  place = value ? Place{static_cast<int>(value >> 32) - 1, static_cast<int64_t>(value & 0xffffffff)}
                : Place{world().device(), 0};
  return place.device == world().device();
}

// Find out what a copy is about; an error if it cannot be.
int check(void* target, void* source, size_t size, Piece& piece) {
  piece.block = block_at(source);
  const auto within = [&](const void* address) {
    return piece.block && static_cast<const char*>(address) + size <=
                              piece.block->fake + piece.block->size;
  };
  piece.to_host = within(source);
  if (!piece.to_host) {
    piece.block = block_at(target);
    if (!within(target)) return kInvalidValue;
  }
  const char* const device = static_cast<const char*>(piece.to_host ? source : target);
  piece.host = static_cast<char*>(piece.to_host ? target : source);
  piece.offset = device - piece.block->fake;
  piece.size = size;
  if (block_at(piece.host) && within(piece.host)) return kInvalidValue;
  // Not on this thread's device, or across the border of a registration.
  if (piece.block->owner.device != world().device()) return kInvalidValue;
  if (!is_pinned(piece.host, size) && overlaps_pinned(piece.host, size)) return kInvalidValue;
  return size ? 0 : kInvalidValue;
}

// In a batch any order may happen, so what one copy writes no other may touch.
bool overlap(const std::vector<Piece>& pieces) {
  std::vector<std::pair<const char*, size_t>> targets;
  for (const Piece& piece : pieces) targets.emplace_back(piece.target(), piece.size);
  std::sort(targets.begin(), targets.end());
  for (size_t i = 1; i < targets.size(); i++)
    if (targets[i - 1].first + targets[i - 1].second > targets[i].first) return true;
  return false;
}

void submit(Place place, std::vector<Piece> pieces) {
  for (const Piece& piece : pieces)
    if (piece.to_host) std::memset(piece.host, kPoison, piece.size);
  size_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.size;
  const auto run = [pieces = std::move(pieces)] {
    for (const Piece& piece : pieces)
      if (piece.to_host)
        std::memcpy(piece.host, piece.device(), piece.size);
      else
        std::memcpy(piece.device(), piece.host, piece.size);
  };
  world().submit(place, run, {}, bytes);
}

// Pageable memory: the host waits for the stream, then for a copy to it; a copy from it is taken
// at once and arrives when it likes.
void copy_pageable(Place place, const Piece& piece) {
  note_synchronization(world(), piece.to_host ? "copy to the host" : "copy from the host");
  world().synchronize(world().tail(place));
  if (piece.to_host) {
    submit(place, {piece});
    world().synchronize(world().tail(place));
    return;
  }
  world().submit(place, [piece, bytes = std::string(piece.host, piece.size)] {
    std::memcpy(piece.device(), bytes.data(), bytes.size());
  });
}

int copy_all(const Copies* copies) {
  if (settings.contexts && !world().has_context()) return kInvalidContext;
  world().touch(world().device());
  Place place;
  if (!place_of(copies->stream, place)) return kInvalidHandle;
  if (copies->batch && !copies->stream) return kInvalidValue;  // vllm#46379
  if (copies->count > kMostCopies) return kUnknown;
  std::vector<Piece> pieces(copies->count);
  for (size_t i = 0; i < copies->count; i++) {
    int error = check(copies->targets[i], copies->sources[i], copies->sizes[i], pieces[i]);
    if (copies->batch && !error && !is_pinned(pieces[i].host, pieces[i].size))
      error = kInvalidValue;  // none of ours is to block
    if (!error) continue;
    if (copies->failed) *copies->failed = i;
    return error;
  }
  if (overlap(pieces)) return kInvalidValue;
  const bool failing = fails(world(), Call::kCopy);
  if (!copies->batch) {
    if (failing) return kUnknown;
    if (is_pinned(pieces[0].host, pieces[0].size)) {
      submit(place, std::move(pieces));
      return 0;
    }
    try {
      require_no_capture(world(), "a copy of pageable memory");
    } catch (const std::exception&) {
      return kCaptureUnsupported;
    }
    copy_pageable(place, pieces[0]);
    return 0;
  }
  // In any order, and not all at the same moment. One that fails has begun.
  const std::vector<size_t> order = world().shuffled(pieces.size());
  const size_t count = failing ? pieces.size() / 2 : pieces.size();
  const size_t step = std::max<size_t>(1, (pieces.size() + kParts - 1) / kParts);
  for (size_t start = 0; start < count; start += step) {
    std::vector<Piece> part;
    for (size_t i = start; i < std::min(start + step, count); i++)
      part.push_back(pieces[order[i]]);
    submit(place, std::move(part));
  }
  return failing ? kUnknown : 0;
}

int copy(const Copies* copies) {
  if (!world().is_open()) return kNotInitialized;
  try {
    return copy_all(copies);
  } catch (const std::exception&) {  // a stream that there is not
    return kInvalidHandle;
  }
}

int host_register(void* address, size_t size) {
  if (!world().is_open()) return kNotInitialized;
  if (settings.contexts && !world().has_context()) return kInvalidContext;
  world().touch(world().device());
  try {
    require_no_capture(world(), "host_register");
  } catch (const std::exception&) {
    return kCaptureUnsupported;
  }
  if (!address || !size) return kInvalidValue;
  if (overlaps_pinned(address, size)) return kAlreadyRegistered;
  const std::lock_guard lock(mutex);
  if (size >= kMostRegistered || registered_bytes() + size > settings.registered_bytes)
    return kOutOfMemory;
  pin(address, size);
  registered[address] = size;
  return 0;
}

int host_unregister(void* address) {
  if (!world().is_open()) return kNotInitialized;
  if (settings.contexts && !world().has_context()) return kInvalidContext;
  try {
    require_no_capture(world(), "host_unregister");
  } catch (const std::exception&) {
    return kCaptureUnsupported;
  }
  const std::lock_guard lock(mutex);
  if (!registered.erase(address)) return kNotRegistered;
  unpin(address);
  return 0;
}

int exchange_capture_mode(int* mode) {
  std::swap(*mode, world().capture_mode());
  return 0;
}

// A context is its device's number and one.
void* context_of(int device) { return reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1); }

int context(void** context) {
  *context = world().has_context() ? context_of(world().device()) : nullptr;
  return 0;
}

int primary_context(void** context, int device) {
  if (device < 0 || device >= world().settings().devices) return kInvalidValue;
  *context = context_of(device);
  return 0;
}

int set_context(void* context) {
  const int device = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
  world().give_context(device);
  return 0;
}

int version() { return settings.version; }
void leave_error(int error) { world().pending_error() = error; }
int take_error() { return std::exchange(world().pending_error(), 0); }

}  // namespace

void open_driver(const DriverSettings& wanted) {
  settings = wanted;
  const std::lock_guard lock(mutex);
  for (const auto& [address, size] : std::exchange(registered, {})) unpin(address);  // earlier ones
}

const Driver& driver() {
  static const Driver all = {version,         copy,    host_register,   host_unregister,
                             exchange_capture_mode, context, primary_context, set_context,
                             leave_error,     take_error};
  return all;
}

int runtime_host_register(void* address, size_t size) {
  world().touch(world().device());
  const int error = host_register(address, size);
  if (error) leave_error(error);
  return error;
}

}  // namespace simulator
