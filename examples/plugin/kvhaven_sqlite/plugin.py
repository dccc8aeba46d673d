# SPDX-License-Identifier: Apache-2.0
"""A plugin that says which requests missed chunks that were stored once."""

from kvhaven.plugins import PluginBase, RequestStats


class MissLog(PluginBase):
    """Prints a line for each request with a miss that more memory, or a faster tier, would help."""

    def on_request_complete(self, request_id: str, stats: RequestStats) -> None:
        """Print the request and its reason."""
        if stats.reason in {"evicted", "late", "write_dropped"}:
            missed = stats.prompt_tokens - stats.cached_tokens
            print(f"{request_id}: {missed} of {stats.prompt_tokens} tokens, {stats.reason}")
