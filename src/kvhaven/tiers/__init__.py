# SPDX-License-Identifier: Apache-2.0
"""Places below the arena that keep shards; `base` is the contract."""
