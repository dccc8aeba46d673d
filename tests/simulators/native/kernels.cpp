// SPDX-License-Identifier: Apache-2.0
// What a device type must do itself: memory, views, copies, pinning. The rest is fallback.cpp.
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_pin_memory_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_pinned_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstdlib>
#include <optional>

#include "api.h"
#include "tensors.h"

namespace simulator {

Remote::Remote(const at::Tensor& tensor)
    : block(block_of(tensor.storage().data_ptr())),
      sizes(tensor.sizes().vec()),
      strides(tensor.strides().vec()),
      offset(tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize())),
      dtype(tensor.scalar_type()) {}

at::Tensor Remote::open() const {
  char* const data = block ? block->real + offset : nullptr;
  return at::for_blob(data, sizes).strides(strides).options(at::dtype(dtype)).make_tensor();
}

std::string describe(const at::Tensor& tensor, bool with_offset) {
  if (!tensor.defined()) return "none";
  if (!on_device(tensor) && tensor.dim() == 0) return "number";
  std::string words = c10::toString(tensor.scalar_type());
  const auto list = [&words](const char* open, at::IntArrayRef values, const char* close) {
    words += open;
    for (size_t i = 0; i < values.size(); i++) words += (i ? "," : "") + std::to_string(values[i]);
    words += close;
  };
  list("[", tensor.sizes(), "]");
  if (!tensor.is_contiguous()) list("(", tensor.strides(), ")");
  if (with_offset && tensor.storage_offset()) words += "+" + std::to_string(tensor.storage_offset());
  return words;
}

namespace {

c10::DispatchKeySet key_of(c10::Device device) {
  return c10::DispatchKeySet(device.is_hpu()    ? c10::DispatchKey::HPU
                             : device.is_xpu() ? c10::DispatchKey::XPU
                                               : c10::DispatchKey::CUDA);
}

// The device that a factory is to use, made current while this lives: memory belongs to its
// current stream.
class OnDevice {
 public:
  explicit OnDevice(c10::Device device)
      : world_(world_of(device.type())), before_(world_.device()) {
    world_.require_open();
    if (device.has_index()) world_.switch_device(device.index());
  }
  ~OnDevice() { world_.switch_device(before_); }

 private:
  World& world_;
  const int before_;
};

template <c10::DeviceType kType>
at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<c10::Device> device,
                 std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "only host memory can be pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "only strided tensors are simulated");
  const c10::Device where = device.value_or(c10::Device(kType));
  const OnDevice guard(where);
  return at::Tensor(at::detail::empty_generic(sizes, allocator_of(kType), key_of(where),
                                              dtype.value_or(at::kFloat), format));
}

template <c10::DeviceType kType>
at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                         std::optional<c10::Device> device, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "only host memory can be pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "only strided tensors are simulated");
  return new_tensor(sizes, strides, dtype.value_or(at::kFloat),
                    device.value_or(c10::Device(kType)));
}

// --- copies ---------------------------------------------------------------------------------

// Fill host memory that a copy is going to write with what nobody should read.
void poison(const at::Tensor& host) {
  const auto width = host.itemsize();
  TORCH_CHECK(width <= 8, "elements of ", width, " bytes are not simulated");
  const auto type = width == 1 ? at::kByte : width == 2 ? at::kShort : width == 4 ? at::kInt
                                                                                  : at::kLong;
  const uint64_t pattern = 0x0101010101010101u * kPoison;
  const int64_t value = width == 1   ? static_cast<int64_t>(kPoison)
                        : width == 2 ? static_cast<int16_t>(pattern)
                        : width == 4 ? static_cast<int32_t>(pattern)
                                     : static_cast<int64_t>(pattern);
  host.detach().view(type).fill_(value);
}

bool pinned(const at::Tensor& host) {
  return is_pinned(host.storage().data(), host.storage().nbytes());
}

void copy_on_device(World& world, Place place, const at::Tensor& target,
                    const at::Tensor& source) {
  TORCH_CHECK(target.device() == source.device(), "a copy from ", source.device(), " to ",
              target.device(), ": copies between devices go by the host here");
  at::assert_no_partial_overlap(target, source);
  note_shape(world, "copy_on_device " + describe(target, world.settings().lazy) + " " +
                        describe(source, world.settings().lazy));
  world.submit(place, [to = Remote(target), from = Remote(source)] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    to.open().copy_(from.open());
  });
}

// The host's bytes are read when the copy runs, so the host must not change them before.
void copy_from_host(World& world, Place place, const at::Tensor& target, const at::Tensor& host,
                    bool late) {
  note_shape(world, "copy_from_host " + describe(target, world.settings().lazy));
  // In lazy mode a blocking copy takes the bytes at once, and starts nothing: it must not hide
  // that a mark_step is missing.
  const bool snapshot = !late && world.settings().lazy;
  world.submit(place, [to = Remote(target), from = snapshot ? host.clone() : host] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    to.open().copy_(from);
  });
  if (late) return;
  require_no_capture(world, "copy from the host");
  note_synchronization(world, "copy from the host");
  if (!snapshot) world.synchronize(world.tail(place));
}

// The host finds poison until the copy has run.
void copy_to_host(World& world, Place place, const at::Tensor& host, const at::Tensor& source,
                  bool late) {
  note_shape(world, "copy_to_host " + describe(source, world.settings().lazy));
  if (late) poison(host);
  world.submit(place, [to = host, from = Remote(source)] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    to.copy_(from.open());
  });
  if (late) return;
  flush(world);
  require_no_capture(world, "copy to the host");
  note_synchronization(world, "copy to the host");
  world.synchronize(world.tail(place));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  TORCH_CHECK(at::is_expandable_to(source.sizes(), self.sizes()), "a tensor of ", source.sizes(),
              " does not fit one of ", self.sizes());
  const at::Tensor& remote = on_device(self) ? self : source;
  TORCH_CHECK(on_device(self) ? on_device(source) || source.is_cpu() : self.is_cpu(),
              "a copy from ", source.device(), " to ", self.device());
  World& world = world_of(remote.device().type());
  world.require_open();
  if (self.numel() == 0 || self.is_same(source)) return self;
  check_pending_error(world);
  may_fail(world, Call::kCopy);
  const int device = remote.device().index();
  world.touch(device);
  const Place place{device, world.stream(device)};
  if (on_device(self) && on_device(source)) {
    copy_on_device(world, place, self, source);
    return self;
  }
  const at::Tensor& host = on_device(self) ? source : self;
  const bool late = non_blocking && !(world.settings().unpinned_waits && !pinned(host));
  (on_device(self) ? copy_from_host : copy_to_host)(world, place, self, source, late);
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  at::Tensor to = target;
  return copy_(to, self, non_blocking);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  if (const BlockPtr block = block_of(self.storage().data_ptr()))
    block->used_on({stream.device_index(), stream.id()});
}

// --- host memory ----------------------------------------------------------------------------

bool is_pinned_tensor(const at::Tensor& self, std::optional<c10::Device> device) {
  return pinned(self) || at::native::is_pinned(self, device);
}

at::Tensor pin_memory(const at::Tensor& self, std::optional<c10::Device> device) {
  World* pinning = nullptr;
  for (const c10::DeviceType type : {c10::kXPU, c10::kCUDA})
    if (world_of(type).is_open() && (!device || device->type() == type)) pinning = &world_of(type);
  TORCH_CHECK(pinning || !world_of(c10::kHPU).is_open(), "host memory cannot be pinned for HPU");
  if (!pinning) return at::native::_pin_memory(self, device);
  require_no_capture(*pinning, "pin_memory");
  may_fail(*pinning, Call::kAllocate);
  const size_t size = at::detail::computeStorageNbytes(self.sizes(), self.strides(),
                                                       self.itemsize());
  void* const data = std::malloc(size ? size : 1);
  pin(data, size ? size : 1);
  const auto free = [](void* address) {
    unpin(address);
    std::free(address);
  };
  at::Tensor copy = at::for_blob(data, self.sizes())
                        .strides(self.strides())
                        .deleter(free)
                        .options(at::dtype(self.scalar_type()))
                        .make_tensor();
  return copy.copy_(self);
}

// Torch's own would ask for pinned memory of the process's one accelerator.
at::Tensor to_copy(const at::Tensor& self, std::optional<at::ScalarType> dtype,
                   std::optional<at::Layout> layout, std::optional<c10::Device> device,
                   std::optional<bool> pinned, bool non_blocking,
                   std::optional<at::MemoryFormat> format) {
  if (!device || !device->is_cpu())
    return at::native::_to_copy(self, dtype, layout, device, pinned, non_blocking, format);
  at::Tensor host = at::empty_like(self, at::dtype(dtype.value_or(self.scalar_type())).device(at::kCPU),
                                   format.value_or(at::MemoryFormat::Preserve));
  if (non_blocking && (self.is_xpu() || self.is_cuda()))
    host = pin_memory(host, self.device().type());
  return copy_(host, self, non_blocking);
}

template <c10::DeviceType kType>
void implement(torch::Library& library) {
  library.impl("empty.memory_format", TORCH_FN(empty<kType>));
  library.impl("empty_strided", TORCH_FN(empty_strided<kType>));
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("resize_", TORCH_FN(resize_));
  library.impl("copy_", TORCH_FN(copy_));
  library.impl("_to_copy", TORCH_FN(to_copy));
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("record_stream", TORCH_FN(record_stream));
}

}  // namespace

at::Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                      c10::Device device) {
  const OnDevice guard(device);
  return at::Tensor(at::detail::empty_strided_generic(
      sizes, strides, allocator_of(device.type()), key_of(device), dtype));
}

// Only what results that were given as empty tensors need: old contents are not kept.
const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes,
                          std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!format || *format == at::MemoryFormat::Contiguous, "a format other than contiguous");
  const size_t size = at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(),
                                                                 self.storage_offset());
  if (size > self.storage().nbytes()) {
    TORCH_CHECK(self.storage().nbytes() == 0, "only empty tensors can be made larger here");
    const OnDevice guard(self.device());
    c10::StorageImpl* const storage = self.storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(allocator_of(self.device().type())->allocate(size));
    storage->set_nbytes(size);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

TORCH_LIBRARY_IMPL(aten, HPU, library) { implement<c10::DeviceType::HPU>(library); }
TORCH_LIBRARY_IMPL(aten, XPU, library) { implement<c10::DeviceType::XPU>(library); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) { implement<c10::DeviceType::CUDA>(library); }
TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("is_pinned", TORCH_FN(is_pinned_tensor));
  library.impl("_pin_memory", TORCH_FN(pin_memory));
}
TORCH_LIBRARY_IMPL(_, HPU, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(_, XPU, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace simulator
