"""Writes the Grafana dashboards as classic JSON, which Grafana 10 to 12 load.

Usage: gen_dashboards.py FOLDER
"""

import json
import sys
from pathlib import Path

from dashboards import bubbles, fleet, job, operators, pools, training_health
from grafana_foundation_sdk.cog.encoder import JSONEncoder

BOARDS = (fleet, job, bubbles, pools, training_health, operators)


def main(folder: Path) -> None:
    """Write each under its uid."""
    folder.mkdir(parents=True, exist_ok=True)
    for module in BOARDS:
        document = json.loads(JSONEncoder(sort_keys=True).encode(module.build().build()))
        text = json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True)
        (folder / f"{module.UID}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
