# SPDX-License-Identifier: Apache-2.0
"""A differential oracle: random requests through two real engines, with KVHaven and without.

Both play the same rounds: requests with random features, aborts, and events such as reloaded
adapters or changed weights. Two things are asserted of each request:

- what it answers: the log-probabilities of its tokens (or its embedding) are the control's;
- what it was offered: only chunks that were computed before with the same tokens, adapter,
  cache salt, media and weights. Salts change no log-probability, so only this shows a wrong one.

vLLM's own prefix cache goes by an adapter's name, and outlives changed weights. Until it is reset
the engine may answer from it: such requests are played and not compared, and whatever KVHaven
keeps of them shows later.
"""

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.e2e.engines import Engine, difference
from tests.e2e.oracle_models import IMAGE_TOKEN, write_adapter

TOLERANCE = 2e-3
"""Rounding of float32 stays far below, wrong KV is far above."""

CHUNK = 32
"""A block of the engine, so that short prompts have many chunks."""

_SALTS: tuple[Any, ...] = (None, None, None, None, "", "ann", "ann", "ben", 12345)
_LONGEST = 450
_LETTERS = 250

Request = dict[str, Any]
Event = dict[str, Any]
Answer = dict[str, Any]


class WrongAnswerError(AssertionError):
    """KVHaven changed an answer, or offered what it must not."""


@dataclass
class History:
    """What a client has of a conversation, and asks again or goes on with."""

    tokens: list[int]
    pictures: list[int] = field(default_factory=list)
    salt: Any = None
    adapter: int | None = None
    broken_off: bool = False


@dataclass
class Adapter:
    """An adapter's folder, and how it fares."""

    name: str
    id: int
    folder: Path
    content: int = 0
    healthy: bool = True
    back: bool = False
    """Whether another content was loaded meanwhile, and then this one again."""

    def write(self, content: int) -> None:
        """Overwrite its files; the folder is in order then."""
        shutil.rmtree(self.folder, ignore_errors=True)
        write_adapter(self.folder, content)
        self.content, self.healthy, self.back = content, True, False

    def fail(self, how: int) -> None:
        """Make its folder unreadable, as a network file system or a bad upload would."""
        self.healthy = False
        weights = self.folder / "adapter_model.safetensors"
        if how == 0:
            shutil.rmtree(self.folder)
        elif how == 1:
            weights.write_bytes(weights.read_bytes()[:100])
        else:
            weights.unlink()
            weights.mkdir()


@dataclass
class World:
    """What an episode's engines have: decides which features requests may use."""

    folder: Path
    models: Sequence[Path]
    adapters: bool = False
    pictures: bool = False
    embeds: bool = False
    sessions: bool = False
    structured: bool = False
    pooling: bool = False
    prefix_caching: bool = True
    speculation: bool = False


class Oracle:
    """Plays rounds on both engines from a seed, and compares; `counts` says what was seen.

    By feature, `hits` counts the tokens that KVHaven loaded, and `proven` those of requests whose
    answers were compared.
    """

    def __init__(self, seed: int, world: World, control: Engine, subject: Engine) -> None:
        self._seed = seed
        self.chance = random.Random(seed)
        self.world = world
        self.engines = (control, subject)
        self.counts: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        self.proven: Counter[str] = Counter()
        self.rounding = 0.0
        self._histories: list[History] = []
        self._known: set[bytes] = set()
        self._epoch = self._named = 0
        self._model = 0
        self._stale = False
        self._offers = True
        self._weights_are_news = False
        self._used: dict[str, set[tuple[int, str]]] = {}
        self._adapters = [
            Adapter(name, number, world.folder / f"adapter-{number}")
            for number, name in enumerate("abc", start=1)
            if world.adapters
        ]
        for adapter in self._adapters:
            adapter.write(adapter.id % 2)  # two of them have the same content

    def mutated(self, name: str, requests: int, *, offers: bool = True) -> str:
        """Break KVHaven in a named way ("": not at all) and play on; return what was found.

        Without `offers` only the answers are checked, and what is wrong must show there.
        After that it is as it was before: nothing that was cached or loaded meanwhile is used.
        """
        subject = self.engines[1]
        subject.ask("mutate", name=name)
        self._offers = offers
        try:
            self.play(requests)
        except WrongAnswerError as wrong:
            return str(wrong)
        finally:
            self._offers = True
            subject.ask("mutate", name="")
            self._tell({"do": "reset", "connector": True})
            self._epoch += 1
            for adapter in self._adapters:
                self._tell({"do": "unload", "id": adapter.id})
        return ""

    # --- rounds -------------------------------------------------------------------------------

    def play(self, requests: int) -> None:
        """Play rounds until so many more requests were played. Raises `WrongAnswerError`."""
        end = self.counts["requests"] + requests
        try:
            while self.counts["requests"] < end:
                self._between()
                self._round()
        except WrongAnswerError as error:
            played = self.counts["requests"]
            error.add_note(f"replay with KVHAVEN_SEED={self._seed} KVHAVEN_EVENTS={played}")
            raise

    def _round(self) -> None:
        """Play up to five requests together, and compare them."""
        requests = [self._request(index) for index in range(self.chance.randint(1, 5))]
        events = self._disturbances()
        for engine in self.engines:
            engine.send("play", requests=requests, events=events[engine is self.engines[1]])
        control, subject = (engine.answer() for engine in self.engines)
        changed = any(event["do"] == "weights" for event in events[0])
        chunks = [[self._chunks(*both)] for both in zip(requests, subject, strict=True)]
        if changed:  # those that came later are of the next epoch
            self._weights_changed()
            for request, found, either in zip(requests, subject, chunks, strict=True):
                either.append(self._chunks(request, found))
        here = Counter(name for either in chunks for names in either for name in names)
        for request, found in zip(requests, subject, strict=True):
            self._use(request, found)
        for request, expected, found, either in zip(
            requests, control, subject, chunks, strict=True
        ):
            self._count(request, found)
            self._check_offer(request, found, either, here)
            self._check_answer(request, expected, found)
            self._remember(request, found)
        self._known.update(here)
        self._weights_are_news = False

    def _between(self) -> None:
        """Do something to the engines while they are idle, now and then."""
        dice = self.chance.random()
        if dice < 0.03 and not self.world.pooling:
            self._tell({"do": "reset", "connector": True})
            self._epoch += 1
            self.counts["resets of the connector"] += 1
        elif dice < 0.05 and not self.world.pooling:
            self._tell({"do": "sleep"})
            self._epoch += 1
            self.counts["sleeps"] += 1
        elif dice < 0.08 and len(self.world.models) > 1:
            self._tell(self._new_weights())
            self._weights_changed()
        elif dice < 0.35 and self._adapters:
            self._change_adapter(self.chance.choice(self._adapters))
        if self.chance.random() < 0.7:
            self._tell({"do": "reset"}, self.engines[1:])  # so that KVHaven serves what follows

    def _change_adapter(self, adapter: Adapter) -> None:
        """Overwrite, break or mend an adapter's folder, and load or unload it, or neither."""
        if adapter.healthy and self.chance.random() < 0.4:
            self._load_another_and_back(adapter)
            return
        if self.chance.random() < 0.6 or not adapter.healthy:
            adapter.write(self.chance.randrange(3))
        else:
            adapter.fail(self.chance.randrange(3))
        dice = self.chance.random()
        if dice < 0.5:
            failed = self._load(adapter)
            self.counts["reloads that failed" if failed else "reloads"] += 1
        elif dice < 0.7:
            self._tell({"do": "unload", "id": adapter.id})

    def _load_another_and_back(self, adapter: Adapter) -> None:
        """Load another content, and the first one again: what was cached of that is right then."""
        content = adapter.content
        for loaded in ((content + 1) % 3, content):
            adapter.write(loaded)
            assert not self._load(adapter)
        adapter.back = True
        self.counts["reloads back"] += 1

    def _load(self, adapter: Adapter) -> str:
        return self._tell({"do": "load", "adapter": self._adapter(adapter) | {"again": True}})

    def _disturbances(self) -> tuple[list[Event], list[Event]]:
        """Return what happens while requests run: to the control, and to the other engine."""
        both: list[Event] = []
        dice = self.chance.random()
        healthy = [adapter for adapter in self._adapters if adapter.healthy]
        if dice < 0.06 and healthy:
            adapter = self.chance.choice(healthy)
            adapter.write(self.chance.randrange(3))
            wanted = self._adapter(adapter) | {"again": True}
            both.append({"do": "load", "adapter": wanted})
            self.counts["reloads in flight"] += 1
        elif dice < 0.08 and len(self.world.models) > 1 and len(healthy) == len(self._adapters):
            # vLLM drops the adapters then, and ends if it cannot load one again.
            both.append(self._new_weights())
        for event in both:
            event["step"] = self.chance.randrange(1, 6)
        own = [{"do": "reset", "running": True, "step": self.chance.randrange(1, 8)}]
        reset = self.chance.random() < 0.1 and not self.world.pooling
        self.counts["resets in flight"] += reset
        return both, both + (own if reset else [])

    def _new_weights(self) -> Event:
        self._model = (self._model + 1) % len(self.world.models)
        return {"do": "weights", "path": str(self.world.models[self._model])}

    def _weights_changed(self) -> None:
        self._epoch += 1
        self._stale = self._weights_are_news = True
        self.counts["changes of weights"] += 1

    def _tell(self, event: Event, engines: Sequence[Engine] = ()) -> str:
        """Tell engines of an event; both must fare alike. Returns the kind of their error."""
        told = engines or self.engines
        for engine in told:
            engine.send("happen", event=event)
        results = {engine.answer() for engine in told}
        if len(results) > 1:
            raise WrongAnswerError(f"{event}: the engines fare unlike: {results}")
        (result,) = results
        if event["do"] in {"reset", "sleep"}:
            assert not result, f"{event}: {result}"
            self._stale = False
            self._used = {}
        return str(result)

    # --- requests -----------------------------------------------------------------------------

    def _request(self, index: int) -> Request:
        """Draw a request: mostly a history again, or a continuation of one."""
        history, kind = self._history()
        if self.chance.random() < 0.15:
            history.salt = self.chance.choice(_SALTS)
            history.adapter = self._random_adapter()
        self._named += 1
        request: Request = {
            "name": f"{self._named}-{index}",
            "tokens": history.tokens,
            "pictures": history.pictures,
            "salt": history.salt,
            "arrive": self.chance.choice((0, 0, 0, 1, 3)),
            "max_tokens": self.chance.choice((1, 1, 2, 4, 8)),
            "healthy": True,
            "history": history.__dict__.copy(),
            "kind": kind,
        }
        if history.adapter is not None:
            adapter = self._adapters[history.adapter]
            request["healthy"] = adapter.healthy
            request["adapter"] = self._adapter(adapter)
            request["back"] = adapter.healthy and adapter.back
            request["adapter"]["again"] = adapter.healthy and self.chance.random() < 0.05
        self._feature(request)
        if self.chance.random() < 0.15:
            request["abort"] = self.chance.randrange(1, 8)
        return request

    def _feature(self, request: Request) -> None:
        """Give a request at most one of the rarer features."""
        dice, world = self.chance.random(), self.world
        if dice < 0.06 and world.embeds:
            request |= {"embeds": self.chance.randrange(5), "salt": None}
        elif dice < 0.14 and world.sessions:
            tokens = request["tokens"]
            cut = self.chance.randrange(1, len(tokens))
            request |= {"tokens": tokens[:cut], "turns": [tokens[cut:]]}
            if self.chance.random() < 0.5:
                request["turns"].append(self._words(5, 80))
            request.pop("abort", None)
        elif dice < 0.18 and world.structured:
            request["pattern"] = "[a-z ]+"
        elif dice < 0.21 and world.pictures:  # with adapters vLLM 0.32 ends on a CPU
            request["prompt_logprobs"] = 1
        elif dice < 0.5 and request["pictures"]:
            request["names"] = [f"picture-{seed}" for seed in request["pictures"]]
        elif dice < 0.7 and request["pictures"]:
            request["processing"] = {"image_mean": [0.2, 0.3, 0.4]}

    def _history(self) -> tuple[History, str]:
        """Return an old history, one that goes on, one that forks off, or a new one."""
        dice = self.chance.random()
        if not self._histories or dice < 0.08:
            return self._fresh(), "new"
        old = self.chance.choice(self._histories[-8:])
        history = History(list(old.tokens), list(old.pictures), old.salt, old.adapter)
        if dice < 0.5 or len(history.tokens) > _LONGEST - 90:
            return history, "resumed" if old.broken_off else "again"
        if dice < 0.8:
            history.tokens += self._words(5, 90)
            return history, "resumed" if old.broken_off else "continued"
        cut = self.chance.randrange(1, len(history.tokens))
        history.tokens = history.tokens[:cut] + self._words(5, 90)
        history.pictures = history.pictures[: history.tokens.count(IMAGE_TOKEN)]
        if self.world.pictures and history.pictures and self.chance.random() < 0.5:
            history.pictures[-1] = self.chance.randrange(6)
        return history, "forked"

    def _fresh(self) -> History:
        history = History(self._words(70, 300), salt=self.chance.choice(_SALTS))
        history.adapter = self._random_adapter()
        if self.world.pictures and self.chance.random() < 0.9:
            for _ in range(self.chance.randint(1, 3)):
                history.tokens.insert(self.chance.randrange(len(history.tokens)), IMAGE_TOKEN)
                history.pictures.append(self.chance.randrange(6))
        return history

    def _words(self, least: int, most: int) -> list[int]:
        """Return random tokens that quote themselves, so that n-grams can be guessed."""
        tokens: list[int] = []
        length = self.chance.randrange(least, most)
        while len(tokens) < length:
            if len(tokens) > 20 and self.chance.random() < 0.2:
                start = self.chance.randrange(len(tokens) - 15)
                tokens += tokens[start : start + 15]
            else:
                tokens.append(self.chance.randrange(_LETTERS))
        return tokens[:length]

    def _random_adapter(self) -> int | None:
        if not self._adapters or self.chance.random() < 0.5:
            return None
        return self.chance.randrange(len(self._adapters))

    @staticmethod
    def _adapter(adapter: Adapter) -> dict[str, Any]:
        return {"name": adapter.name, "id": adapter.id, "path": str(adapter.folder)}

    def _remember(self, request: Request, found: Answer) -> None:
        """Keep the history, with what was answered."""
        if found["error"] or request.get("embeds") is not None:
            return
        history = History(**request["history"])
        history.broken_off = found["aborted"]
        history.tokens = history.tokens + [t for t in found["tokens"] if t < _LETTERS]
        if request.get("turns") and not history.pictures:
            history.tokens = [t for t in found["all"] if t < _LETTERS]
        if len(history.tokens) < _LONGEST:
            self._histories.append(history)

    # --- what is asserted ---------------------------------------------------------------------

    def _count(self, request: Request, found: Answer) -> None:
        self.counts["requests"] += 1
        for feature in features_of(request, self.world):
            self.counts[feature] += 1
            self.hits[feature] += found["external"]
        self.hits["all"] += found["external"]

    def _chunks(self, request: Request, found: Answer) -> list[bytes]:
        """Name each full chunk of a request by all that decides its KV."""
        tokens = found["all"]
        if request.get("embeds") is not None or isinstance(request["salt"], int):
            return []
        starts = [
            at
            for at, (one, before) in enumerate(zip(tokens, [0, *tokens], strict=False))
            if one == IMAGE_TOKEN and before != IMAGE_TOKEN
        ]
        media = list(zip(starts, request["pictures"], strict=False))
        name = repr((self._epoch, request["salt"] or "", found["version"])).encode()
        names = []
        for end in range(CHUNK, len(tokens) + 1, CHUNK):
            seen = [(at, one, request.get("processing")) for at, one in media if at < end]
            name = sha256(name + repr((tokens[end - CHUNK : end], seen)).encode()).digest()
            names.append(name)
        return names

    def _check_offer(
        self, request: Request, found: Answer, either: list[list[bytes]], here: Counter[bytes]
    ) -> None:
        """Assert that nothing was loaded but what was computed for equal requests.

        `either` has the names of its chunks, in each epoch that the request may be of. An offer
        that was made before the scheduler heard of other weights is refused: the request fails.
        """
        if not (self._offers and found["external"]) or found["disturbed"]:
            return
        if found["ended"] == "error":
            return
        end = -(-found["cached"] // CHUNK)
        strange = [
            [
                at
                for at in range(end)
                if at >= len(names) or not (names[at] in self._known or here[names[at]] > 1)
            ]
            for names in either
        ]
        if all(strange):
            raise WrongAnswerError(
                f"offered {found['external']} tokens (to {found['cached']}), of which chunks "
                f"{strange[-1]} were never computed for such a request: {_short(request)}"
            )

    def _use(self, request: Request, found: Answer) -> None:
        """Note under which name vLLM's own cache may hold an adapter's KV."""
        if request.get("adapter") and not found["error"]:
            adapter = request["adapter"]
            uses = self._used.setdefault(adapter["name"], set())
            uses.add((adapter["id"], found["version"]))
            if found["disturbed"]:  # it began with another content, which its blocks have
                uses.add((adapter["id"], "another"))

    def _comparable(self, request: Request, expected: Answer, found: Answer) -> bool:
        if expected["disturbed"] or found["disturbed"]:
            self.counts["not compared: disturbed"] += 1
            return False
        if expected["version"] != found["version"]:
            self.counts["not compared: adapters loaded unlike"] += 1
            return False
        uses = self._used.get((request.get("adapter") or {"name": ""})["name"], ())
        if self.world.prefix_caching and (self._stale or len(uses) > 1):
            self.counts["not compared: vLLM's own cache is stale"] += 1
            return False
        return True

    def _check_answer(self, request: Request, expected: Answer, found: Answer) -> None:
        """Assert that the answer is the control's, up to rounding."""
        if expected["error"] != found["error"]:
            raise WrongAnswerError(
                f"error {found['error']}, not {expected['error']}: {_short(request)}"
            )
        if found["error"]:
            self.counts[f"refused by vLLM: {found['error']}"] += 1
            return
        if not self._comparable(request, expected, found):
            return
        if found["ended"] == "error":
            if not (request.get("adapter") or self._weights_are_news):
                raise WrongAnswerError(f"failed: {_short(request)}")
            self.counts["failed, as adapter or weights changed before the load"] += 1
            return
        if expected["embedding"] and found["embedding"]:
            pairs = zip(expected["embedding"], found["embedding"], strict=True)
            worst: float | None = max(difference(a, b) for a, b in pairs)
        else:
            worst = _worst(expected, found)
        if worst is None:
            self.counts["not compared: aborted before the answer"] += 1
            return
        self.counts["compared"] += 1
        self.counts["compared with hits"] += found["external"] > 0
        for feature in features_of(request, self.world):
            self.proven[feature] += found["external"]
        if worst > TOLERANCE:
            raise WrongAnswerError(
                f"differs by {worst:.4f} with {found['external']} tokens of {found['cached']} "
                f"loaded: {_short(request)}\n{_tokens_and_likelihoods(expected)} expected\n"
                f"{_tokens_and_likelihoods(found)} found"
            )
        self.rounding = max(self.rounding, worst)

    def report(self) -> str:
        """Return what was seen, for the log of the tests."""
        counts = [f"{name}: {self.counts[name]}" for name in sorted(self.counts)]
        tokens = [
            f"{name}: {self.hits[name]}, compared {self.proven[name]}" for name in sorted(self.hits)
        ]
        lines = (f"largest rounding: {self.rounding:.1e}", *counts, "tokens loaded:", *tokens)
        return "\n  ".join(lines)


def features_of(request: Request, world: World) -> Iterator[str]:
    """Yield the names of the features that a request has."""
    adapter = request.get("adapter")
    named = {
        "text alone": not (adapter or request["salt"] or request["pictures"]),
        "salt": bool(request["salt"]) and isinstance(request["salt"], str),
        "empty salt": request["salt"] == "",
        "int salt": isinstance(request["salt"], int),
        "adapter": bool(adapter),
        "adapter, reloaded by the request": bool(adapter and adapter["again"]),
        "adapter, loaded back": bool(adapter and request["back"]),
        "adapter in a broken folder": not request["healthy"],
        "pictures": bool(request["pictures"]),
        "pictures with names": bool(request.get("names")),
        "pictures, processed otherwise": bool(request.get("processing")),
        "prompt embeddings": request.get("embeds") is not None,
        "streaming session": bool(request.get("turns")),
        "structured output": bool(request.get("pattern")),
        "prompt log-probabilities": bool(request.get("prompt_logprobs")),
        "n-gram speculation": world.speculation,
        "pooling": world.pooling,
        "aborted": request.get("abort") is not None,
        "resumed after an abort": request["kind"] == "resumed",
        "continued": request["kind"] == "continued",
    }
    yield from (name for name, is_so in named.items() if is_so)


def _worst(expected: Answer, found: Answer) -> float | None:
    """Return by how much log-probabilities differ, position by position; None if there are none.

    Where two tokens are equally likely the engines may choose unlike; what follows is not
    comparable then.
    """
    worst = None
    for position, (one, other) in enumerate(
        zip(expected["logprobs"], found["logprobs"], strict=False)
    ):
        both = one.keys() & other.keys()
        here = max((difference(one[token], other[token]) for token in both), default=100.0)
        worst = max(worst or 0.0, here)
        if expected["tokens"][position] != found["tokens"][position]:
            chosen = [str(answer["tokens"][position]) for answer in (expected, found)]
            gap = abs(one.get(chosen[0], 0.0) - one.get(chosen[1], -100.0))
            return max(worst, gap if gap > 2 * TOLERANCE else 0.0)
    return worst


def _tokens_and_likelihoods(answer: Answer) -> str:
    return json.dumps([answer["tokens"][:4], answer["logprobs"][:2]])


def _short(request: Request) -> str:
    """Return a request on one line, without its tokens."""
    hidden = {"tokens", "history", "turns"}
    return json.dumps({k: v for k, v in request.items() if k not in hidden and v})
