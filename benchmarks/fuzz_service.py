"""Mutated requests against the service: counts by status, and everything that should never be in an answer.

    python benchmarks/fuzz_service.py                       3,000 requests, dear-mini on ONNX Runtime: 1-3 minutes
    python benchmarks/fuzz_service.py --requests 300 --seed 7 --bundle runs/flowers

Pictures of every format with bytes flipped, cut, spliced and stretched, as forms and as base64 in JSON; broken
forms; JSON made from the OpenAPI description, valid and not; and a fifth by schemathesis, where it is installed
(pip install schemathesis). Wrong is: a status of 500 or above other than 503 `overloaded`, more than 10 s, an answer
outside the error contract, a traceback or a path of the server in it. Exit status 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from fuzz_requests import Attempt, attempts, schemathesis_attempts

ROOT = Path(__file__).parents[1]
SECONDS = 10.0
SECRETS = ("Traceback", "site-packages", '.py"', ".py:", "/tmp/", "/home/", "/root/", "/usr/lib", str(ROOT))


def complaint(attempt: Attempt, status: int, text: str, seconds: float) -> str | None:
    """What is wrong with an answer, if anything."""
    if status >= 500 and not (status == 503 and '"overloaded"' in text):
        return f"status {status}"
    if seconds > SECONDS:
        return f"{seconds:.1f} s"
    told = [secret for secret in SECRETS if secret in text and secret.encode() not in attempt.content]
    if told and attempt.path != "docs.json":
        return f"says {told[0]!r}"
    if status >= 400 and not attempt.path.startswith(("livez", "readyz")):
        try:
            fine = set(json.loads(text)["error"]) == {"code", "message", "field"}
        except (ValueError, KeyError, TypeError):
            fine = False
        if not fine:
            return "is outside the error contract"
    return None


def run(sent: list[Attempt], ask: Callable[[Attempt], tuple[int, str]], threads: int = 1) -> dict[str, Any]:
    """Send them all: counts by kind and status, the slowest, and what was wrong."""

    def one(attempt: Attempt) -> tuple[Attempt, int, float, str | None]:
        start = time.perf_counter()
        status, text = ask(attempt)
        seconds = time.perf_counter() - start
        return attempt, status, seconds, complaint(attempt, status, text, seconds)

    with ThreadPoolExecutor(threads) as pool:
        done = list(pool.map(one, sent))
    kinds: dict[str, Counter[int]] = {}
    for attempt, status, _, _ in done:
        kinds.setdefault(attempt.kind, Counter())[status] += 1
    wrong = [f"{a.method} {a.path[:80]} ({a.kind}, {status}): {w}" for a, status, _, w in done if w]
    return {
        "requests": len(done),
        "statuses": {str(k): n for k, n in sorted(Counter(status for _, status, _, _ in done).items())},
        "kinds": {kind: {str(k): n for k, n in sorted(c.items())} for kind, c in sorted(kinds.items())},
        "slowest_s": round(max((s for _, _, s, _ in done), default=0.0), 3),
        "wrong": wrong,
    }


def _ask(client: httpx.Client, attempt: Attempt) -> tuple[int, str]:
    headers = {"Content-Type": attempt.type} if attempt.type else {}
    try:
        response = client.request(attempt.method, attempt.path, content=attempt.content, headers=headers)
    except httpx.TimeoutException:
        return 599, "no answer in time"
    except httpx.RemoteProtocolError as error:
        return 598, f"hung up: {error}"
    return response.status_code, response.text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=8, help="requests at a time (8)")
    parser.add_argument(
        "--bundle", type=Path, help="an exported bundle (default: dear-mini with a random adapter)"
    )
    args = parser.parse_args()
    bundle = args.bundle or ROOT / "runs" / "bench" / "dear-mini"
    if not (bundle / "onnx").is_dir():
        script = Path(__file__).with_name("random_bundle.py")
        subprocess.run([sys.executable, str(script), "dear-mini", str(bundle)], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    result = _against(bundle, f"http://127.0.0.1:{port}/", port, args)
    for kind, counts in result["kinds"].items():
        print(f"{kind:20} " + "  ".join(f"{status}: {n}" for status, n in counts.items()))
    print(f"slowest {result['slowest_s']} s, memory {result['rss_mb'][0]} MB, then {result['rss_mb'][1]} MB")
    print("\n".join(result["wrong"]) or "nothing wrong")
    print(json.dumps(result))
    raise SystemExit(1 if result["wrong"] else 0)


def _against(bundle: Path, address: str, port: int, args: argparse.Namespace) -> dict[str, Any]:
    from dear_serve.launch import serve_command, serve_environment, server_process

    with tempfile.TemporaryDirectory() as folder:
        environment = serve_environment(bundle, gallery=Path(folder) / "gallery")
        log = Path(folder) / "log"
        command = serve_command(host="127.0.0.1", port=port)
        with (
            server_process(command, environment, log=log) as process,
            httpx.Client(base_url=address) as client,
        ):
            client.timeout = httpx.Timeout(3 * SECONDS)
            _until_ready(client)
            description = client.get("docs.json").json()
            has = importlib.util.find_spec("schemathesis") is not None
            theirs = schemathesis_attempts(args.requests // 5, description, address) if has else []
            ours = list(attempts(args.requests - len(theirs), args.seed, description))
            before = _memory(process.pid)
            result = run(ours + theirs, lambda attempt: _ask(client, attempt), args.threads)
            result["rss_mb"] = [before, _memory(process.pid)]
            if client.get("readyz").status_code != 200:
                result["wrong"].append("the server is not ready after it")
            if "Traceback" in log.read_text(errors="replace"):
                result["wrong"].append(
                    "the server's log has a traceback:\n" + log.read_text(errors="replace")[-3000:]
                )
    return result


def _until_ready(client: httpx.Client) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            if client.get("readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit("the server does not get ready")


def _memory(pid: int) -> int:
    """Resident megabytes of a process and those it started."""
    children = [pid]
    for entry in children:
        listed = Path(f"/proc/{entry}/task/{entry}/children")
        children += [int(c) for c in listed.read_text().split()] if listed.exists() else []
    pages = [Path(f"/proc/{p}/statm") for p in children]
    return round(sum(int(p.read_text().split()[1]) for p in pages if p.exists()) * 4096 / 2**20)


if __name__ == "__main__":
    main()
