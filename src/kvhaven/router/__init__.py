# SPDX-License-Identifier: Apache-2.0
"""OpenAI-compatible router in front of prefill and decode nodes."""
