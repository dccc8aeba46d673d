# SPDX-License-Identifier: Apache-2.0
"""Integration of KVHaven with vLLM; imports of vLLM and torch are deferred until needed."""

from typing import Final

NAME = "KVHavenConnector"
FLAT_NAME = "KVHavenFlatConnector"
"""The connector with which vLLM turns its hybrid KV manager off."""
MODULE = "kvhaven.integrations.vllm.connector"
OLDEST_VLLM: Final = "0.29"
"""Older versions are refused; pyproject.toml and the documentation have the same number."""


def register() -> None:
    """Register the connectors with vLLM by their class names, as the entry point.

    vLLM calls this in every process it starts; repeated calls have no effect. vLLM also uses the
    name to find the statistics class, so it is needed in addition to the module path.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415 - lazy
        KVConnectorFactory,
    )

    for name in (NAME, FLAT_NAME):
        if name not in KVConnectorFactory._registry:  # noqa: SLF001 - no public query
            KVConnectorFactory.register_connector(name, MODULE, name)
