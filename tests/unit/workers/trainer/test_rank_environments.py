"""What each rank of a node is told by its launcher, beside torchrun's own variables (`tests/integration/test_pods_launch.py`)."""

import pytest

from streamrl import keys, names
from streamrl_operator.planning.objects.containers import rank_ports, rank_weights_ports, trainer_variables
from streamrl_workers.trainer.launch import rank_environments
from support.jobs import parsed_job, with_ranks


@pytest.mark.parametrize("ranks", [2, 8])
def test_each_rank_serves_the_port_that_its_container_names(ranks: int) -> None:
    job = with_ranks(parsed_job(), ranks)
    environ = {key: value for key, value in trainer_variables(job, uid="u").items() if isinstance(value, str)}
    envs = rank_environments(job.spec.trainer, environ=environ)
    told = [[int(env[key]) for env in envs] for key in (keys.ENV_SIGNALS_PORT, keys.ENV_WEIGHTS_PORT)]
    assert told[0] == [names.PORT_TRAINER_SIGNALS, *rank_ports(job).values()]
    assert told[1] == [names.PORT_WEIGHTS, *rank_weights_ports(job).values()]
    assert len({*told[0], *told[1], names.PORT_GRPC, names.PORT_RANKS, names.PORT_SIGNALS}) == 2 * ranks + 3


def test_without_a_port_each_rank_takes_any() -> None:
    found = rank_environments(with_ranks(parsed_job(), 3).spec.trainer, environ={})
    for key in (keys.ENV_SIGNALS_PORT, keys.ENV_WEIGHTS_PORT):
        assert [env.get(key, "0") for env in found] == ["0", "0", "0"]
