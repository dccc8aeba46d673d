# SPDX-License-Identifier: Apache-2.0
"""Namespaces and tenants, as the catalog knows them: whose chunk an entry is."""

from collections.abc import Iterator
from weakref import WeakValueDictionary

from kvhaven.catalog.entries import NamespaceState, Tenant
from kvhaven.errors import KVHavenError
from kvhaven.tenants import Quotas
from kvhaven.tiers.base import Namespace
from kvhaven.types import NO_TENANT, NamespaceDigest, TenantId


class Owners:
    """Every namespace, and each tenant's part of one.

    A part is one object, so that "is it the same namespace and the same tenant" is one comparison
    wherever a chunk is found. Namespaces stay; a tenant, and its parts, are remembered as long as
    anything of it is here, or is asked for: there may be as many tenants as there are users.
    """

    def __init__(self, memory: Quotas, disk: Quotas) -> None:
        self.memory = memory
        self.disk = disk
        self._namespaces: dict[NamespaceDigest, NamespaceState] = {}
        self._nobody = Tenant(NO_TENANT, None, None)
        self._tenants: WeakValueDictionary[TenantId, Tenant] = WeakValueDictionary()
        self._parts: WeakValueDictionary[tuple[NamespaceDigest, TenantId], NamespaceState] = (
            WeakValueDictionary()
        )

    def add(self, namespace: Namespace) -> None:
        """Make a namespace known; see `Catalog.add_namespace`."""
        if not namespace.table.extent_bytes:
            raise KVHavenError(f"namespace {namespace.digest.hex()} has no shards, or empty ones")
        known = self._namespaces.get(namespace.digest)
        if known is None:
            self._namespaces[namespace.digest] = NamespaceState(namespace, self._nobody)
        elif known.namespace.table != namespace.table:
            raise KVHavenError(
                f"namespace {namespace.digest.hex()} is known with {known.namespace.table}, "
                f"but now comes with {namespace.table}; the digest must name the geometry too"
            )

    def part(self, digest: NamespaceDigest, tenant: TenantId = NO_TENANT) -> NamespaceState:
        """Return a tenant's part of a namespace. Raises KVHavenError for an unknown namespace."""
        whole = self._namespaces.get(digest)
        if whole is None:
            raise KVHavenError(f"namespace {digest.hex()} is unknown; add_namespace comes first")
        if tenant == NO_TENANT:
            return whole
        part = self._parts.get((digest, tenant))
        if part is None:
            part = NamespaceState(whole.namespace, self.tenant(tenant))
            self._parts[digest, tenant] = part
        return part

    def tenant(self, tenant: TenantId) -> Tenant:
        """Return a tenant, known or not."""
        known = self._tenants.get(tenant)
        if known is None:
            known = Tenant(tenant, self.memory.of(tenant), self.disk.of(tenant))
            self._tenants[tenant] = known
        return known

    def limit_memory(self, tenant: TenantId, quota: int | None) -> Tenant:
        """Note a tenant's quota of the arena, and return the tenant."""
        self.memory = self.memory.changed(tenant, quota)
        known = self.tenant(tenant)
        known.memory_quota = quota
        return known

    def limit_disk(self, tenant: TenantId, quota: int | None) -> Tenant:
        """Note a tenant's quota of each tier of our own, and return the tenant."""
        self.disk = self.disk.changed(tenant, quota)
        known = self.tenant(tenant)
        known.disk_quota = quota
        return known

    def tenants(self) -> Iterator[Tenant]:
        """Yield the tenants of whom anything is here."""
        yield from self._tenants.values()

    def namespaces(self) -> Iterator[NamespaceState]:
        """Yield every namespace's part that belongs to no tenant."""
        yield from self._namespaces.values()

    def parts(
        self, digest: NamespaceDigest | None = None, tenant: TenantId | None = None
    ) -> Iterator[NamespaceState]:
        """Yield the parts of a namespace (None: of all) and of a tenant (None: of all, and nobody).

        Raises KVHavenError for an unknown namespace.
        """
        if digest is not None:
            self.part(digest)
        for part in (*self._namespaces.values(), *self._parts.values()):
            if digest in {None, part.namespace.digest} and tenant in {None, part.tenant.id}:
                yield part
