"""What to watch, and a dashboard of it.

Needs:  a server started with --enable-metrics. The dashboard is grafana/dashboard.json: import it
        and choose the Prometheus source that scrapes http://SERVER/metrics.
Run:    python cookbook/10_metrics.py --url http://127.0.0.1:30000
Expect: the figures below after one request, and every metric of the dashboard among the server's;
        rows on drafts and on prefill/decode pairs need a server that has them.
"""

import json
import re
from pathlib import Path

from recipe import expect, generate, get, parser, run

DASHBOARD = Path(__file__).parent / "grafana" / "dashboard.json"
SHOWN = (
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:token_usage",
    "sglang:cache_hit_rate",
    "sglang:gen_throughput",
    "sglang:prompt_tokens_total",
    "sglang:generation_tokens_total",
)
#: Rows of the dashboard that a server without the feature has no metrics for.
OPTIONAL = ("Drafts", "Prefill and decode pairs")


def dashboard_metrics(dashboard: dict) -> dict[str, set[str]]:
    """Row title to the metrics that its panels query."""
    rows: dict[str, set[str]] = {}
    title = ""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            title = panel["title"]
            continue
        queries = " ".join(target["expr"] for target in panel["targets"])
        rows.setdefault(title, set()).update(re.findall(r"sglang:\w+", queries))
    return rows


def main() -> None:
    arguments = parser(__doc__).parse_args()
    generate(arguments.url, 8, input_ids=list(range(100, 164)))
    text = get(arguments.url, "/metrics").text
    values: dict[str, float] = {}
    for name, value in re.findall(r"^(sglang:\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE):
        values[name] = values.get(name, 0.0) + float(value)
    for name in SHOWN:
        expect(name in values, f"{name} is missing; start the server with --enable-metrics")
        print(f"{name:<36}{values[name]:>14,.3f}")
    expect(values["sglang:generation_tokens_total"] >= 8, "the request was not counted")

    for row, metrics in dashboard_metrics(json.loads(DASHBOARD.read_text())).items():
        missing = sorted(metrics - values.keys())
        print(f"dashboard row {row!r}: {len(metrics) - len(missing)} of {len(metrics)} metrics")
        expect(not missing or row in OPTIONAL, f"the server has no {', '.join(missing)}")


if __name__ == "__main__":
    run(main)
