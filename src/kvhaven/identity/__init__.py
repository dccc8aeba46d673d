# SPDX-License-Identifier: Apache-2.0
"""Names, by their content, for the files and values that determine KV."""
