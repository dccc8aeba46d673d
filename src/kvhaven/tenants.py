# SPDX-License-Identifier: Apache-2.0
"""How tenants and their quotas are written. Nothing here repeats a salt, not even an error."""

import re
from collections.abc import Iterable, Mapping

import msgspec

from kvhaven.config.sizes import format_size, parse_size
from kvhaven.keys import tenant_id
from kvhaven.types import NO_TENANT, TENANT_BYTES, TenantId

OTHERS = "*"
"""Stands for every tenant with a salt that is not named."""

_NAMED = re.compile(rf"tenant:([0-9a-f]{{{2 * TENANT_BYTES}}})", re.IGNORECASE)
_MOST_BYTES = 1 << 50


class Quotas(msgspec.Struct, frozen=True):
    """How many bytes each tenant may take of something; None is any number.

    `named` goes before `others`, which is for tenants that are not named. Who has no salt is no
    tenant and has no quota.
    """

    named: dict[TenantId, int | None] = {}
    others: int | None = None

    def of(self, tenant: TenantId) -> int | None:
        """Return a tenant's quota in bytes."""
        return None if tenant == NO_TENANT else self.named.get(tenant, self.others)

    def __bool__(self) -> bool:
        """Whether anybody has a quota."""
        return self.others is not None or any(q is not None for q in self.named.values())

    def __str__(self) -> str:
        """Return the text that `parse_quotas` reads, without any salt."""
        pairs = [f"{tenant_name(tenant)}={_size(quota)}" for tenant, quota in self.named.items()]
        return " ".join(pairs + [f"{OTHERS}={_size(self.others)}"] * (self.others is not None))


def tenant_name(tenant: TenantId) -> str:
    """Return what people call a tenant: `tenant:` and 16 hex digits."""
    return f"tenant:{tenant.hex()}"


def parse_tenant(text: str) -> TenantId:
    """Return the tenant that is meant by its name, as `tenant_name` gives it, or by its salt.

    Raises `ValueError` for a name that is none, and for an empty text.
    """
    named = _NAMED.fullmatch(text.strip())
    if named is not None:
        return TenantId(bytes.fromhex(named[1]))
    if text.strip().lower().startswith("tenant:"):
        raise ValueError(f"tenant: is followed by {2 * TENANT_BYTES} hex digits")
    if not text:
        raise ValueError("an empty salt is no tenant's")
    return tenant_id(text)


def parse_quotas(value: object) -> Quotas:
    """Return the quotas of a mapping `{salt: size}`, or of `SALT=SIZE` pairs in a text.

    Raises `ValueError` with the reason, which names pairs by their number.
    """
    named: dict[TenantId, int | None] = {}
    numbers: dict[TenantId, int] = {}
    others: int | None = None
    some_others = False
    for number, (who, size) in enumerate(_pairs(value), 1):
        quota = _parse_quota(size, number)
        if who == OTHERS:
            if some_others:
                raise ValueError(f"pair {number} is a second one for {OTHERS}")
            others, some_others = quota, True
            continue
        try:
            tenant = parse_tenant(who)
        except ValueError as error:
            raise ValueError(f"pair {number}: {error}") from None
        if tenant in named:
            raise ValueError(f"pairs {numbers[tenant]} and {number} are of one tenant")
        named[tenant], numbers[tenant] = quota, number
    return Quotas(named, others)


def quotas_of(setting: str | None) -> Quotas:
    """Return what a setting says."""
    return Quotas() if setting is None else parse_quotas(setting)


def _pairs(value: object) -> Iterable[tuple[str, object]]:
    if isinstance(value, Mapping):
        return [(str(who), size) for who, size in value.items()]
    if not isinstance(value, str):
        raise ValueError("neither pairs nor a mapping")
    pairs = []
    for number, text in enumerate(re.split(r"[\s,]+", value.strip(" \t\r\n,")), 1):
        who, separator, size = text.rpartition("=")
        if not separator:
            raise ValueError(f"pair {number} has no =")
        pairs.append((who, size))
    return pairs


def _parse_quota(size: object, number: int) -> int | None:
    if size is None or (isinstance(size, str) and size.strip().lower() == "none"):
        return None
    try:
        quota = parse_size(size)
    except ValueError:
        raise ValueError(f"pair {number} has no size") from None
    if quota > _MOST_BYTES:
        raise ValueError(f"the size of pair {number} is too large")
    return quota


def _size(quota: int | None) -> str:
    return "none" if quota is None else format_size(quota)
