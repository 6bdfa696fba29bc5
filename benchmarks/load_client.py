"""Asks a server for /classify over HTTP, from a process of its own, and prints what it saw as a JSON line.

    python benchmarks/load_client.py 3000 --clients 64 --seconds 10 --size 640x480
    python benchmarks/load_client.py 3000 --rate 500 --seconds 600 --size 640x480

With --clients each of them sends its next picture when the last is answered (closed loop); with --rate they are sent at
that rate whether or not the server keeps up (open loop). Requests are written beforehand and answers are read by
their length, so that little of the machine is spent here.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import time
from collections import Counter

import numpy as np
from PIL import Image

MOST_CONNECTIONS = 900
ENCODED_VARIANTS = 4


def pictures(size: str) -> list[bytes]:
    """JPEGs (quality 90) of smooth noise: as many bytes as a photograph of that size has."""
    width, height = map(int, size.split("x"))
    found = []
    for seed in range(ENCODED_VARIANTS):
        noise = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        image = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=90)
        found.append(stream.getvalue())
    return found


def request(data: bytes, port: int, fields: dict[str, str]) -> bytes:
    """The bytes of one POST /classify."""
    parts = [
        f'--x\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n'.encode()
        for k, v in fields.items()
    ]
    head = b'--x\r\nContent-Disposition: form-data; name="images"; filename="a.jpg"\r\nContent-Type: image/jpeg\r\n\r\n'
    body = b"".join(parts) + head + data + b"\r\n--x--\r\n"
    lines = (
        f"POST /classify HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: multipart/form-data; boundary=x\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return lines.encode() + body


class Connection:
    """One kept-alive connection."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, message: bytes) -> int:
        """Status of the answer; 0 if the connection failed."""
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection("127.0.0.1", self.port)
            reader, writer = self._streams
            writer.write(message)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            return int(head[9:12])
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            self.close()
            return 0

    def close(self) -> None:
        """Close it; the next request opens another."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class Seen:
    """Statuses, and seconds of the answers that were 200."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.seconds: list[float] = []

    async def ask(self, connection: Connection, message: bytes) -> None:
        """Ask once and remember."""
        start = time.perf_counter()
        status = await connection.ask(message)
        self.statuses[status] += 1
        if status == 200:
            self.seconds.append(time.perf_counter() - start)

    def summary(self, wall: float) -> dict[str, object]:
        """Rate of good answers, percentiles in ms, statuses."""
        good = sorted(self.seconds) or [float("nan")]
        at = {p: round(1000 * good[min(len(good) - 1, int(p / 100 * len(good)))], 1) for p in (50, 95, 99)}
        return {
            "rps": round(len(self.seconds) / wall, 2),
            **{f"p{p}_ms": value for p, value in at.items()},
            "statuses": {str(k): v for k, v in sorted(self.statuses.items())},
        }


async def closed(port: int, clients: int, seconds: float, messages: list[bytes]) -> Seen:
    """Every client asks again as soon as it is answered; a round that has begun is finished."""
    seen, end = Seen(), time.perf_counter() + seconds

    async def client(number: int) -> None:
        connection, i = Connection(port), number
        while time.perf_counter() < end:
            await seen.ask(connection, messages[i % len(messages)])
            i += 1
        connection.close()

    await asyncio.gather(*(client(n) for n in range(clients)))
    return seen


async def opened(port: int, rate: float, seconds: float, messages: list[bytes]) -> Seen:
    """`rate` requests a second; those that find no free connection of 900 are counted as "unsent"."""
    seen, free = Seen(), [Connection(port) for _ in range(MOST_CONNECTIONS)]
    running: set[asyncio.Task[None]] = set()

    async def one(connection: Connection, message: bytes) -> None:
        await seen.ask(connection, message)
        free.append(connection)

    start, sent = time.perf_counter(), 0
    while (now := time.perf_counter() - start) < seconds:
        while sent < now * rate:
            if free:
                task = asyncio.create_task(one(free.pop(), messages[sent % len(messages)]))
                running.add(task)
                task.add_done_callback(running.discard)
            else:
                seen.statuses[-1] += 1
            sent += 1
        await asyncio.sleep(0.002)
    if running:
        await asyncio.wait(running, timeout=60)
    return seen


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("port", type=int)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--size", default="640x480")
    args = parser.parse_args()
    messages = [request(data, args.port, {}) for data in pictures(args.size)]
    start = time.perf_counter()
    if args.rate:
        seen = asyncio.run(opened(args.port, args.rate, args.seconds, messages))
    else:
        seen = asyncio.run(closed(args.port, args.clients, args.seconds, messages))
    print(json.dumps(seen.summary(time.perf_counter() - start)))


if __name__ == "__main__":
    main()
