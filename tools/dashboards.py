"""Writes the Grafana dashboards of manifests/monitoring/dashboards from what they show.

python tools/dashboards.py [--check]
"""

import argparse
import sys
from pathlib import Path

from grafana import Dashboard, Panel, render

FOLDER = Path(__file__).resolve().parents[1] / "manifests" / "monitoring" / "dashboards"
PERCENTILES = (50, 95, 99)


def quantiles(metric: str, selector: str, by: str = "") -> list[tuple[str, str]]:
    """p50, p95 and p99 of a histogram over five minutes."""
    group = f"le, {by}" if by else "le"
    legend = f"{{{{{by}}}}} " if by else ""
    rate = f"sum by ({group}) (rate({metric}_bucket{{{selector}}}[5m]))"
    return [(f"histogram_quantile({share / 100}, {rate})", f"{legend}p{share}") for share in PERCENTILES]


FLEET = 'namespace=~"$namespace"'
ONE = 'namespace=~"$namespace", llmdeployment="$llmdeployment"'
ONE_SEEN = 'llmdeployment_namespace=~"$namespace", llmdeployment="$llmdeployment"'
FLEET_SEEN = 'llmdeployment_namespace=~"$namespace"'
BY = "namespace, llmdeployment"
NAMESPACES = ("namespace", "label_values(pagefleet_kv_blocks_total, namespace)")


def fleet() -> Dashboard:
    """All deployments side by side."""
    all_used = f'sum(pagefleet_kv_blocks{{state="used", {FLEET}}})'
    used = f'sum by ({BY}) (pagefleet_kv_blocks{{state="used", {FLEET}}})'
    name = "{{namespace}}/{{llmdeployment}}"
    seen = "{{llmdeployment_namespace}}/{{llmdeployment}}"
    first = f"sum by (le, {BY}) (rate(vllm:time_to_first_token_seconds_bucket{{{FLEET}}}[5m]))"
    return Dashboard(
        uid="pagefleet-fleet",
        title="PageFleet / Fleet",
        variables=[NAMESPACES],
        rows=[
            (
                "Now",
                [
                    Panel(
                        "Deployments",
                        [(f"count(pagefleet_operator_replicas_wanted{{{FLEET_SEEN}}})", "")],
                        kind="stat",
                        width=4,
                    ),
                    Panel(
                        "Ready replicas",
                        [(f"sum(pagefleet_operator_replicas_ready{{{FLEET_SEEN}}})", "")],
                        kind="stat",
                        width=4,
                    ),
                    Panel(
                        "KV blocks in use",
                        [
                            (
                                f"{all_used} / sum(pagefleet_kv_blocks_total{{{FLEET}}})",
                                "",
                            )
                        ],
                        unit="percentunit",
                        kind="stat",
                        width=4,
                    ),
                    Panel("Running", [(f"sum(vllm:num_requests_running{{{FLEET}}})", "")], kind="stat", width=4),
                    Panel("Waiting", [(f"sum(vllm:num_requests_waiting{{{FLEET}}})", "")], kind="stat", width=4),
                    Panel(
                        "Generated tokens/s",
                        [(f"sum(rate(vllm:generation_tokens_total{{{FLEET}}}[1m]))", "")],
                        kind="stat",
                        width=4,
                    ),
                ],
            ),
            (
                "By deployment",
                [
                    Panel(
                        "KV blocks in use",
                        [(f"{used} / sum by ({BY}) (pagefleet_kv_blocks_total{{{FLEET}}})", name)],
                        unit="percentunit",
                        highest=1,
                    ),
                    Panel("Waiting requests", [(f"sum by ({BY}) (vllm:num_requests_waiting{{{FLEET}}})", name)]),
                    Panel("Wanted replicas", [(f"pagefleet_operator_replicas_wanted{{{FLEET_SEEN}}}", seen)]),
                    Panel("Time to first token, p95", [(f"histogram_quantile(0.95, {first})", name)], unit="s"),
                    Panel(
                        "Generated tokens/s",
                        [(f"sum by ({BY}) (rate(vllm:generation_tokens_total{{{FLEET}}}[1m]))", name)],
                    ),
                    Panel(
                        "Requests that ended",
                        [
                            (
                                f"sum by (finished_reason) (rate(vllm:request_success_total{{{FLEET}}}[1m]))",
                                "{{finished_reason}}",
                            )
                        ],
                        unit="reqps",
                        stacked=True,
                    ),
                    Panel(
                        "Requests refused at the door",
                        [(f"sum by (reason) (rate(pagefleet_requests_rejected_total{{{FLEET}}}[1m]))", "{{reason}}")],
                        unit="reqps",
                        stacked=True,
                    ),
                    Panel(
                        "Objective met",
                        [(f"pagefleet_operator_slo_attainment_ratio{{{FLEET_SEEN}}}", seen)],
                        unit="percentunit",
                        highest=1,
                        help="Share of the last minute's requests within the objective; no line without an objective.",
                    ),
                    Panel(
                        "Degraded",
                        [(f'pagefleet_operator_condition{{type="Degraded", {FLEET_SEEN}}}', seen)],
                        highest=1,
                    ),
                ],
            ),
        ],
    )


def deployment() -> Dashboard:
    """One of them in depth."""
    used = f'sum(pagefleet_kv_blocks{{state="used", {ONE}}})'
    hits = f"sum(rate(vllm:prefix_cache_hits_total{{{ONE}}}[5m]))"
    return Dashboard(
        uid="pagefleet-deployment",
        title="PageFleet / Deployment",
        variables=[
            NAMESPACES,
            ("llmdeployment", 'label_values(pagefleet_kv_blocks_total{namespace=~"$namespace"}, llmdeployment)'),
        ],
        rows=[
            (
                "Memory",
                [
                    Panel(
                        "KV blocks by state",
                        [(f"sum by (state) (pagefleet_kv_blocks{{{ONE}}})", "{{state}}")],
                        stacked=True,
                        help="cached blocks keep their content until somebody needs the room: they are free.",
                    ),
                    Panel(
                        "Blocks wanted against blocks there",
                        [
                            (
                                f"{used} + sum(pagefleet_kv_blocks_waiting{{{ONE}}})",
                                "used + waiting",
                            ),
                            (f"sum(pagefleet_kv_blocks_total{{{ONE}}})", "total"),
                        ],
                    ),
                    Panel(
                        "KV blocks in use by pod",
                        [(f"vllm:kv_cache_usage_perc{{{ONE}}}", "{{pod}}")],
                        unit="percentunit",
                        highest=1,
                    ),
                    Panel(
                        "Preemptions",
                        [(f"sum by (pod) (rate(vllm:num_preemptions_total{{{ONE}}}[5m]))", "{{pod}}")],
                        unit="ops",
                    ),
                    Panel(
                        "Prompt tokens from the prefix cache",
                        [(f"{hits} / sum(rate(vllm:prefix_cache_queries_total{{{ONE}}}[5m]))", "hit rate")],
                        unit="percentunit",
                        highest=1,
                    ),
                    Panel(
                        "Tokens/s",
                        [
                            (f"sum(rate(vllm:prompt_tokens_total{{{ONE}}}[1m]))", "prompt"),
                            (f"sum(rate(vllm:generation_tokens_total{{{ONE}}}[1m]))", "generated"),
                        ],
                    ),
                ],
            ),
            (
                "What users see",
                [
                    Panel("Time to first token", quantiles("vllm:time_to_first_token_seconds", ONE), unit="s"),
                    Panel("Between two tokens", quantiles("vllm:inter_token_latency_seconds", ONE), unit="s"),
                    Panel("Whole request", quantiles("vllm:e2e_request_latency_seconds", ONE), unit="s"),
                    Panel("In the queue", quantiles("vllm:request_queue_time_seconds", ONE), unit="s"),
                    Panel(
                        "Objective met",
                        [(f"pagefleet_operator_slo_attainment_ratio{{{ONE_SEEN}}}", "requests within it")],
                        unit="percentunit",
                        highest=1,
                    ),
                    Panel(
                        "Refused and ended",
                        [
                            (
                                f"sum by (reason) (rate(pagefleet_requests_rejected_total{{{ONE}}}[1m]))",
                                "refused: {{reason}}",
                            ),
                            (
                                f"sum by (finished_reason) (rate(vllm:request_success_total{{{ONE}}}[1m]))",
                                "ended: {{finished_reason}}",
                            ),
                        ],
                        unit="reqps",
                    ),
                ],
            ),
            (
                "Scaling",
                [
                    Panel(
                        "Replicas",
                        [
                            (f"pagefleet_operator_replicas_wanted{{{ONE_SEEN}}}", "wanted"),
                            (f"pagefleet_operator_replicas_ready{{{ONE_SEEN}}}", "ready"),
                            (f"pagefleet_operator_replicas_min{{{ONE_SEEN}}}", "min"),
                            (f"pagefleet_operator_replicas_max{{{ONE_SEEN}}}", "max"),
                        ],
                    ),
                    Panel(
                        "Decisions",
                        [
                            (
                                f"sum by (rule) (increase(pagefleet_operator_decisions_total{{{ONE_SEEN}}}[5m]))",
                                "{{rule}}",
                            )
                        ],
                        help="Changes of the wanted replicas in five minutes, by the rule that won.",
                    ),
                    Panel("Queue", [(f"sum by (pod) (vllm:num_requests_waiting{{{ONE}}})", "{{pod}}")], stacked=True),
                    Panel(
                        "Oldest waiting request",
                        [(f"max by (pod) (pagefleet_requests_oldest_waiting_seconds{{{ONE}}})", "{{pod}}")],
                        unit="s",
                    ),
                    Panel("Step time", quantiles("pagefleet_engine_step_seconds", ONE), unit="s"),
                    Panel("Conditions", [(f"pagefleet_operator_condition{{{ONE_SEEN}}}", "{{type}}")], highest=1),
                ],
            ),
        ],
    )


def operator() -> Dashboard:
    """The operator itself."""
    of = 'namespace=~"$namespace"'
    prefix = "pagefleet_operator_"
    return Dashboard(
        uid="pagefleet-operator",
        title="PageFleet / Operator",
        variables=[("namespace", "label_values(pagefleet_operator_leader, namespace)")],
        rows=[
            (
                "Itself",
                [
                    Panel("Leaders", [(f"sum({prefix}leader{{{of}}})", "")], kind="stat", width=6),
                    Panel("Objects", [(f"max({prefix}objects{{{of}}})", "")], kind="stat", width=6),
                    Panel("Silent pods", [(f"max({prefix}silent_pods{{{of}}})", "")], kind="stat", width=6),
                    Panel("Loop lag", [(f"max({prefix}loop_lag_seconds{{{of}}})", "")], unit="s", kind="stat", width=6),
                ],
            ),
            (
                "Work",
                [
                    Panel(
                        "Reconciles",
                        [(f"sum by (result) (rate({prefix}reconciles_total{{{of}}}[5m]))", "{{result}}")],
                        unit="ops",
                        stacked=True,
                    ),
                    Panel("One reconcile", quantiles(f"{prefix}reconcile_seconds", of), unit="s"),
                    Panel(
                        "Requests to the API server",
                        [
                            (
                                f"sum by (method, code) (rate({prefix}api_requests_total{{{of}}}[5m]))",
                                "{{method}} {{code}}",
                            )
                        ],
                        unit="reqps",
                    ),
                    Panel("One round of scrapes", quantiles(f"{prefix}scrape_round_seconds", of), unit="s"),
                    Panel(
                        "Changes of replicas",
                        [(f"sum by (direction) (increase({prefix}scalings_total{{{of}}}[5m]))", "{{direction}}")],
                    ),
                    Panel(
                        "Changes that a watch lost",
                        [(f"sum(increase({prefix}missed_watch_events_total{{{of}}}[15m]))", "healed by a resync")],
                    ),
                ],
            ),
        ],
    )


def main() -> None:
    """Write them, or say with --check which are not what this script makes (exit code 1)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    stale = []
    for made in (fleet(), deployment(), operator()):
        path = FOLDER / f"{made.uid.removeprefix('pagefleet-')}.json"
        text = render(made)
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(path.name)
    if stale:
        sys.exit(f"not what tools/dashboards.py makes: {', '.join(stale)}: run it and commit")


if __name__ == "__main__":
    main()
