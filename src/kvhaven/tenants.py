# SPDX-License-Identifier: Apache-2.0
"""Text forms of tenants and their quotas. No text or error made here contains a salt."""

import re
from collections.abc import Iterable, Mapping

import msgspec

from kvhaven.config.sizes import format_size, parse_size
from kvhaven.keys import tenant_id
from kvhaven.types import NO_TENANT, TENANT_BYTES, TenantId

OTHERS = "*"
"""Stands for every tenant with a salt that has no quota under its own name."""

_NAMED = re.compile(rf"tenant:([0-9a-f]{{{2 * TENANT_BYTES}}})", re.IGNORECASE)
_MOST_BYTES = 1 << 50


class Quotas(msgspec.Struct, frozen=True):
    """Limits in bytes by tenant; None is unlimited.

    `named` takes precedence over `others`, which applies to tenants that are not named. Requests
    without a salt belong to no tenant and have no quota.
    """

    named: dict[TenantId, int | None] = {}
    others: int | None = None

    def of(self, tenant: TenantId) -> int | None:
        """Return the quota of a tenant in bytes; None is unlimited."""
        return None if tenant == NO_TENANT else self.named.get(tenant, self.others)

    def __bool__(self) -> bool:
        """Return whether any tenant has a quota."""
        return self.others is not None or any(q is not None for q in self.named.values())

    def __str__(self) -> str:
        """Return the text that `parse_quotas` reads, without salts."""
        pairs = [f"{tenant_name(tenant)}={_size(quota)}" for tenant, quota in self.named.items()]
        return " ".join(pairs + [f"{OTHERS}={_size(self.others)}"] * (self.others is not None))


def tenant_name(tenant: TenantId) -> str:
    """Return the display name of a tenant: `tenant:` and 16 hex digits."""
    return f"tenant:{tenant.hex()}"


def parse_tenant(text: str) -> TenantId:
    """Return the tenant with this name, as `tenant_name` gives it, or with this salt.

    Raises `ValueError` for a malformed name, and for an empty text.
    """
    named = _NAMED.fullmatch(text.strip())
    if named is not None:
        return TenantId(bytes.fromhex(named[1]))
    if text.strip().lower().startswith("tenant:"):
        raise ValueError(
            f"malformed tenant name; expected tenant: and {2 * TENANT_BYTES} hex digits"
        )
    if not text:
        raise ValueError("empty salt; expected the salt or the name of a tenant")
    return tenant_id(text)


def parse_quotas(value: object) -> Quotas:
    """Return the quotas in a mapping `{salt: size}`, or in a text of `SALT=SIZE` pairs.

    Raises `ValueError` with the reason, which refers to pairs by their number, counted from 1.
    """
    named: dict[TenantId, int | None] = {}
    numbers: dict[TenantId, int] = {}
    others: int | None = None
    some_others = False
    for number, (who, size) in enumerate(_pairs(value), 1):
        quota = _parse_quota(size, number)
        if who == OTHERS:
            if some_others:
                raise ValueError(f"pair {number}: second quota for {OTHERS}")
            others, some_others = quota, True
            continue
        try:
            tenant = parse_tenant(who)
        except ValueError as error:
            raise ValueError(f"pair {number}: {error}") from None
        if tenant in named:
            raise ValueError(f"pairs {numbers[tenant]} and {number} name the same tenant")
        named[tenant], numbers[tenant] = quota, number
    return Quotas(named, others)


def quotas_of(setting: str | None) -> Quotas:
    """Return the quotas of a setting; None means no quotas."""
    return Quotas() if setting is None else parse_quotas(setting)


def _pairs(value: object) -> Iterable[tuple[str, object]]:
    if isinstance(value, Mapping):
        return [(str(who), size) for who, size in value.items()]
    if not isinstance(value, str):
        raise ValueError("expected SALT=SIZE pairs or a mapping")
    pairs = []
    for number, text in enumerate(re.split(r"[\s,]+", value.strip(" \t\r\n,")), 1):
        who, separator, size = text.rpartition("=")
        if not separator:
            raise ValueError(f"pair {number}: no = found")
        pairs.append((who, size))
    return pairs


def _parse_quota(size: object, number: int) -> int | None:
    if size is None or (isinstance(size, str) and size.strip().lower() == "none"):
        return None
    try:
        quota = parse_size(size)
    except ValueError:
        raise ValueError(f"pair {number}: no valid size after the =") from None
    if quota > _MOST_BYTES:
        raise ValueError(f"pair {number}: the size is too large")
    return quota


def _size(quota: int | None) -> str:
    return "none" if quota is None else format_size(quota)
