"""An output folder that may be sent: with its report and its card."""

import json
from pathlib import Path

from kvq.publish.bundle import CARD, DISTANCE

CARD_TEXT = "---\nlicense: mit\n---\n# A model\n"


def add_report_and_card(folder: Path) -> Path:
    (folder / DISTANCE).parent.mkdir()
    (folder / DISTANCE).write_text(json.dumps({"schema": "kvq.distance/1", "mean_kl": 0.1}))
    (folder / CARD).write_text(CARD_TEXT)
    return folder
