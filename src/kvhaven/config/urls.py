# SPDX-License-Identifier: Apache-2.0
"""URLs in settings: parsing, and masking of the secrets in them."""

import os
import re
from urllib.parse import SplitResult, urlsplit

from kvhaven.config.sources import MASK

_CREDENTIALS = re.compile(r"(?<=://)\S*(?=@)")
_SECRETS = re.compile(
    r"(?<=[?&])([\w-]*(?:password|secret|token|key)[\w-]*=)[^&\s]*", re.IGNORECASE
)


DIRECTORIES = ("fs", "file")
"""URL schemes of directories."""


def parse_urls(value: object) -> str:
    """Return URLs separated by single spaces; paths become `file` URLs.

    Raises `ValueError` with the reason if a URL is malformed.
    """
    if not isinstance(value, str):
        raise ValueError("not a string")
    return " ".join(_parse_url(url) for url in value.split())


def split_url(url: str) -> SplitResult:
    """Return the parts of a URL. Raises `ValueError` with the reason if its host is malformed."""
    parts = urlsplit(url)
    try:
        _ = parts.port
    except ValueError as error:
        raise ValueError("the port is not a number from 0 to 65535") from error
    return parts


def redacted(text: str) -> str:
    """Return a string with the credentials of its URLs masked."""
    return _SECRETS.sub(rf"\g<1>{MASK}", _CREDENTIALS.sub(MASK, text))


def has_directory(urls: str) -> bool:
    """Whether any of these URLs is a directory."""
    return any(urlsplit(url).scheme.lower() in DIRECTORIES for url in urls.split())


def _parse_url(url: str) -> str:
    if not url.isprintable():
        raise ValueError("a URL must not contain unprintable characters")
    if url.startswith(("/", "~")):
        return f"file://{os.path.abspath(os.path.expanduser(url))}"  # noqa: PTH100, PTH111  it is sent as JSON
    parts = urlsplit(url)
    if not parts.scheme or "://" not in url:
        raise ValueError(f"{redacted(url)} is neither a URL nor an absolute path")
    if parts.scheme in DIRECTORIES and (parts.netloc or not parts.path.strip("/")):
        raise ValueError(f"{url} has no absolute path; write {parts.scheme}:///path")
    return url
