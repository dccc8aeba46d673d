// SPDX-License-Identifier: Apache-2.0
// Any other operator: its result's shape now, by torch's meta kernels; its work later, by the CPU.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>

#include <functional>
#include <optional>
#include <utility>

#include "api.h"
#include "tensors.h"

namespace simulator {

namespace {

using c10::IValue;
using Values = std::vector<IValue>;
using Change = std::function<at::Tensor(const at::Tensor&)>;

// The same value with other tensors, asked for in order.
IValue with_tensors(const IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const auto& tensor : value.toOptionalTensorVector())
      changed.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
    return changed;
  }
  return value;
}

Values with_tensors(const Values& values, const Change& change) {
  Values changed;
  for (const IValue& value : values) changed.push_back(with_tensors(value, change));
  return changed;
}

// The device that all tensors of a call are on, but for numbers; throws if there are two.
c10::Device device_of(const c10::OperatorHandle& op, const Values& arguments) {
  std::optional<c10::Device> device;
  std::optional<c10::Device> host;
  const auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!on_device(tensor)) {
      if (tensor.dim() > 0 || !tensor.is_cpu()) host = tensor.device();
      return tensor;
    }
    TORCH_CHECK(!device || *device == tensor.device(),
                "Expected all tensors to be on the same device, but ", op.schema().name(),
                " found at least two devices, ", *device, " and ", tensor.device());
    device = tensor.device();
    return tensor;
  };
  with_tensors(arguments, look);
  TORCH_CHECK(!device || !host, "Expected all tensors to be on the same device, but ",
              op.schema().name(), " found at least two devices, ", *device, " and ", *host);
  for (const IValue& value : arguments)
    if (!device && value.isDevice()) device = value.toDevice();
  TORCH_CHECK_NOT_IMPLEMENTED(device, op.schema().name(), " without a tensor is not simulated");
  return *device;
}

// The words for a call: what a compiled graph of it depends on. Numbers are its inputs, as are
// the values of index tensors; sizes, dimensions and switches are part of it.
std::string describe_call(const c10::OperatorHandle& op, const Values& arguments, bool lazy) {
  std::string words = op.schema().name();
  for (size_t i = 0; i < arguments.size(); i++) {
    const IValue& value = arguments[i];
    with_tensors(value, [&](const at::Tensor& tensor) {
      words += " " + describe(tensor, lazy);
      return tensor;
    });
    c10::TypePtr type = op.schema().arguments()[i].type();
    if (const auto inner = type->cast<c10::OptionalType>()) type = inner->getElementType();
    if (type->kind() == c10::TypeKind::NumberType) continue;
    if (value.isInt()) words += " " + std::to_string(value.toInt());
    if (value.isBool()) words += value.toBool() ? " true" : " false";
    if (value.isIntList())
      for (const int64_t one : value.toIntVector()) words += "," + std::to_string(one);
  }
  return words;
}

// Whether the shape of the result depends on values: masks as indices.
bool picks_by_mask(const c10::OperatorHandle& op, const Values& arguments) {
  const std::string& name = op.schema().name();
  if (name != "aten::index" && name != "aten::_index_put_impl_") return false;
  bool found = false;
  with_tensors(arguments[1], [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    found |= tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
    return tensor;
  });
  return found;
}

void run_on(c10::DispatchKey key, const c10::OperatorHandle& op, Values& stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(c10::DispatchKeySet(key), &stack);
}

// The arguments as late work needs them: device memory by what lies there when it runs, numbers
// of the host by their value now.
class LateArguments {
 public:
  explicit LateArguments(const Values& arguments) {
    const at::Tensor placeholder(at::detail::empty_cpu({0}, at::kByte));
    values_ = with_tensors(arguments, [&](const at::Tensor& tensor) {
      if (on_device(tensor)) {
        remotes_.emplace_back(Remote(tensor));
        return placeholder;
      }
      remotes_.emplace_back(std::nullopt);
      if (!tensor.defined()) return tensor;
      at::Tensor number = tensor.clone();
      number.unsafeGetTensorImpl()->set_wrapped_number(
          tensor.unsafeGetTensorImpl()->is_wrapped_number());
      return number;
    });
    for (IValue& value : values_)
      if (value.isDevice()) value = c10::Device(c10::kCPU);
  }

  Values open() const {
    size_t next = 0;
    return with_tensors(values_, [&](const at::Tensor& tensor) {
      const auto& remote = remotes_[next++];
      return remote ? remote->open() : tensor;
    });
  }

 private:
  Values values_;
  std::vector<std::optional<Remote>> remotes_;
};

// The argument that a result is, for results that are written in place; -1: a new tensor.
int argument_of(const c10::FunctionSchema& schema, size_t result) {
  const c10::AliasInfo* const alias = schema.returns()[result].alias_info();
  if (!alias) return -1;
  TORCH_CHECK_NOT_IMPLEMENTED(alias->isWrite(), schema.name(), " makes a view that is not simulated");
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const c10::AliasInfo* const other = schema.arguments()[i].alias_info();
    if (other && *other == *alias) return static_cast<int>(i);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, schema.name(), " writes what is none of its arguments");
}

// Whether every result is an argument that keeps its size.
bool is_in_place(const c10::FunctionSchema& schema) {
  for (size_t i = 0; i < schema.returns().size(); i++) {
    const int argument = argument_of(schema, i);
    if (argument < 0 || schema.arguments()[argument].is_out()) return false;
  }
  return true;
}

// Run the operator on tensors without data: for the shapes of its results, and for its checks.
Values results_without_data(const c10::OperatorHandle& op, const Values& arguments) {
  Values stack = with_tensors(arguments, [](const at::Tensor& tensor) {
    if (!on_device(tensor)) return tensor;
    return at::Tensor(at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(),
                                                     tensor.scalar_type()));
  });
  for (IValue& value : stack)
    if (value.isDevice()) value = c10::Device(c10::kMeta);
  if (op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) {
    run_on(c10::DispatchKey::Meta, op, stack);
    return stack;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(is_in_place(op.schema()), op.schema().name(),
                              " has no meta kernel, so it cannot be simulated");
  Values results;
  for (size_t i = 0; i < op.schema().returns().size(); i++)
    results.push_back(stack[argument_of(op.schema(), i)]);
  return results;
}

// The tensors that the caller gets, by their shapes; `fresh` says which of them are new.
Values results_on(c10::Device device, const c10::OperatorHandle& op, const Values& arguments,
                  const Values& shapes, std::vector<bool>& fresh) {
  Values results;
  for (size_t i = 0; i < shapes.size(); i++) {
    const int argument = argument_of(op.schema(), i);
    fresh.push_back(argument < 0);
    if (argument < 0) {
      TORCH_CHECK_NOT_IMPLEMENTED(shapes[i].isTensor() || shapes[i].isTensorList(),
                                  op.schema().name(), " has a result that is no tensor");
      results.push_back(with_tensors(shapes[i], [&](const at::Tensor& shape) {
        if (!shape.defined()) return shape;
        return new_tensor(shape.sizes(), shape.strides(), shape.scalar_type(), device);
      }));
      continue;
    }
    const IValue& target = arguments[argument];
    if (target.isTensor() && target.toTensor().sizes() != shapes[i].toTensor().sizes()) {
      TORCH_CHECK(target.toTensor().numel() == 0, op.schema().name(), " gives ",
                  shapes[i].toTensor().sizes(), ", the tensor for it has ",
                  target.toTensor().sizes());
      resize_(target.toTensor(), shapes[i].toTensor().sizes(), std::nullopt);
    }
    results.push_back(target);
  }
  return results;
}

// Run the operator now, after all that the stream had to do; for results that depend on values.
void run_at_once(const c10::OperatorHandle& op, c10::Device device, World& world, Place place,
                 const Values& arguments, Values* stack) {
  flush(world);
  require_no_capture(world, op.schema().name().c_str());
  note_synchronization(world, op.schema().name().c_str());
  world.synchronize(world.tail(place));
  Values results = LateArguments(arguments).open();
  run_on(c10::DispatchKey::CPU, op, results);
  for (size_t i = 0; i < results.size(); i++) {
    const int argument = argument_of(op.schema(), i);
    results[i] = argument >= 0 ? arguments[argument]
                               : with_tensors(results[i], [&](const at::Tensor& result) {
                                   const at::Tensor copy = new_tensor(
                                       result.sizes(), result.strides(), result.scalar_type(),
                                       device);
                                   Remote(copy).open().copy_(result);
                                   return copy;
                                 });
  }
  stack->insert(stack->end(), results.begin(), results.end());
}

void run_later(const c10::OperatorHandle& op, c10::Device device, World& world, Place place,
               const Values& arguments, Values* stack) {
  const Values shapes = results_without_data(op, arguments);
  std::vector<bool> fresh;
  const Values results = results_on(device, op, arguments, shapes, fresh);
  std::vector<std::optional<Remote>> targets;  // of each result that is new, in order
  for (size_t i = 0; i < results.size(); i++)
    if (fresh[i])
      with_tensors(results[i], [&](const at::Tensor& result) {
        targets.push_back(result.defined() ? std::optional(Remote(result)) : std::nullopt);
        return result;
      });
  world.submit(place, [op, fresh, targets, late = LateArguments(arguments)] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    Values values = late.open();
    try {
      run_on(c10::DispatchKey::CPU, op, values);
    } catch (const std::exception& error) {
      throw std::runtime_error(op.schema().name() + ": " + error.what());
    }
    size_t next = 0;
    for (size_t i = 0; i < values.size(); i++)
      if (fresh[i])
        with_tensors(values[i], [&](const at::Tensor& value) {
          if (const auto& target = targets[next++]) target->open().copy_(value);
          return value;
        });
  });
  stack->insert(stack->end(), results.begin(), results.end());
}

}  // namespace

void fallback(const c10::OperatorHandle& op, Values* stack) {
  const size_t count = op.schema().arguments().size();
  const Values arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  const c10::Device device = device_of(op, arguments);
  World& world = world_of(device.type());
  world.require_open();
  const std::string& name = op.schema().name();
  const Allowed how = allowed(world, name);
  TORCH_CHECK_NOT_IMPLEMENTED(how != Allowed::kNo, name, " does not exist on the simulated ",
                              world.name(), "; what does is listed in tests/simulators/ops.py");
  check_pending_error(world);
  may_fail(world, Call::kKernel);
  note_shape(world, describe_call(op, arguments, world.settings().lazy));
  stack->erase(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  const int index = device.has_index() ? device.index() : world.device();
  world.touch(index);
  const Place place{index, world.stream(index)};
  const bool waits = how == Allowed::kWaits || picks_by_mask(op, arguments);
  (waits ? run_at_once : run_later)(op, device, world, place, arguments, stack);
}

}  // namespace simulator
