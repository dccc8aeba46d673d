# SPDX-License-Identifier: Apache-2.0
"""The arena: shared memory that holds resident shards, and who may use which piece of it."""
