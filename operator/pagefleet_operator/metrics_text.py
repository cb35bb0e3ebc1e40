"""A pod's /metrics text -> Sample. Pure; everything that a hostile or broken pod may send ends in a ScrapeError."""

import math
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from pagefleet_operator.errors import ScrapeError, shorten
from pagefleet_operator.fleet import Sample
from pagefleet_operator.latency import Histogram, Latencies

BLOCKS = "pagefleet_kv_blocks"
BLOCKS_TOTAL = "pagefleet_kv_blocks_total"
BLOCKS_WAITING = "pagefleet_kv_blocks_waiting"
OLDEST_WAITING = "pagefleet_requests_oldest_waiting_seconds"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"

FIRST_TOKEN = "vllm:time_to_first_token_seconds"
INTER_TOKEN = "vllm:inter_token_latency_seconds"

GAUGES = (BLOCKS, BLOCKS_TOTAL, BLOCKS_WAITING, OLDEST_WAITING, RUNNING, WAITING)
"""Without any of these there is no sample."""

HISTOGRAMS = (FIRST_TOKEN, INTER_TOKEN)
"""Without these there are no latencies."""

DOWNLOAD_DONE = "pagefleet_model_download_bytes"
DOWNLOAD_TOTAL = "pagefleet_model_download_total_bytes"
DOWNLOAD_FAMILIES = (DOWNLOAD_DONE, DOWNLOAD_TOTAL)
"""What a pod that starts is asked for."""

FAMILIES = (*GAUGES, *HISTOGRAMS)
"""What a scrape asks for."""

MAX_COUNT = 2**40
"""Largest count that is believed; far beyond any cache, far below overflow."""

MAX_SERIES = 4096
"""Series read from one answer, at most."""

MAX_LINE_CHARS = 4096
"""Longest line that is read: the parser's time grows with the square of a line's length."""


def parse_sample(text: str, *, time: float) -> Sample:
    """Raises ScrapeError when a family is missing, absurd, or contradicts another."""
    values, buckets = _read(text)
    used, cached = _count(values, f"{BLOCKS}:used"), _count(values, f"{BLOCKS}:cached")
    total = _count(values, BLOCKS_TOTAL)
    if total < 1:
        raise ScrapeError(f"{BLOCKS_TOTAL} is {total}: the engine has no KV cache yet")
    if used + cached > total:
        raise ScrapeError(f"{BLOCKS}: {used} used + {cached} cached are more than {BLOCKS_TOTAL}, {total}")
    return Sample(
        time=time,
        blocks_used=used,
        blocks_cached=cached,
        blocks_total=total,
        blocks_waiting=_count(values, BLOCKS_WAITING),
        running=_count(values, RUNNING),
        waiting=_count(values, WAITING),
        oldest_waiting_seconds=_number(values, OLDEST_WAITING),
        latencies=Latencies(
            time_to_first_token=_histogram(buckets, FIRST_TOKEN), inter_token=_histogram(buckets, INTER_TOKEN)
        ),
    )


def parse_progress(text: str) -> int | None:
    """Whole percent of a download that is under way, 0..99; None when there is none. Raises ScrapeError."""
    values, _ = _read(text)
    done, total = _number(values, DOWNLOAD_DONE), _number(values, DOWNLOAD_TOTAL)
    return int(100 * done / total) if done < total else None


Buckets = Mapping[str, Mapping[float, float]]


def _read(text: str) -> tuple[Mapping[str, float], Buckets]:
    """(gauges by name, histograms by name and bound), summed over the labels that do not matter.

    `kv_blocks` goes by name and state.
    """
    values: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {name: {} for name in HISTOGRAMS}
    series = 0
    longest = max(map(len, text.split("\n")))
    if longest > MAX_LINE_CHARS:
        raise ScrapeError(f"a line of {longest} characters, more than {MAX_LINE_CHARS}")
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                series += 1
                if series > MAX_SERIES:
                    raise ScrapeError(f"more than {MAX_SERIES} series in one answer")
                histogram = buckets.get(sample.name.removesuffix("_bucket"))
                if histogram is not None and sample.name.endswith("_bucket"):
                    bound = float(sample.labels["le"])
                    histogram[bound] = histogram.get(bound, 0.0) + float(sample.value)
                if sample.name not in GAUGES and sample.name not in DOWNLOAD_FAMILIES:
                    continue
                name = f"{BLOCKS}:{sample.labels.get('state', '')}" if sample.name == BLOCKS else sample.name
                values[name] = values.get(name, 0.0) + float(sample.value)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ScrapeError(f"not Prometheus text: {shorten(str(error) or type(error).__name__, 120)}") from error
    return values, buckets


def _histogram(buckets: Buckets, name: str) -> Histogram:
    """Raises ScrapeError when counts fall, are no numbers, a bound is absurd, or the infinite one is missing."""
    found = sorted(buckets[name].items())
    if not found:
        return Histogram()
    if any(math.isnan(bound) or MAX_COUNT < bound < math.inf for bound, _ in found):
        raise ScrapeError(f"{name} is no histogram")
    counts = [count for _, count in found]
    finite = all(math.isfinite(count) and 0 <= count <= MAX_COUNT for count in counts)
    if not finite or counts != sorted(counts) or found[-1][0] != math.inf or found[0][0] < 0:
        raise ScrapeError(f"{name} is no histogram")
    return Histogram(tuple(bound for bound, _ in found), tuple(counts))


def _number(values: Mapping[str, float], name: str) -> float:
    value = values.get(name)
    if value is None:
        raise ScrapeError(f"{name} is missing")
    if not math.isfinite(value) or not 0 <= value <= MAX_COUNT:
        raise ScrapeError(f"{name} is {value}, not between 0 and {MAX_COUNT}")
    return value


def _count(values: Mapping[str, float], name: str) -> int:
    return round(_number(values, name))
