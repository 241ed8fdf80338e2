"""What pages of runs and pages of a cluster's jobs share: the templates, the files that belong to them, the page that says what is wrong.

Whatever is shown is data: templates escape all of it, and what would be hidden or turn the direction is shown as its escape.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import ClassVar

from streamrl_cli.reporting.page import DRAW_JS, PLOTLY_JS, STYLE, asset, environment
from streamrl_pages.website import Asked, Asset

_LIVE_EVERY_S = 5


@cache
def assets() -> dict[str, Asset]:
    """Files under `/static/`."""
    own = files("streamrl_cli.ui") / "static"
    texts = {name: asset(name) for name in (PLOTLY_JS, DRAW_JS, STYLE)}
    texts |= {name: (own / name).read_text(encoding="utf-8") for name in ("ui.css", "ui.js", "sign_in.js")}
    kinds = {"js": "text/javascript", "css": "text/css"}
    return {name: Asset(text=text, media_type=kinds[name.rpartition(".")[2]]) for name, text in texts.items()}


class TemplatePages:
    """Pages of the templates here; who inherits it says which there are, and when one has changed."""

    home: ClassVar[str]
    """Title of the page `/`."""
    keys: ClassVar[str]
    """What keys do."""
    shown: dict[str, Callable[[Asked, str], str]]
    """Path -> what makes the page."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        """`clock`: seconds since the epoch."""
        self.clock = clock
        self._templates = environment("streamrl_cli.ui", layout="layout.html")
        texts = "".join(one.text for one in assets().values())
        version = hashlib.blake2b(texts.encode(), digest_size=8).hexdigest()
        self._templates.globals.update(version=version, home=self.home, keys=self.keys)

    def beat(self) -> str:
        """Changes as often as pages are made anew on which something grows each second."""
        return str(int(self.clock() / _LIVE_EVERY_S))

    def html(self, path: str, asked: Asked, *, state: str) -> str:
        """A page."""
        return self.shown[path](asked, state)

    def error(self, line: str, *, state: str) -> str:
        """A line that says what is wrong."""
        return self.page("error.html", title="Not to be shown", state=state, line=line)

    def sign_in(self) -> str:
        """Asks for the token."""
        return self._templates.get_template("sign_in.html").render()

    def page(self, template: str, **values: object) -> str:
        """A page of a template."""
        text = self._templates.get_template(template).render({"tabs": [], "tab": "", "figures": [], **values})
        return text.encode(errors="replace").decode()
