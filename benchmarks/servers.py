# SPDX-License-Identifier: Apache-2.0
"""S3 bucket for benchmarks."""

import contextlib
import os
from collections.abc import Iterator
from unittest.mock import patch

from tests import servers


@contextlib.contextmanager
def s3_bucket() -> Iterator[servers.Bucket]:
    """Yield a new bucket of the server at TEST_S3_URL, or of moto, with credentials set."""
    with contextlib.ExitStack() as stack:
        url = os.environ.get("TEST_S3_URL") or stack.enter_context(servers.moto())
        bucket = servers.Bucket(url)
        stack.enter_context(credentials(bucket))
        yield bucket


def credentials(bucket: servers.Bucket) -> contextlib.AbstractContextManager[object]:
    """Set a bucket's credentials in the environment, which child processes inherit."""
    return patch.dict(os.environ, bucket.environment)
