"""What the server writes to its log: lines for people, or a JSON object a line for machines. Never picture contents."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Literal

__all__ = ["JsonFormatter", "configure"]

_LOGGERS = ("service", "dear_serve")


class JsonFormatter(logging.Formatter):
    """Time, level, logger and message, and what the record has in `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(kind: Literal["text", "json"]) -> None:
    """Send the log of the service and of the library to standard error, once, whatever BentoML does with others."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter()
        if kind == "json"
        else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers = [handler]
        logger.propagate = False
