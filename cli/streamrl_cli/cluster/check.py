"""What a valid job would stumble over on a cluster, as far as the job file and what lies beside it tell."""

from pathlib import Path

from streamrl.errors import UserError
from streamrl.spec import RLJob
from streamrl_cli.cluster.bundle import bundle_problems
from streamrl_cli.local import job_problems


def cluster_problems(job: RLJob, *, base_dir: Path) -> list[UserError]:
    """As `streamrl validate`, without this machine's packages, models and processes; with what has to fit into a ConfigMap."""
    return [*job_problems(job, base_dir=base_dir), *bundle_problems(job, base_dir=base_dir)]
