# SPDX-License-Identifier: Apache-2.0
"""Scrapes of the metrics: parsing, and the equations that hold in each of them."""

import re
from collections import defaultdict

Labels = frozenset[tuple[str, str]]
Samples = dict[str, dict[Labels, float]]

_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"(?:,|$)')


def samples_of(text: str) -> Samples:
    """Return the samples of a scrape by name and labels; fail for a line that is none."""
    found: Samples = defaultdict(dict)
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = _SAMPLE.match(line)
        assert match is not None, line
        name, labels, value = match.groups()
        key = frozenset(_LABEL.findall(labels or ""))
        assert key not in found[name], f"twice: {line}"
        found[name][key] = float(value)
    return found


def summed(samples: Samples, name: str, by: str, **only: str) -> dict[str, float]:
    """Return the sums of a metric's samples with the labels `only`, by the label `by`."""
    sums: dict[str, float] = defaultdict(float)
    for labels, value in samples[name].items():
        known = dict(labels)
        if only.items() <= known.items():
            sums[known.get(by, "")] += value
    return dict(sums)


def check_metrics(text: str) -> Samples:
    """Check the equations of a scrape, and return its samples."""
    samples = samples_of(text)
    asked = summed(samples, "kvhaven_asked_tokens_total", "namespace")
    by_source = summed(samples, "kvhaven_lookup_tokens_total", "namespace")
    assert by_source == asked, "the sources do not sum to the tokens asked for"
    none = summed(samples, "kvhaven_lookup_tokens_total", "namespace", source="none")
    reasons = summed(samples, "kvhaven_missed_tokens_total", "namespace")
    assert reasons == none, "the reasons do not sum to the tokens that were found nowhere"
    assert sum(summed(samples, "kvhaven_lookups_total", "namespace").values()) == sum(
        samples["kvhaven_request_hit_ratio_count"].values()
    ), "lookups are miscounted"
    memory = sum(samples["kvhaven_memory_bytes"].values())
    (capacity,) = samples["kvhaven_memory_capacity_bytes"].values()
    assert memory == capacity, f"the states of memory sum to {memory}, not {capacity}"
    assert min(samples["kvhaven_memory_bytes"].values()) >= 0, "a state of memory is negative"
    for name in [name for name in samples if name.endswith("_bucket")]:
        _check_histogram(samples, name.removesuffix("_bucket"))
    return samples


def _check_histogram(samples: Samples, name: str) -> None:
    series: dict[Labels, list[tuple[float, float]]] = defaultdict(list)
    for labels, value in samples[f"{name}_bucket"].items():
        bound = float(dict(labels)["le"].replace("+Inf", "inf"))
        series[frozenset(pair for pair in labels if pair[0] != "le")].append((bound, value))
    for labels, buckets in series.items():
        counts = [count for _, count in sorted(buckets)]
        assert counts == sorted(counts), f"{name}: its buckets are not cumulative"
        assert counts[-1] == samples[f"{name}_count"][labels], f"{name}: its count is wrong"
