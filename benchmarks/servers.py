# SPDX-License-Identifier: Apache-2.0
"""A bucket to measure with."""

import contextlib
import os
from collections.abc import Iterator
from unittest.mock import patch

from tests import servers


@contextlib.contextmanager
def s3_bucket() -> Iterator[servers.Bucket]:
    """Have a new bucket, of the server that TEST_S3_URL names or of moto, and its credentials."""
    with contextlib.ExitStack() as stack:
        url = os.environ.get("TEST_S3_URL") or stack.enter_context(servers.moto())
        bucket = servers.Bucket(url)
        stack.enter_context(credentials(bucket))
        yield bucket


def credentials(bucket: servers.Bucket) -> contextlib.AbstractContextManager[object]:
    """Have a bucket's credentials in our environment, from which processes take them."""
    return patch.dict(os.environ, bucket.environment)
