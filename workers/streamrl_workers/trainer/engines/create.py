"""Builds the torch engine of rank 0, and the worker of every other rank."""

import torch

from streamrl.errors import UserError
from streamrl.keys import ENV_MODEL_PATH
from streamrl_workers.trainer.algorithms import create_algorithm
from streamrl_workers.trainer.engines import EngineSetup
from streamrl_workers.trainer.engines.build import Where, build_worker
from streamrl_workers.trainer.engines.data_group import START_S, device_of, join_group, open_store, reach_store
from streamrl_workers.trainer.engines.linked_ranks import LinkedRanks
from streamrl_workers.trainer.engines.place import ALONE
from streamrl_workers.trainer.engines.ranks import OneRank, Payload, Ranks
from streamrl_workers.trainer.engines.torch_engine import TorchEngine
from streamrl_workers.trainer.engines.worker import RankWorker

_STORE_PORT = "store_port"


def create(setup: EngineSetup) -> TorchEngine:
    """The engine with the initial weights; with several ranks, once all of them have theirs."""
    _prepare_torch(setup)
    ranks = _one_rank(setup) if setup.ranks is None else _several_ranks(setup, setup.ranks)
    return TorchEngine(ranks, spec=setup.spec, algorithm=create_algorithm(setup.spec))


def create_follower(setup: EngineSetup, facts: Payload) -> RankWorker:
    """The worker of a rank above 0; `facts` are rank 0's."""
    _prepare_torch(setup)
    timeout_s = setup.spec.trainer.rank_timeout_seconds
    device = device_of(setup.place)
    store = reach_store(setup.place, port=facts[_STORE_PORT])
    mesh = join_group(setup.place, store=store, timeout_s=timeout_s, device=device)
    return build_worker(setup.spec, model_path=_model_path(setup), where=Where(device=device, mesh=mesh))


def _one_rank(setup: EngineSetup) -> Ranks:
    where = Where(device=device_of(ALONE))
    return OneRank(build_worker(setup.spec, model_path=_model_path(setup), where=where))


def _several_ranks(setup: EngineSetup, ranks: LinkedRanks) -> Ranks:
    device = device_of(setup.place)
    store, port = open_store(setup.place)

    def build() -> RankWorker:
        timeout_s = setup.spec.trainer.rank_timeout_seconds
        mesh = join_group(setup.place, store=store, timeout_s=timeout_s, device=device, check=ranks.check_start)
        return build_worker(setup.spec, model_path=_model_path(setup), where=Where(device=device, mesh=mesh))

    ranks.build(build, facts={_STORE_PORT: port}, timeout_s=START_S)
    return ranks


def _model_path(setup: EngineSetup) -> str:
    if setup.model_path is None:
        raise UserError(field=ENV_MODEL_PATH, rule="is required by trainer engine torch")
    return setup.model_path


def _prepare_torch(setup: EngineSetup) -> None:
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
