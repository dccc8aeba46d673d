# SPDX-License-Identifier: Apache-2.0
"""AWS's own places for credentials, region and endpoint. Nothing of what is found is ever shown.

obstore itself takes credentials from the environment, web identity tokens, containers and the
machine's role. What it lacks are the files that `aws configure` writes; they are read here.
"""

import configparser
import datetime
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypedDict

_FRESH: Final = datetime.timedelta(minutes=5)
"""Files are read again after this long: somebody may have put new credentials there."""


class Credentials(TypedDict):
    """What obstore wants of a provider."""

    access_key_id: str
    secret_access_key: str
    token: str | None
    expires_at: datetime.datetime | None


def credential_provider(environment: Mapping[str, str]) -> Callable[[], Credentials] | None:
    """Return what reads the credentials file; None where obstore's own chain is to be used.

    As with AWS's tools the environment comes first, then a web identity, then the file, then a
    container's and the machine's role.
    """
    first = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")
    if any(environment.get(name) for name in first) or not _from_file(environment):
        return None

    def read() -> Credentials:
        found = _from_file(environment)
        if found is None:
            raise ValueError(f"{_credentials_file(environment)} has no credentials any more")
        return found

    return read


def region(environment: Mapping[str, str]) -> str | None:
    """Return the region that is set, by the environment or in the configuration file."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        if environment.get(name):
            return environment[name]
    profile = _profile(environment)
    section = profile if profile == "default" else f"profile {profile}"
    file = environment.get("AWS_CONFIG_FILE") or _home(environment) / "config"
    return _section(Path(file), section).get("region")


def endpoint(environment: Mapping[str, str]) -> str | None:
    """Return the endpoint that the environment sets for S3."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    return next((environment[name] for name in names if environment.get(name)), None)


def places(environment: Mapping[str, str]) -> str:
    """Return, for messages, where credentials are looked for."""
    file, profile = _credentials_file(environment), _profile(environment)
    return f"the environment, {file} (profile {profile}), a container's and this machine's role"


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


def _credentials_file(environment: Mapping[str, str]) -> Path:
    named = environment.get("AWS_SHARED_CREDENTIALS_FILE")
    return Path(named) if named else _home(environment) / "credentials"


def _home(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("HOME", "/root")) / ".aws"


def _profile(environment: Mapping[str, str]) -> str:
    return environment.get("AWS_PROFILE") or "default"
