# SPDX-License-Identifier: Apache-2.0
"""Routes of the HTTP API, which `/openapi.json` describes."""

from typing import Final

import msgspec

from kvhaven.gateway import models
from kvhaven.gateway.history import Recent
from kvhaven.gateway.openapi import (
    CHUNK,
    CHUNKS,
    DRY_RUN,
    IF_MATCH,
    JOB,
    PAGE,
    PERSIST,
    REQUESTS,
    SELECTOR,
    TENANT,
    TIER,
    Route,
    sorted_page,
)
from kvhaven.gateway.reuse import Curve
from kvhaven.service.jobs import JobPlan, JobRow
from kvhaven.service.pins import PinPlan, PinRow
from kvhaven.service.runtime_settings import Changes, Config
from kvhaven.service.snapshot import EngineRow, NamespaceRow, TenantRow
from kvhaven.service.steering_messages import (
    ChunkRow,
    Drained,
    Dropped,
    EndedPin,
    Found,
    TenantQuota,
    TierState,
)

EVENTS: Final = "/events"
METRICS: Final = "/metrics"


def _list(name: str, answer: type[msgspec.Struct], row: type[msgspec.Struct]) -> Route:
    """Return the route of a list that can be sorted."""
    summary = f"{name.capitalize()}."
    return Route(f"/v1/{name}", name, summary, answer, (200, 400, 503), sorted_page(row))


ROUTES: Final = (
    Route("/", "page", "The dashboard.", "text/html", (200, 304)),
    Route("/dashboard.css", "page_style", "Its style.", "text/css", (200, 304)),
    Route("/dashboard.js", "page_program", "Its program.", "text/javascript", (200, 304)),
    Route("/health", "health", "Health, with its checks.", models.Health, (200, 503)),
    Route("/livez", "livez", "Whether the service answers.", models.Health, (200, 503)),
    Route("/readyz", "readyz", "Whether engines are served.", models.Health, (200, 503)),
    Route("/stats", "stats", "Statistics since the start.", models.Stats, (200, 503)),
    Route("/config", "config", "All settings.", Config, (200, 304, 503)),
    Route(
        "/config",
        "configure",
        "Change settings while the service runs; all of them, or none.",
        Changes,
        (200, 400, 401, 403, 409, 412, 503),
        (DRY_RUN, PERSIST, IF_MATCH),
        models.Values,
        "post",
    ),
    Route(
        "/inference_info",
        "inference_info",
        "Attached engines.",
        models.InferenceInfo,
        (200, 503),
    ),
    Route(METRICS, "metrics", "Metrics for Prometheus.", "text/plain", (200, 503)),
    Route("/openapi.json", "openapi", "This description.", "application/json", (200,)),
    Route(
        EVENTS,
        "events",
        "A snapshot a second, as server-sent events.",
        "text/event-stream",
        (200, 503),
    ),
    Route("/v1/services", "services", "The services of this node.", models.Services, (200,)),
    Route(
        "/v1/history",
        "history",
        "Counters of the last hour, every 10 s.",
        Recent,
        (200, 503),
    ),
    Route("/v1/curve", "curve", "Hit rate with less or more memory.", Curve, (200, 503)),
    _list("engines", models.Engines, EngineRow),
    _list("namespaces", models.Namespaces, NamespaceRow),
    _list("tenants", models.Tenants, TenantRow),
    Route(
        "/v1/requests",
        "requests",
        "The last 1,024 requests, newest first.",
        models.Requests,
        (200, 400, 503),
        REQUESTS,
    ),
    _list("tiers", models.Tiers, models.TierRow),
    _list("pins", models.Pins, PinRow),
    _list("jobs", models.Jobs, JobRow),
    Route("/v1/plugins", "plugins", "Plugins.", models.Plugins, (200, 400), PAGE),
    Route("/v1/jobs/{id}", "job", "A job.", JobRow, (200, 400, 404, 503), (JOB,)),
    Route("/v1/chunks/{id}", "chunk", "A chunk.", ChunkRow, (200, 404, 503), (CHUNK,)),
    Route(
        "/v1/lookup",
        "lookup",
        "Where the chunks of a prompt are, and why the first missing one is missing.",
        Found,
        (200, 400, 401, 403, 404, 409, 503),
        (CHUNKS,),
        models.Chain,
        "post",
    ),
    Route(
        "/v1/prefetch",
        "prefetch",
        "Promote the chunks of a prompt to memory.",
        JobRow,
        (200, 202, 400, 401, 403, 404, 409, 503),
        (DRY_RUN,),
        models.Chain,
        "post",
        JobPlan,
    ),
    Route(
        "/v1/verify",
        "verify",
        "Verify the checksums of a prompt's chunks in memory; those in tiers are promoted.",
        JobRow,
        (200, 202, 400, 401, 403, 404, 409, 503),
        (DRY_RUN,),
        models.Chain,
        "post",
        JobPlan,
    ),
    Route(
        "/v1/move",
        "move",
        "Write the chunks of a prompt to a tier.",
        JobRow,
        (200, 202, 400, 401, 403, 404, 409, 503),
        (DRY_RUN,),
        models.MovedChain,
        "post",
        JobPlan,
    ),
    Route(
        "/v1/pins",
        "pin",
        "Pin the chunks of a prompt in memory for a time.",
        PinRow,
        (200, 201, 400, 401, 403, 404, 409, 503),
        (DRY_RUN,),
        models.PinnedChain,
        "post",
        PinPlan,
    ),
    Route(
        "/v1/pins/{id}",
        "unpin",
        "End a pin.",
        EndedPin,
        (200, 400, 401, 403, 404, 503),
        (JOB, DRY_RUN),
        method="delete",
    ),
    Route(
        "/v1/tiers/{name}",
        "switch_tier",
        "Switch a tier on, off, or to reads only, until the service ends.",
        TierState,
        (200, 400, 401, 403, 404, 503),
        (TIER, DRY_RUN),
        models.NewState,
        "post",
    ),
    Route(
        "/v1/flush",
        "flush",
        "Wait until all chunks in memory are written to the tiers.",
        JobRow,
        (200, 202, 400, 401, 403, 503),
        (DRY_RUN,),
        models.Waiting,
        "post",
        JobPlan,
    ),
    Route(
        "/v1/drain",
        "drain",
        "Prepare for the end: accept no engine, save nothing more, and flush.",
        Drained,
        (200, 202, 400, 401, 403, 503),
        (DRY_RUN,),
        models.NewDrain,
        "post",
    ),
    Route(
        "/v1/tenants/{id}/quota",
        "set_quota",
        "Set the quotas of a tenant, until the service ends.",
        TenantQuota,
        (200, 400, 401, 403, 503),
        (TENANT, DRY_RUN),
        models.NewQuota,
        "put",
    ),
    Route(
        "/v1/chunks",
        "drop_chunks",
        "Drop chunks from memory and local tiers; with `older_than_s`, as a job.",
        JobRow,
        (200, 202, 400, 401, 403, 503),
        SELECTOR,
        method="delete",
        plan=Dropped,
    ),
)
