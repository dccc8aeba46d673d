// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>

#include "api.h"

namespace simulator {

World& world_of(c10::DeviceType type) {
  // Never destroyed: tensors may outlive everything.
  static World* const worlds[kKinds] = {new World("hpu"), new World("xpu"), new World("cuda")};
  for (int kind = 0; kind < kKinds; kind++)
    if (type == kTypes[kind]) return *worlds[kind];
  TORCH_CHECK(false, "no simulated device: ", type);
}

namespace {

// Addresses without memory. 16 TiB are enough for any test, so none is used twice.
char* new_address(size_t size) {
  constexpr size_t kReserved = size_t{1} << 44;
  constexpr size_t kAlignment = 512;
  static char* const start = [] {
    void* found = mmap(nullptr, kReserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                       -1, 0);
    TORCH_CHECK(found != MAP_FAILED, "no address space for simulated device memory");
    return static_cast<char*>(found);
  }();
  static std::atomic<size_t> used = 0;
  const size_t rounded = (size / kAlignment + 2) * kAlignment;  // and a gap
  const size_t at = used.fetch_add(rounded);
  TORCH_CHECK(at + rounded <= kReserved, "simulated device addresses are used up");
  return start + at;
}

}  // namespace

Block::Block(World& world, Place owner, size_t size)
    : world(world), owner(owner), size(size), session(world.session()) {
  fake = new_address(size);
  real = static_cast<char*>(std::malloc(size));
  if (!real) throw std::bad_alloc();
  std::memset(real, kPoison, size);
}

Block::~Block() { std::free(real); }

void Block::used_on(Place place) {
  const std::lock_guard lock(mutex_);
  users_.push_back(place);
}

std::vector<Place> Block::users() {
  const std::lock_guard lock(mutex_);
  return users_;
}

namespace {

// The blocks that torch holds, by their addresses.
struct Held {
  std::mutex mutex;
  std::map<const char*, std::weak_ptr<Block>> blocks;
};

Held& held() {
  static Held* const all = new Held;
  return *all;
}

}  // namespace

BlockPtr block_at(const void* address) {
  const std::lock_guard lock(held().mutex);
  auto found = held().blocks.upper_bound(static_cast<const char*>(address));
  if (found == held().blocks.begin()) return nullptr;
  return (--found)->second.lock();
}

BlockPtr block_of(const c10::DataPtr& pointer) {
  return pointer.get_context() ? *static_cast<BlockPtr*>(pointer.get_context()) : nullptr;
}

namespace {

// Torch gives a block up. Called from anywhere, with and without Python's lock.
void free_block(void* context) {
  const std::unique_ptr<BlockPtr> held(static_cast<BlockPtr*>(context));
  const BlockPtr& block = *held;
  {
    const std::lock_guard lock(simulator::held().mutex);
    simulator::held().blocks.erase(block->fake);
  }
  World& world = block->world;
  if (!world.is_open() || world.session() != block->session) return;
  world.release(block->owner.device, block->size);
  try {
    world.submit(block->owner, [block] { std::memset(block->real, kPoison, block->size); },
                 block->users());
  } catch (const std::exception&) {  // closed meanwhile: nothing can use it any more
  }
}

class DeviceAllocator final : public c10::Allocator {
 public:
  explicit DeviceAllocator(c10::DeviceType type) : type_(type) {}

  c10::DeviceType type() const { return type_; }

  c10::DataPtr allocate(size_t size) override {
    World& world = world_of(type_);
    world.require_open();
    may_fail(world, Call::kAllocate);
    const Place owner = world.current();
    world.give_context(owner.device);
    const c10::Device device(type_, static_cast<c10::DeviceIndex>(owner.device));
    if (size == 0) return {nullptr, device};
    TORCH_CHECK_WITH(OutOfMemoryError, world.allocate(owner.device, size), "simulated ",
                     world.name(), " out of memory: ", size, " bytes asked for, ",
                     world.allocated(owner.device), " of ", world.settings().memory, " in use");
    auto block = std::make_unique<BlockPtr>(std::make_shared<Block>(world, owner, size));
    char* const fake = (*block)->fake;
    {
      const std::lock_guard lock(held().mutex);
      held().blocks[fake] = *block;
    }
    return {fake, block.release(), &free_block, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "simulated device memory is copied by work on a stream only");
  }

 private:
  const c10::DeviceType type_;
};

struct Pins {
  std::mutex mutex;
  std::map<const char*, size_t> sizes;  // by address
};

Pins& pins() {
  static Pins* const all = new Pins;
  return *all;
}

}  // namespace

c10::Allocator* allocator_of(c10::DeviceType type) {
  static DeviceAllocator* const all[kKinds] = {
      new DeviceAllocator(kTypes[0]), new DeviceAllocator(kTypes[1]), new DeviceAllocator(kTypes[2])};
  world_of(type);  // it must be one of them
  return *std::find_if(all, all + kKinds, [&](auto* one) { return one->type() == type; });
}

void pin(const void* address, size_t size) {
  const std::lock_guard lock(pins().mutex);
  pins().sizes[static_cast<const char*>(address)] = size;
}

void unpin(const void* address) {
  const std::lock_guard lock(pins().mutex);
  pins().sizes.erase(static_cast<const char*>(address));
}

bool overlaps_pinned(const void* address, size_t size) {
  const std::lock_guard lock(pins().mutex);
  const char* const start = static_cast<const char*>(address);
  auto next = pins().sizes.lower_bound(start);
  if (next != pins().sizes.end() && next->first < start + size) return true;
  if (next == pins().sizes.begin()) return false;
  --next;
  return next->first + next->second > start;
}

bool is_pinned(const void* address, size_t size) {
  const std::lock_guard lock(pins().mutex);
  const char* const start = static_cast<const char*>(address);
  auto found = pins().sizes.upper_bound(start);
  if (found == pins().sizes.begin()) return false;
  --found;
  return start + size <= found->first + found->second;
}

}  // namespace simulator
