# SPDX-License-Identifier: Apache-2.0
"""Explanations of S3's errors, with remedies and without secrets."""

import re
from typing import Final

from kvhaven.tiers.shared.retries import PassingError
from kvhaven.tiers.shared.store import StoreFailedError

_CREDENTIALS: Final = "the credentials are not accepted: check {places}"
_REGION: Final = "the bucket is in another region: set AWS_REGION to that region (now {region})"
_RIGHTS: Final = (
    "these credentials lack a permission: they need s3:GetObject, s3:PutObject, s3:DeleteObject "
    "and s3:ListBucket (without s3:ListBucket, S3 returns this error for every absent shard)"
)

_ADVICE: Final = {
    "NoSuchBucket": "the bucket does not exist: create it, or correct the URL",
    "InvalidBucketName": "the bucket name is invalid: correct the URL",
    "AccessDenied": _RIGHTS,
    "AllAccessDisabled": _RIGHTS,
    "AccountProblem": _RIGHTS,
    "InvalidAccessKeyId": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    "InvalidToken": _CREDENTIALS,
    "ExpiredToken": "the session token has expired: renew the credentials in {places}",
    "TokenRefreshRequired": "the session token has expired: renew the credentials in {places}",
    "RequestTimeTooSkewed": "this machine's clock differs from the server's: synchronize it (NTP)",
    "AuthorizationHeaderMalformed": _REGION,
    "PermanentRedirect": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "QuotaExceeded": "the bucket's or the user's quota is used up: raise it, or expire objects",
    "EntityTooLarge": "the store does not accept objects of this size: use a smaller chunk_size",
}
_BY_STATUS: Final = {301: _REGION, 307: _REGION, 401: _CREDENTIALS, 403: _RIGHTS}
_PASSING: Final = {"SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout"}
_TOO_MANY: Final = 429
_SERVER_ERROR: Final = 500


def error_code(error: Exception) -> str:
    """Return S3's code of an error, for example `NoSuchKey`; empty if it has none."""
    found = re.search(r"<Code>(\w+)</Code>|\(code: (\w+)\)", str(error))
    return (found[1] or found[2]) if found else ""


def error_status(error: Exception) -> int:
    """Return the HTTP status of an error; 0 if there was no response."""
    found = re.search(r"status code: (\d{3})", str(error))
    return int(found[1]) if found else 0


def explain(error: Exception, what: str, *, places: str, region: str | None) -> StoreFailedError:
    """Return the error to raise for an error of obstore; `what` names bucket and endpoint."""
    code, status = error_code(error), error_status(error)
    advice = _ADVICE.get(code) or ("" if code else _BY_STATUS.get(status, ""))
    if advice:
        said = advice.format(places=places, region=region or "none")
        return StoreFailedError(f"{what}: {code or status}: {said}")
    text = _plain(str(error))
    if any(word in text for word in ("redential", "/latest/api/token", "/latest/meta-data")):
        return StoreFailedError(f"{what}: no credentials were found in {places}")
    if "redirect" in text:
        return StoreFailedError(f"{what}: {_REGION.format(region=region)}")
    if not status:
        return PassingError(f"{what} cannot be reached: {text}")
    if code in _PASSING or status == _TOO_MANY or status >= _SERVER_ERROR:
        return PassingError(f"{what}: {code} status {status}")
    return StoreFailedError(f"{what}: {code} status {status}: {text}")


def _plain(text: str) -> str:
    """Return the first line of a message, without possible secrets."""
    line = text.partition("\n")[0]
    line = re.sub(r"<[^>]*>.*", "", line)  # a server's document may repeat the request
    return re.sub(r"//[^/@\s]*@", "//", line).strip()[:300]
