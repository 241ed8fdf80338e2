"""Prints what the package needs, one requirement a line. Usage: image_requirements.py EXTRA... [-PACKAGE]...

Extras are added, packages with a minus are left out. Images install these before the code is copied, so that a change of code keeps
the layer of the dependencies.
"""

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
extras = project["optional-dependencies"]
wanted = [word for word in sys.argv[1:] if not word.startswith("-")]
left_out = {word.removeprefix("-") for word in sys.argv[1:]} - set(wanted)
if unknown := set(wanted) - set(extras):
    sys.exit(f"extra: must be one of {', '.join(extras)}; got {', '.join(sorted(unknown))}")
lines = {
    re.split(r"[<>=~! \[;]", line)[0]: line
    for name in [None, *wanted]
    for line in (extras[name] if name else project["dependencies"])
}
if absent := left_out - set(lines):
    sys.exit(f"package to leave out: must be a requirement; got {', '.join(sorted(absent))}")
sys.stdout.write("".join(f"{line}\n" for name, line in lines.items() if name not in left_out))
