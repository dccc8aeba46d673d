// SPDX-License-Identifier: Apache-2.0
// How torch asks for devices, streams and events of the simulated kinds.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "api.h"
#include "memory.h"

namespace simulator {

namespace {

template <c10::DeviceType kType>
struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  static World& world() { return world_of(kType); }
  static Place place(const c10::Stream& stream) {
    return {stream.device_index(), stream.id()};
  }
  static c10::Device device(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }
  static int index_of(c10::Device device) {
    return device.has_index() ? device.index() : world().device();
  }
  static c10::Stream stream(int index, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, device(index), id);
  }
  // An event is the mark it was last recorded at; null: all that was before it had run already.
  struct Event {
    std::mutex mutex;
    MarkPtr mark;
  };
  static MarkPtr mark(void* event) {
    if (!event) return nullptr;
    auto* const held = static_cast<Event*>(event);
    const std::lock_guard lock(held->mutex);
    return held->mark;
  }

  c10::DeviceType type() const override { return kType; }

  c10::Device exchangeDevice(c10::Device to) const override {
    const c10::Device before = getDevice();
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override { return device(world().device()); }
  void setDevice(c10::Device to) const override {
    if (to.has_index()) world().switch_device(to.index());
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (to.has_index() && to.index() < deviceCount()) world().switch_device(to.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return world().is_open() ? static_cast<c10::DeviceIndex>(world().settings().devices) : 0;
  }

  c10::Stream getStream(c10::Device of) const override {
    return stream(index_of(of), world().stream(index_of(of)));
  }
  c10::Stream getDefaultStream(c10::Device of) const override { return stream(index_of(of), 0); }
  c10::Stream getNewStream(c10::Device of, int) const override {
    return stream(index_of(of), world().new_stream(index_of(of)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override {
    return getNewStream(of, 0);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    const c10::Stream before = getStream(to.device());
    world().set_stream(place(to));
    return before;
  }
  bool queryStream(const c10::Stream& of) const override {
    require_no_capture(world(), "stream.query");
    return world().query(world().tail(place(of)));
  }
  void synchronizeStream(const c10::Stream& of) const override {
    require_no_capture(world(), "stream.synchronize");
    may_fail(world(), Call::kSynchronize);
    world().touch(of.device_index());
    note_synchronization(world(), "stream.synchronize");
    world().synchronize(world().tail(place(of)));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    require_no_capture(world(), "synchronize");
    may_fail(world(), Call::kSynchronize);
    world().touch(index);
    note_synchronization(world(), "synchronize");
    world().synchronize_device(index);
  }

  void record(void** event, const c10::Stream& at, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    may_fail(world(), Call::kRecord);
    world().touch(at.device_index());
    if (!*event) *event = new Event;
    auto* const held = static_cast<Event*>(*event);
    const std::lock_guard lock(held->mutex);
    held->mark = world().tail(place(at));
  }
  void block(void* event, const c10::Stream& at) const override {
    may_fail(world(), Call::kWait);
    world().touch(at.device_index());
    world().wait(place(at), mark(event));
  }
  // Unlike other calls with an event, those that wait for it go to this thread's device.
  bool queryEvent(void* event) const override {
    require_no_capture(world(), "event.query");
    world().touch(world().device());
    return world().query(mark(event));
  }
  void synchronizeEvent(void* event) const override {
    require_no_capture(world(), "event.synchronize");
    may_fail(world(), Call::kSynchronize);
    world().touch(world().device());
    note_synchronization(world(), "event.synchronize");
    world().synchronize(mark(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& at) const override {
    if (const BlockPtr block = block_of(pointer)) block->used_on(place(at));
  }
};

}  // namespace

void register_guards() {
  c10::impl::registerDeviceGuard(kTypes[0], new GuardImpl<kTypes[0]>);
  c10::impl::registerDeviceGuard(kTypes[1], new GuardImpl<kTypes[1]>);
  c10::impl::registerDeviceGuard(kTypes[2], new GuardImpl<kTypes[2]>);
  for (const c10::DeviceType type : kTypes) c10::SetAllocator(type, allocator_of(type));
}

}  // namespace simulator
