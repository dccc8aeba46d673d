# SPDX-License-Identifier: Apache-2.0
"""Namespaces and tenants of the catalog, to which every chunk belongs."""

from bisect import bisect_right, insort
from collections.abc import Iterator
from weakref import WeakValueDictionary

from kvhaven.catalog.entries import NamespaceState, Tenant
from kvhaven.catalog.holdings import Scope
from kvhaven.errors import KVHavenError
from kvhaven.maps import StripedDict
from kvhaven.tenants import Quotas
from kvhaven.tiers.base import Namespace
from kvhaven.types import NO_TENANT, NamespaceDigest, TenantId


class Limits:
    """Quotas in force: those of the settings, except for tenants whose quota was changed."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._changed = StripedDict[TenantId, int | None]()

    def of(self, tenant: TenantId) -> int | None:
        """Return a tenant's quota in bytes; None is unlimited."""
        if tenant != NO_TENANT and tenant in self._changed:
            return self._changed[tenant]
        return self._quotas.of(tenant)

    def change(self, tenant: TenantId, quota: int | None) -> None:
        """Change the quota of a tenant. Only quotas that differ from the settings are stored."""
        if quota == self._quotas.of(tenant):
            self._changed.pop(tenant, None)
        else:
            self._changed[tenant] = quota


class Owners:
    """All namespaces, and each tenant's part of each.

    A part is one object, so comparing namespace and tenant of a chunk is one identity comparison.
    Namespaces stay. A tenant and its parts exist only while anything refers to them, because there
    may be as many tenants as users.
    """

    def __init__(self, memory: Quotas, disk: Quotas) -> None:
        self.memory = Limits(memory)
        self.disk = Limits(disk)
        self._namespaces: dict[NamespaceDigest, NamespaceState] = {}
        self._digests: list[NamespaceDigest] = []  # in ascending order
        self._nobody = Tenant(NO_TENANT, None, None)
        # Striped by the first byte of the tenant id, which is a digest (see `maps`).
        self._tenants: list[WeakValueDictionary[TenantId, Tenant]] = [
            WeakValueDictionary() for _ in range(256)
        ]
        self._parts: list[WeakValueDictionary[tuple[NamespaceDigest, TenantId], NamespaceState]] = [
            WeakValueDictionary() for _ in range(256)
        ]

    def add(self, namespace: Namespace) -> None:
        """Register a namespace; see `Catalog.add_namespace`."""
        if not namespace.table.extent_bytes:
            raise KVHavenError(f"namespace {namespace.digest.hex()} has no shards, or empty ones")
        known = self._namespaces.get(namespace.digest)
        if known is None:
            self._namespaces[namespace.digest] = NamespaceState(namespace, self._nobody)
            insort(self._digests, namespace.digest)
        elif known.namespace.table != namespace.table:
            raise KVHavenError(
                f"namespace {namespace.digest.hex()} is registered with {known.namespace.table}, "
                f"but was added with {namespace.table}; the digest must name the geometry too"
            )

    def part(self, digest: NamespaceDigest, tenant: TenantId = NO_TENANT) -> NamespaceState:
        """Return a tenant's part of a namespace. Raises `KVHavenError` for an unknown namespace."""
        whole = self._namespaces.get(digest)
        if whole is None:
            raise KVHavenError(f"namespace {digest.hex()} is unknown; call add_namespace first")
        if tenant == NO_TENANT:
            return whole
        part = self.known_part(digest, tenant)
        if part is None:
            part = NamespaceState(whole.namespace, self.tenant(tenant))
            self._parts[tenant[0]][digest, tenant] = part
        return part

    def tenant(self, tenant: TenantId) -> Tenant:
        """Return the record of a tenant; create it if needed."""
        if tenant == NO_TENANT:
            return self._nobody
        stripe = self._tenants[tenant[0]]
        known = stripe.get(tenant)
        if known is None:
            known = stripe[tenant] = Tenant(tenant, self.memory.of(tenant), self.disk.of(tenant))
        return known

    def limit_memory(self, tenant: TenantId, quota: int | None) -> Tenant:
        """Set a tenant's quota of the arena, and return the tenant."""
        self.memory.change(tenant, quota)
        known = self.tenant(tenant)
        known.memory_quota = quota
        return known

    def limit_disk(self, tenant: TenantId, quota: int | None) -> Tenant:
        """Set a tenant's quota of each local tier, and return the tenant."""
        self.disk.change(tenant, quota)
        known = self.tenant(tenant)
        known.disk_quota = quota
        return known

    def set_quotas(self, memory: Quotas | None, disk: Quotas | None) -> None:
        """Replace all quotas of the arena, or of local tiers; None: unchanged.

        Tenants that exist get theirs by `settle_quotas`.
        """
        if memory is not None:
            self.memory = Limits(memory)
        if disk is not None:
            self.disk = Limits(disk)

    def settle_quotas(self, memory: bool, disk: bool) -> Iterator[Tenant]:
        """Set the quotas of existing tenants, and yield those whose quota changed."""
        for stripe in self._tenants:
            for reference in stripe.valuerefs():
                tenant = reference()
                if tenant is None:
                    continue
                before = tenant.memory_quota, tenant.disk_quota
                if memory:
                    tenant.memory_quota = self.memory.of(tenant.id)
                if disk:
                    tenant.disk_quota = self.disk.of(tenant.id)
                if before != (tenant.memory_quota, tenant.disk_quota):
                    yield tenant

    def tenants(self) -> Iterator[Tenant]:
        """Yield the tenants that exist; others may come and go meanwhile."""
        for stripe in self._tenants:
            for reference in stripe.valuerefs():
                tenant = reference()
                if tenant is not None:
                    yield tenant

    def tenants_after(self, last: bytes) -> Iterator[Tenant]:
        """Yield the tenants with an id above `last`, in ascending order; others may come and go."""
        for number in range(last[0] if last else 0, len(self._tenants)):
            stripe = self._tenants[number]
            for tenant in sorted(known for known in tuple(stripe) if known > last):
                found = stripe.get(tenant)
                if found is not None:
                    yield found

    def namespaces_after(self, last: bytes) -> Iterator[NamespaceState]:
        """Yield the namespaces with a digest above `last`, in ascending order."""
        digests = self._digests
        at = bisect_right(digests, last)
        while at < len(digests):
            digest = digests[at]
            yield self._namespaces[digest]
            at = bisect_right(digests, digest)

    def namespaces(self) -> Iterator[NamespaceState]:
        """Yield every namespace's part without a tenant."""
        yield from self._namespaces.values()

    def parts_of(self, scope: Scope) -> list[NamespaceState]:
        """Return a tenant's parts of the namespaces in a scope; empty if it names no tenant.

        Raises `KVHavenError` for an unknown namespace.
        """
        if scope.namespace is not None:
            self.part(scope.namespace)
        if scope.tenant is None:
            return []
        digests = tuple(self._namespaces) if scope.namespace is None else (scope.namespace,)
        known = (self.known_part(digest, scope.tenant) for digest in digests)
        return [part for part in known if part is not None]

    def parts(self) -> Iterator[NamespaceState]:
        """Yield every part of every namespace; others may come and go meanwhile."""
        yield from tuple(self._namespaces.values())
        for stripe in self._parts:
            for reference in stripe.valuerefs():
                part = reference()
                if part is not None:
                    yield part

    def known_part(self, digest: NamespaceDigest, tenant: TenantId) -> NamespaceState | None:
        """Return a tenant's part of a namespace if it exists; do not create it."""
        if tenant == NO_TENANT:
            return self._namespaces.get(digest)
        return self._parts[tenant[0]].get((digest, tenant))
