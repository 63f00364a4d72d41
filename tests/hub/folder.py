"""An output folder that may be sent: with its report and its card."""

from pathlib import Path
from typing import Any

from kvq.publish.card_metadata import CARD
from kvq.verify.report_files import DISTANCE, report_folder, write_report

CARD_TEXT = "---\nlicense: mit\n---\n# A model\n"


def write_distance(folder: Path, **body: Any) -> None:
    write_report(report_folder(folder), "distance", DISTANCE, folder, {"mean_kl": 0.1, **body})


def add_report_and_card(folder: Path) -> Path:
    write_distance(folder)
    (folder / CARD).write_text(CARD_TEXT)
    return folder
