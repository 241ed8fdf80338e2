"""What plug-ins are written with: `from streamrl.plugins import GroupAlgorithm, PluginOptions`. docs/plugins.md lists the names.

They are found by an entry point, as the contract imports no worker.
"""

from importlib.metadata import entry_points
from typing import Any

PROTOCOL = 1
"""Version of these names and of what is called of a plug-in. A change that breaks plug-ins raises it."""


def load_door(door: str, *, name: str, module: str) -> Any:  # noqa: ANN401 - classes, functions
    """Find what `module` gives as `name`, in the module of the entry point `door`."""
    if not name.startswith("__"):  # what Python asks of any module
        for found in entry_points(group="streamrl.plugins", name=door):
            return getattr(found.load(), name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def __getattr__(name: str) -> Any:  # noqa: ANN401 - as above
    return load_door("protocol", name=name, module=__name__)
