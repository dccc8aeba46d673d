# SPDX-License-Identifier: Apache-2.0
"""Redis tier (`kvhaven[redis]`)."""
