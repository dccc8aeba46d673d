# SPDX-License-Identifier: Apache-2.0
"""The operators that the simulated devices have. Any other is an error that names it.

Memory, views, copies and `record_stream` are the extension's own; whatever torch composes of
these and of the ones below (`zeros`, `narrow`, `contiguous`, `cat`'s views, ...) works too.
"""

LATER = (
    # writing
    "fill_", "zero_", "index_copy", "index_copy_", "index_fill_", "_index_put_impl_", "scatter",
    "scatter_", "masked_fill_", "clamp_", "where",
    # reading
    "index", "index_select", "gather", "cat", "stack", "arange", "clone", "flip", "roll",
    "embedding",
    # arithmetic
    "add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_", "remainder", "remainder_",
    "neg", "abs", "ceil", "floor", "clamp", "bitwise_and", "bitwise_or", "bitwise_xor",
    "bitwise_not", "exp", "sqrt", "rsqrt", "silu", "pow", "maximum", "minimum", "mm", "bmm",
    "addmm", "_softmax", "cumsum",
    # comparing and reducing
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "isnan", "all",
    "any", "sum", "mean", "amax", "amin", "argmax", "max", "min",
)  # fmt: skip
"""They run when their stream comes to them."""

WAITING = ("_local_scalar_dense", "equal", "nonzero", "masked_select")
"""Their results depend on values, so the host waits for them."""
