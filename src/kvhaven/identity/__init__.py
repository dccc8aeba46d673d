# SPDX-License-Identifier: Apache-2.0
"""Content-based identities of the files and values that determine KV."""
