# SPDX-License-Identifier: Apache-2.0
"""URLs in settings: how they are written, and shown without what is secret in them."""

import os
import re
from urllib.parse import urlsplit

from kvhaven.config.sources import MASK

_CREDENTIALS = re.compile(r"(?<=://)\S*(?=@)")
_SECRETS = re.compile(
    r"(?<=[?&])([\w-]*(?:password|secret|token|key)[\w-]*=)[^&\s]*", re.IGNORECASE
)


DIRECTORIES = ("fs", "file")
"""Schemes of URLs that are directories."""


def parse_urls(value: object) -> str:
    """Return URLs separated by single spaces; a path is a `file` URL.

    Raises `ValueError` with the reason.
    """
    if not isinstance(value, str):
        raise ValueError("not a text")
    return " ".join(_parse_url(url) for url in value.split())


def redacted(text: str) -> str:
    """Return a text with the credentials of URLs in it masked."""
    return _SECRETS.sub(rf"\g<1>{MASK}", _CREDENTIALS.sub(MASK, text))


def has_directory(urls: str) -> bool:
    """Whether one of these URLs is a directory."""
    return any(urlsplit(url).scheme.lower() in DIRECTORIES for url in urls.split())


def _parse_url(url: str) -> str:
    if not url.isprintable():
        raise ValueError("a URL has no such characters")
    if url.startswith(("/", "~")):
        return f"file://{os.path.abspath(os.path.expanduser(url))}"  # noqa: PTH100, PTH111  a string that travels as JSON
    parts = urlsplit(url)
    if not parts.scheme or "://" not in url:
        raise ValueError(f"{redacted(url)} is no URL, nor an absolute path")
    if parts.scheme in DIRECTORIES and (parts.netloc or not parts.path.strip("/")):
        raise ValueError(f"{url} names no absolute path: write {parts.scheme}:///path")
    return url
