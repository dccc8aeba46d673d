// SPDX-License-Identifier: Apache-2.0
// Tensors of a simulated device, as calls and as late work see them.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "memory.h"

namespace simulator {

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && std::find(std::begin(kTypes), std::end(kTypes),
                                       tensor.device().type()) != std::end(kTypes);
}

// A tensor in device memory without torch's ownership: work that is late must not keep memory
// from being freed, or a test could not see what freeing it too early does.
struct Remote {
  explicit Remote(const at::Tensor& tensor);
  at::Tensor open() const;  // a CPU tensor over its bytes; for work that runs

  BlockPtr block;
  std::vector<int64_t> sizes, strides;
  int64_t offset;  // in bytes
  at::ScalarType dtype;
};

// Words for a tensor's part in a graph: two calls with the same words need one compilation.
std::string describe(const at::Tensor& tensor, bool with_offset);

at::Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                      c10::Device device);

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes,
                          std::optional<at::MemoryFormat> format);

void fallback(const c10::OperatorHandle& op, std::vector<c10::IValue>* stack);

}  // namespace simulator
