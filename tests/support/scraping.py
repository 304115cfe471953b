"""Metrics as Prometheus receives them."""

import time
import urllib.request

import pytest
import ray


def scrape(wanted, seconds=60.0):
    """Wait until the node's endpoint has metrics, by (name, tags), and return their values."""
    node = next(node for node in ray.nodes() if node["Alive"])
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
    end = time.monotonic() + seconds
    while True:
        lines = urllib.request.urlopen(address, timeout=10).read().decode().splitlines()
        found = {
            (name, tags): float(line.rpartition(" ")[2])
            for name, tags in wanted for line in lines
            if line.startswith(f"ray_{name}{{") and all(f'{k}="{v}"' in line for k, v in tags)
        }
        if found == pytest.approx(wanted):
            return
        assert time.monotonic() < end, (found, wanted)
        time.sleep(0.5)  # reports are sent every ten seconds
