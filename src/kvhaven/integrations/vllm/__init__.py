# SPDX-License-Identifier: Apache-2.0
"""KVHaven in vLLM. Nothing of vLLM or torch is imported before it is needed."""

NAME = "KVHavenConnector"
MODULE = "kvhaven.integrations.vllm.connector"


def register() -> None:
    """Make the connector known to vLLM by its class name (the entry point's job).

    vLLM calls this in every process it starts; registering twice is no error. The name is
    also how vLLM finds the statistics class, so it is needed with a module path as well.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415 - lazy
        KVConnectorFactory,
    )

    if NAME not in KVConnectorFactory._registry:  # noqa: SLF001 - it has no other way to ask
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
