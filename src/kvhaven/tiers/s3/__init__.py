# SPDX-License-Identifier: Apache-2.0
"""S3 tier (`kvhaven[s3]`)."""
