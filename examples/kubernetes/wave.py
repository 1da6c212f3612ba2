"""Send a wave of delayed messages, and show how the consumer is scaled before it is due.

    kubectl port-forward service/tidemill-admin 8080 &
    kubectl get secret tidemill-admin-token -o jsonpath='{.data.token}' | base64 -d > token
    .venv/bin/python examples/kubernetes/wave.py --token-file token --messages 500 --due-in-s 120

One line whenever something has changed: seconds to the wave, what KEDA is told, replicas.
"""

import argparse
import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

parser = argparse.ArgumentParser()
parser.add_argument("--admin", default="http://127.0.0.1:8080")
parser.add_argument("--token-file", help="a file with the token of the REST API")
parser.add_argument("--namespace", default="default")
parser.add_argument("--deployment", default="billing-consumer")
parser.add_argument("--topic", default="orders")
parser.add_argument("--group", default="billing")
parser.add_argument("--messages", type=int, default=500)
parser.add_argument("--due-in-s", type=int, default=120)
parser.add_argument("--watch-s", type=int, default=240, help="from the time it is due")
options = parser.parse_args()
headers = {}
if options.token_file:
    headers["Authorization"] = f"Bearer {Path(options.token_file).read_text('ascii').strip()}"
rest = httpx.Client(base_url=f"{options.admin}/api/v1", timeout=30, headers=headers)
PARTS = "value", "scheduled", "ready", "inFlight"


def send(due_at_ms: int) -> None:
    """Send one message of the wave."""
    message = {"body": "work", "deliverAtMs": due_at_ms}
    rest.post(f"/topics/{options.topic}/messages", json=message).raise_for_status()


def scale_hint() -> tuple[int | str, ...]:
    """Return what KEDA is told, and its parts; "?" while a broker group cannot be asked."""
    answer = rest.get(f"/groups/{options.group}/scaling", params={"topic": options.topic})
    return tuple(answer.json().get(part, "?") for part in PARTS)


def replicas() -> tuple[int, int]:
    """Return how many replicas are wanted, and how many are ready."""
    shown = subprocess.run(
        ["kubectl", "-n", options.namespace, "get", "deployment", options.deployment, "-o", "json"],
        check=True,
        capture_output=True,
    ).stdout
    deployment = json.loads(shown)
    return deployment["spec"]["replicas"], deployment["status"].get("readyReplicas", 0)


due_at_ms = int(time.time() + options.due_in_s) * 1000
with ThreadPoolExecutor(8) as threads:
    for sent in [threads.submit(send, due_at_ms) for _ in range(options.messages)]:
        sent.result()
print(
    f"{'seconds':>8} {'told':>6} {'scheduled':>9} {'ready':>6} {'in flight':>9}  replicas (ready)"
)
before = None
while (at_s := time.time() - due_at_ms / 1000) < options.watch_s:
    now = (*scale_hint(), *replicas())
    if now != before:
        line = "{:>+8.1f} {:>6} {:>9} {:>6} {:>9}  {} ({})"
        print(line.format(at_s, *now), flush=True)
    before = now
    if at_s > 0 and not any(now):
        break
    time.sleep(0.5)
