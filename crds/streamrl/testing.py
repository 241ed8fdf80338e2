"""What tests of plug-ins are written with: `from streamrl.testing import check_loss`. docs/plugins.md shows how.

Found by an entry point, as `streamrl.plugins`.
"""

from typing import Any

from streamrl.plugins import load_door


def __getattr__(name: str) -> Any:  # noqa: ANN401 - functions, classes
    return load_door("testing", name=name, module=__name__)
