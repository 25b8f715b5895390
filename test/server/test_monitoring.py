"""A real Prometheus scrapes a real server: the dashboard has data, and the alert can fire."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from sglang_dflash.tiny.prompts import held_out
from sglang_dflash.tools.launch import free_port
from test.server.conftest import on
from test.servers import TWO_RANKS, Client, chat

MONITORING = Path(__file__).parents[2] / "docs" / "monitoring"
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
ALERTS = MONITORING / "alerts.yml"
SECONDS = 120  # for Prometheus to start, or to see two samples

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None and "CI" not in os.environ,
    reason="needs prometheus, a package of Debian",
)


class Prometheus:
    """A running Prometheus, asked over HTTP."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path: str, **parameters: str) -> Any:
        reply = requests.get(f"{self._url}/{path}", params=parameters, timeout=10).json()
        assert reply["status"] == "success", reply
        return reply["data"]

    def values(self, query: str) -> list[float]:
        """The values of an instant query that are numbers."""
        found = self.get("query", query=query)["result"]
        values = [float(series["value"][1]) for series in found]
        return [value for value in values if not math.isnan(value)]


@contextmanager
def watching(server: Client, folder: Path) -> Iterator[Prometheus]:
    """Prometheus with this project's configuration, but scraping this server each second."""
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(ALERTS)]
    address = server.url.removeprefix("http://")
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [address]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield Prometheus(port)
    except Exception as error:
        raise AssertionError((folder / "log").read_text()[-3000:]) from error
    finally:
        process.kill()
        process.wait()


def is_scraping(prometheus: Prometheus) -> bool:
    try:
        return prometheus.values("up") == [1.0]
    except requests.RequestException:  # also HTTP 503 without JSON, while it starts
        return False


def queries() -> dict[str, str]:
    """The dashboard's queries by panel, as Grafana sends them."""
    found = {}
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "20s").replace("$model", ".*")
            assert "$" not in query
            found[f"{panel['title']} {target['refId']}"] = query
    return found


@on(TWO_RANKS)
def test_every_panel_has_data(server: Client, tmp_path: Path) -> None:
    prompts = [chat(example.prompt) for example in held_out("word", 4, seed=19)]
    with watching(server, tmp_path) as prometheus:
        until = time.monotonic() + SECONDS
        while not is_scraping(prometheus):
            assert time.monotonic() < until
            time.sleep(0.2)
        empty, until = queries(), time.monotonic() + SECONDS
        while empty and time.monotonic() < until:  # a rate needs two samples
            server.generate_many(prompts, max_new_tokens=60, ignore_eos=True)
            empty = {name: query for name, query in empty.items() if not prometheus.values(query)}
        assert not empty
        [group] = prometheus.get("rules")["groups"]
        [rule] = group["rules"]
    assert (rule["name"], rule["health"], rule["state"]) == (
        "DFlashLowAcceptance",
        "ok",
        "inactive",
    )


def rule_test(length: float, steps: int, fires: bool, colon: str = ":") -> dict[str, Any]:
    """A test of the alert by promtool: `steps` a minute commit `length` tokens each."""
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    written = {"{{ $labels.model_name }}": "m", '{{ $value | printf "%.2f" }}': f"{length:.2f}"}
    annotations = group["rules"][0]["annotations"]
    for template, text in written.items():
        annotations = {name: each.replace(template, text) for name, each in annotations.items()}
    alert = {
        "exp_labels": {"severity": "warning", "model_name": "m"},
        "exp_annotations": annotations,
    }
    series = {"count": steps, "sum": round(steps * length)}
    return {
        "interval": "1m",
        "input_series": [
            {
                "series": f'sglang{colon}spec_accept_length_tokens_{name}{{model_name="m"}}',
                "values": f"0+{step}x40",
            }
            for name, step in series.items()
        ],
        "alert_rule_test": [
            {
                "eval_time": "30m",
                "alertname": "DFlashLowAcceptance",
                "exp_alerts": [alert] if fires else [],
            }
        ],
    }


def test_the_alert_fires_for_low_acceptance_alone(tmp_path: Path) -> None:
    tests = [rule_test(1.1, 6000, True), rule_test(3.7, 6000, False), rule_test(1.1, 6, False)]
    tests.append(rule_test(1.1, 6000, True, colon="_"))
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_names_metrics_that_the_docs_list() -> None:
    listed = (MONITORING.parent / "operating.md").read_text()
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for metric in re.findall(r'"sglang\[:_\](\w+)"', target["expr"]):
                name = re.sub("_(sum|count|bucket)$", "", metric)
                assert name in listed or name == "generation_tokens_total", metric
