# SPDX-License-Identifier: Apache-2.0
"""Format of a stored shard: header, manifest of a namespace, compression."""
