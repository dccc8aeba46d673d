# SPDX-License-Identifier: Apache-2.0
"""Toy inference engine with paged KV, batched steps, and KVHaven.

It has one layer of attention, random weights, greedy sampling, and several requests per step. The
lines that use KVHaven are marked.
"""

from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvhaven import load_settings
from kvhaven.engine import (
    EngineIdentity,
    Request,
    ScheduledRequest,
    connect_scheduler,
    connect_worker,
)

BLOCK, BLOCKS = 16, 512
VOCABULARY, HEADS, WIDTH = 101, 4, 32


class Model:
    """Model of token embeddings, one layer of attention, and logits."""

    def __init__(self, seed: int) -> None:
        make = torch.Generator().manual_seed(seed)
        size = HEADS * WIDTH
        self.embedding = torch.randn(VOCABULARY, size, generator=make)
        self.qkv = torch.randn(size, 3 * size, generator=make) / size**0.5
        self.kv = torch.zeros(BLOCKS, HEADS, BLOCK, 2 * WIDTH)  # content: K, then V

    def forward(self, tokens: list[int], first: int, blocks: list[int]) -> int:
        """Compute `tokens` from position `first` on into `blocks`; return the next token."""
        end = first + len(tokens)
        hidden = self.embedding[tokens] + torch.arange(first, end).sin()[:, None]
        q, k, v = (hidden @ self.qkv).view(-1, 3, HEADS, WIDTH).unbind(1)
        at = torch.arange(first, end)
        where = torch.tensor(blocks)[at // BLOCK]
        self.kv[where, :, at % BLOCK] = torch.cat([k, v], dim=-1)
        past = self.kv[blocks].transpose(0, 1).reshape(HEADS, -1, 2 * WIDTH)[:, :end]
        mask = torch.arange(end)[None] <= at[:, None]
        mixed = scaled_dot_product_attention(
            q.transpose(0, 1), past[..., :WIDTH], past[..., WIDTH:], attn_mask=mask
        )
        logits = mixed.transpose(0, 1).reshape(len(tokens), -1)[-1] @ self.embedding.T
        return int(logits.argmax())


@dataclass
class Sequence(Request):
    """Request with its blocks and the number of tokens that it may still generate."""

    left: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.num_prompt_tokens :]


class Engine:
    """Queues requests, and runs them step by step until all are finished."""

    def __init__(self, name: str, seed: int = 0) -> None:
        self.model = Model(seed)
        self.free = list(range(BLOCKS))
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.computed_tokens = 0
        settings = load_settings().settings  # KVHaven: environment variables, YAML, defaults
        identity = EngineIdentity(name, {"model": "toy", "weights": f"random, seed {seed}"})
        self.worker = connect_worker(
            settings, identity, {"layer": self.model.kv}, block_size=BLOCK, num_blocks=BLOCKS
        )
        self.scheduler = connect_scheduler(settings, identity, block_size=BLOCK)

    def add(self, name: str, prompt: list[int], length: int) -> Sequence:
        """Queue a prompt for `length` tokens of output."""
        request = Sequence(name, list(prompt), len(prompt), left=length)
        self.waiting.append(request)
        self.scheduler.on_new_request(request)  # KVHaven: promote its KV while it is queued
        return request

    def run(self) -> None:
        """Run steps until all requests are finished."""
        while self.waiting or self.running:
            self.step()

    def step(self) -> None:
        """Admit waiting requests, compute all running ones, sample a token for each."""
        starting = self._admit()
        scheduled = []
        for request in self.running:
            starts, done = request in starting, request.num_computed_tokens
            blocks, due = [request.blocks] if starts else None, request.num_tokens - done
            scheduled.append(ScheduledRequest(request.request_id, blocks, done, due, starts))
        plan = self.scheduler.plan_step(scheduled)  # KVHaven: plan this step's copies
        sampled: list[int] = []
        with self.worker.step(plan):  # KVHaven: loads end before the forward, saves start after it
            for request in self.running:
                first = request.num_computed_tokens
                sampled.append(self.model.forward(request.tokens[first:], first, request.blocks))
                self.computed_tokens += request.num_tokens - first
        failed = self.worker.failed_blocks()  # KVHaven: blocks that a load could not fill
        self.scheduler.reported(self.worker.report(), self.worker.finished_loads())
        for request, token in zip(tuple(self.running), sampled, strict=True):
            if failed.intersection(request.blocks):
                request.num_computed_tokens = 0  # compute all of it in the next step
                continue
            request.num_computed_tokens = request.num_tokens
            request.tokens.append(token)
            request.left -= 1
            if request.left == 0:
                self._finish(request)

    def close(self) -> None:
        """Disconnect from the service."""
        self.scheduler.close()
        self.worker.close()

    def _admit(self) -> list[Sequence]:
        admitted = []
        for request in tuple(self.waiting):
            blocks = -(-(request.num_tokens + request.left) // BLOCK)
            if len(self.free) < blocks:
                break
            matched, _ = self.scheduler.matched_tokens(request, 0)  # KVHaven: look up
            if matched is None:
                continue  # not known yet: ask again in the next step
            request.blocks, self.free = self.free[:blocks], self.free[blocks:]
            self.scheduler.allocated(request, [request.blocks], matched)  # KVHaven: plan load
            request.num_computed_tokens = matched
            self.waiting.remove(request)
            self.running.append(request)
            admitted.append(request)
        return admitted

    def _finish(self, request: Sequence) -> None:
        self.scheduler.finished(request)  # KVHaven: fence saves that still read its blocks
        self.running.remove(request)
        self.free += request.blocks
