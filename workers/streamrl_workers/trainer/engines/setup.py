"""What an engine is built from. Imports no torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.spec import RLJobSpec
from streamrl_workers.trainer.engines.engine import RankEnvironment

if TYPE_CHECKING:
    from streamrl_workers.trainer.engines.process_group import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """What an engine is built from."""

    spec: RLJobSpec
    model_path: str | None  # directory or hub name; the simulated engine needs none
    base_dir: Path = Path()  # where relative paths of the job begin
    plugin_dir: Path | None = None  # where plug-ins lie; None: installed ones alone
    threads: int | None  # of torch; None = torch's choice
    run_dir: Path | None = None  # where a rank keeps what its next process must know; None: nowhere
    env: RankEnvironment = field(default_factory=RankEnvironment)
    ranks: "ProcessGroup | None" = None  # all ranks, as rank 0 reaches them; None: there is one, or this is another
