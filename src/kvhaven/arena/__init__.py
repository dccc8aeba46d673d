# SPDX-License-Identifier: Apache-2.0
"""The arena: shared memory for resident shards, its allocation, and the locks on it."""
