# SPDX-License-Identifier: Apache-2.0
"""KVHaven inside inference engines."""
