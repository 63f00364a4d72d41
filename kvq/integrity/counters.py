"""What the plugin counted in this process: for the health field, and for Prometheus where the server exports it."""

from dataclasses import dataclass, field, fields
from typing import Any

# Field -> what its metric says. Metric names are `kvq:kv_tag_<field>_total`.
COUNTERS = {
    "checks": "Requests whose page table was compared with its recorded tags.",
    "violations": "Requests that were found with a page that is not theirs.",
    "aborted": "Requests that were ended for a violation.",
    "double_frees": "Pages that were freed while they were free.",
    "sweeps": "Sweeps over the pages that the prefix cache holds.",
    "sweep_violations": "Sweeps that found a page which the prefix cache had lost.",
    "quarantined_pages": "Pages that were kept from use or replaced after a violation.",
}


@dataclass
class Counters:
    checks: int = 0
    violations: int = 0
    aborted: int = 0
    double_frees: int = 0
    sweeps: int = 0
    sweep_violations: int = 0
    quarantined_pages: int = 0
    last_violation: str = ""
    _metrics: dict[str, Any] = field(default_factory=dict, repr=False)
    _exported: dict[str, int] = field(default_factory=dict, repr=False)

    def connect(self, labels: dict[str, str]) -> None:
        """Creates the metrics. Only after the engine has set up its multi-process directory."""
        from prometheus_client import Counter

        for name, text in COUNTERS.items():
            metric = Counter(f"kvq:kv_tag_{name}", text, labelnames=list(labels))
            self._metrics[name] = metric.labels(**labels)

    def export(self) -> None:
        """Brings the metrics up to date; the caller does so now and then, not in every step."""
        for name, metric in self._metrics.items():
            value = getattr(self, name)
            metric.inc(value - self._exported.get(name, 0))
            self._exported[name] = value

    def as_json(self) -> dict[str, Any]:
        """Not by `asdict`, which would copy the metrics, and those of several processes hold open files."""
        names = [one.name for one in fields(self) if not one.name.startswith("_")]
        return {name: getattr(self, name) for name in names}
