"""Findings about a machine as a person reads them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from kvq.console.screen import OUT

if TYPE_CHECKING:
    from kvq.publish.machine import Finding


def show_findings(findings: Iterable["Finding"]) -> None:
    table = Table(box=box.SIMPLE)
    for column in ("", "what", "found", "what to do"):
        table.add_column(column)
    for finding in findings:
        table.add_row(finding.status, finding.name, finding.found, finding.remedy)
    OUT.print(table)
