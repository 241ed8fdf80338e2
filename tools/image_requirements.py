"""Prints what the package needs, one requirement a line. Usage: image_requirements.py EXTRA...

Images install these before the code is copied, so that a change of code keeps the layer of the dependencies.
"""

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
extras = project["optional-dependencies"]
wanted = sys.argv[1:]
if unknown := set(wanted) - set(extras):
    sys.exit(f"extra: must be one of {', '.join(extras)}; got {', '.join(sorted(unknown))}")
lines = {
    re.split(r"[<>=~! \[;]", line)[0]: line
    for name in [None, *wanted]
    for line in (extras[name] if name else project["dependencies"])
}
sys.stdout.write("".join(f"{line}\n" for line in lines.values()))
