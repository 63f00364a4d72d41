"""What goes wrong between a client and the Hub, drawn from a seed: the same requests meet the same faults."""

import hashlib
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["500", "502", "503", "429", "timeout", "drop", "drop-mid", "lost-answer"]
KINDS: tuple[Kind, ...] = ("500", "502", "503", "429", "timeout", "drop", "drop-mid", "lost-answer")


@dataclass
class Faults:
    """Each request fails with probability `rate`. `first` makes the first request whose path holds a text fail so."""

    rate: float = 0.0
    seed: int = 0
    kinds: tuple[Kind, ...] = KINDS
    first: dict[str, Kind] = field(default_factory=dict)
    met: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    log: list[str] = field(default_factory=list)
    _tries: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def draw(self, method: str, path: str) -> Kind | None:
        """By what was asked and how often, not by when: threads may come in any order."""
        with self._lock:
            self.requests += 1
            key = f"{method} {path}"
            self._tries[key] += 1
            fault = self._choose(key, self._tries[key])
            self.log.append(f"{key} -> {fault or 'ok'}")
            if fault is not None:
                self.met[fault] += 1
            return fault

    def _choose(self, key: str, attempt: int) -> Kind | None:
        for text, kind in list(self.first.items()):
            if text in key:
                del self.first[text]
                return kind
        number = int.from_bytes(hashlib.sha256(f"{self.seed} {key} {attempt}".encode()).digest()[:8], "big")
        share = number / 2**64
        return self.kinds[int(share / self.rate * len(self.kinds))] if share < self.rate else None
