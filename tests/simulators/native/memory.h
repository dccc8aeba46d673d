// SPDX-License-Identifier: Apache-2.0
// Simulated device memory, pinned host memory, and the worlds of the two kinds of device.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <memory>
#include <mutex>
#include <vector>

#include "scheduler.h"

namespace simulator {

constexpr unsigned char kPoison = 0xA5;

// The worlds, in the order of the numbers that Python uses for them.
constexpr c10::DeviceType kTypes[] = {c10::DeviceType::HPU, c10::DeviceType::XPU,
                                      c10::DeviceType::CUDA};
constexpr int kKinds = 3;

// The world of a device type; throws for any but these.
World& world_of(c10::DeviceType type);

// A piece of device memory. Torch sees `fake`, an address that nobody can read or write: a host
// that touches device memory directly dies at once, as it should. Work uses `real`.
//
// Work holds the blocks it uses, so that late work never touches memory of somebody else. But
// when torch frees a block, it is poisoned in the order of the stream that was current when it
// was allocated (after what streams named by record_stream had to do until then): just as a
// caching allocator would hand it to that stream's next tensor. Work of other streams that did
// not order itself before that finds poison.
struct Block {
  Block(World& world, Place owner, size_t size);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  World& world;
  const Place owner;
  const size_t size;
  const uint64_t session;
  char* fake = nullptr;
  char* real = nullptr;

  void used_on(Place place);
  std::vector<Place> users();

 private:
  std::mutex mutex_;
  std::vector<Place> users_;
};
using BlockPtr = std::shared_ptr<Block>;

// The block behind a storage's pointer; null if it has no bytes.
BlockPtr block_of(const c10::DataPtr& pointer);

// The block that torch holds around a device address; null if there is none.
BlockPtr block_at(const void* address);

c10::Allocator* allocator_of(c10::DeviceType type);

// Host memory that is pinned (for XPU and CUDA, see World's settings), in pieces.
void pin(const void* address, size_t size);
void unpin(const void* address);
bool is_pinned(const void* address, size_t size);  // by one piece
bool overlaps_pinned(const void* address, size_t size);

}  // namespace simulator
