"""Files that users write: their text, and the place of a mistake in them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from streamrl.errors import UserError
from streamrl_cli.overrides import FLAG


def read_text(path: Path, *, most_bytes: int, fix: str = "") -> str:
    """A file's text.

    Args:
        path: a file in UTF-8.
        most_bytes: what is larger is refused, and not read.
        fix: what to do then.

    Raises:
        UserError: it cannot be read, is too large, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise UserError(field=str(path), rule=f"cannot be read: {error.strerror}", fix="check the path") from None
    if len(data) > most_bytes:
        raise UserError(field=str(path), rule=f"must be at most {most_bytes} bytes", fix=fix)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(field=f"{path}:{line}", rule="must be UTF-8", fix="save it as UTF-8") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where each field of a document was written."""

    path: Path
    lines: Mapping[str, int]
    overridden: Sequence[str] = ()
    """Fields that the command line gave."""

    def located(self, errors: Iterable[UserError]) -> list[UserError]:
        """`errors` by their lines, each with its place before the field."""
        return [self._moved(error) for error in sorted(errors, key=lambda error: self._line(error.field))]

    def _moved(self, error: UserError) -> UserError:
        given = any(error.field == path or error.field.startswith((f"{path}.", f"{path}[")) for path in self.overridden)
        place = FLAG if given else f"{self.path}:{self._line(error.field)}:"
        return UserError(field=f"{place} {error.field}", rule=error.rule, got=error.got, fix=error.fix)

    def _line(self, field: str) -> int:
        """Line of the field, or of the nearest section around it."""
        while field not in self.lines and field:
            field = field[: max(field.rfind("."), field.rfind("["), 0)]
        return self.lines.get(field, 1)
