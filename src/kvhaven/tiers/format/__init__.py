# SPDX-License-Identifier: Apache-2.0
"""Storage format of shards: header, manifest of a namespace, compression."""
