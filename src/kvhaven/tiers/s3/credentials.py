# SPDX-License-Identifier: Apache-2.0
"""Lookup of credentials, region and endpoint in AWS's standard places; credentials stay secret.

obstore itself reads credentials from the environment, web identity tokens, containers and the
machine's role, but not from the files that `aws configure` writes. This module reads those. A
profile with more than keys (SSO, a role to assume, a `credential_process`) is left to boto3, which
is optional: with botocore it takes 34 MB, obstore 15.
"""

import configparser
import datetime
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypedDict

from kvhaven.errors import ConfigError

_FRESH: Final = datetime.timedelta(minutes=5)
"""Interval after which files are read again, since credentials may be rotated."""

_DYNAMIC: Final = ("sso_session", "sso_start_url", "role_arn", "credential_process")
"""Keys of a profile for which boto3 is needed."""


class Credentials(TypedDict):
    """Return type that obstore requires of a credential provider."""

    access_key_id: str
    secret_access_key: str
    token: str | None
    expires_at: datetime.datetime | None


def credential_provider(environment: Mapping[str, str]) -> Callable[[], Credentials] | None:
    """Return a function that reads the credentials file; None to use obstore's own chain.

    As in AWS's tools, the environment takes precedence, then a web identity, then the profile, then
    a container's and the machine's role. The function raises `ValueError` if the file no longer
    has credentials, and what boto3 raises. Raises `ConfigError` if the profile needs boto3 and it
    is not installed.
    """
    first = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")
    if any(environment.get(name) for name in first):
        return None
    if needed := _boto3_keys(environment):
        return _by_boto3(_profile(environment), needed)
    if not _from_file(environment):
        return None

    def read() -> Credentials:
        found = _from_file(environment)
        if found is None:
            raise ValueError(f"{_credentials_file(environment)} no longer contains credentials")
        return found

    return read


def region(environment: Mapping[str, str]) -> str | None:
    """Return the region set in the environment or the configuration file; None if unset."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        if environment.get(name):
            return environment[name]
    return _configured(environment).get("region")


def endpoint(environment: Mapping[str, str]) -> str | None:
    """Return the S3 endpoint set in the environment; None if unset."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    return next((environment[name] for name in names if environment.get(name)), None)


def places(environment: Mapping[str, str]) -> str:
    """Return, for messages, the places where credentials are looked up."""
    file, profile = _credentials_file(environment), _profile(environment)
    return f"the environment, {file} (profile {profile}), a container's and this machine's role"


def _boto3_keys(environment: Mapping[str, str]) -> list[str]:
    """Return the keys of the profile that ask for more than reading a file."""
    profile = _profile(environment)
    found = {**_configured(environment), **_section(_credentials_file(environment), profile)}
    return [key for key in _DYNAMIC if key in found]


def _by_boto3(profile: str, needed: list[str]) -> Callable[[], Credentials]:
    try:
        boto3 = importlib.import_module("boto3")
        auth = importlib.import_module("obstore.auth.boto3")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"AWS profile {profile} has {', '.join(needed)}, which needs the package boto3: "
            "pip install boto3, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from error

    made: list[Callable[[], Credentials]] = []

    def read() -> Credentials:
        if not made:  # here, since making it may ask the network for credentials
            made.append(
                auth.Boto3CredentialProvider(boto3.Session(profile_name=profile), ttl=_FRESH)
            )
        return made[0]()

    return read


def _from_file(environment: Mapping[str, str]) -> Credentials | None:
    section = _section(_credentials_file(environment), _profile(environment))
    key, secret = section.get("aws_access_key_id"), section.get("aws_secret_access_key")
    if not key or not secret:
        return None
    return Credentials(
        access_key_id=key,
        secret_access_key=secret,
        token=section.get("aws_session_token"),
        expires_at=datetime.datetime.now(datetime.UTC) + _FRESH,
    )


def _section(file: Path, name: str) -> Mapping[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read(file, encoding="utf-8")
    except (OSError, configparser.Error, UnicodeDecodeError):  # its text may hold secrets
        return {}
    return parser[name] if parser.has_section(name) else {}


def _configured(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the profile's section of the configuration file."""
    profile = _profile(environment)
    section = profile if profile == "default" else f"profile {profile}"
    file = environment.get("AWS_CONFIG_FILE") or _home(environment) / "config"
    return _section(Path(file), section)


def _credentials_file(environment: Mapping[str, str]) -> Path:
    named = environment.get("AWS_SHARED_CREDENTIALS_FILE")
    return Path(named) if named else _home(environment) / "credentials"


def _home(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("HOME", "/root")) / ".aws"


def _profile(environment: Mapping[str, str]) -> str:
    return environment.get("AWS_PROFILE") or "default"
