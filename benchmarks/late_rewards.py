"""How many utterances it takes to win a game that pays at its end alone: ArCHer beside GRPO.

    python benchmarks/late_rewards.py [--seeds 0 1 2 3 4] [--steps 100] [--only grpo archer]

The job of `examples/guess-number.yaml` in one process: its game, model, trainer engine and sampling, each step on the newest weights.
Success is the mean reward of 400 sampled games, every five steps; they are not counted. Prints, for each seed, the utterances and the
games that a variant had drawn when its success was 80 % for the first time, and success at the end; then medians.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from run_folders import ROOT

from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJobSpec
from streamrl_cli.jobfile import load_job
from streamrl_workers.models.load import load_model, load_tokenizer
from streamrl_workers.models.prepare import prepare
from streamrl_workers.stream.packing import pack_float32, pack_int32, unpack_int32
from streamrl_workers.trainer.algorithms import create_algorithm
from streamrl_workers.trainer.engines.process_group import SingleRank
from streamrl_workers.trainer.engines.torch_engine import TorchEngine, build_models
from streamrl_workers.trainer.engines.worker import RankWorker

sys.path.insert(0, str(ROOT / "examples"))
from guess_number import HIGHEST, Game

CACHE = Path.home() / ".cache" / "streamrl" / "models"
JOB = ROOT / "examples" / "guess-number.yaml"
PROMPT = f"guess 0-{HIGHEST}\n"
GAMES, EVERY, ENOUGH = 400, 5, 0.8

VARIANTS: Mapping[str, str] = {
    "grpo": "{grpo: {}}",
    "archer": "{archer: {critic: {learningRate: 1.0e-3, warmUpSteps: 5}}}",
    "archer, resample": "{archer: {critic: {learningRate: 1.0e-3, warmUpSteps: 5}, resample: {sharePercent: 50}}}",
}


@dataclass(slots=True)
class Played:
    """One game."""

    game: Game
    tokens: list[int]  # the prompt's too
    segments: list[pb.Segment] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False


class Sampler:
    """Draws with a model that is being trained; a token is a character."""

    def __init__(self, model: torch.nn.Module, *, folder: str, spec: RLJobSpec) -> None:
        self._model = model
        self._tokenizer = load_tokenizer(folder)
        assert spec.task.environment is not None
        self._max_tokens, self._turns = spec.task.sampling.max_tokens, spec.task.environment.max_turns
        self._ends = {self._tokenizer.eos_token_id, *self._ids("\n")}
        self.utterances = self.games = 0

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def play(self, games: Sequence[Game]) -> list[Played]:
        """To their ends."""
        played = [Played(game=game, tokens=self._ids(PROMPT)) for game in games]
        for _ in range(self._turns):
            going = [one for one in played if not one.done]
            for one, (tokens, logprobs) in zip(going, self.say([one.tokens for one in going]), strict=True):
                text = self._tokenizer.decode(tokens, skip_special_tokens=True)
                observation, reward, one.done = one.game.step(text)
                read = [] if one.done else self._ids(observation)
                one.segments.append(pb.Segment(tokens=len(tokens), reward=reward))
                one.segments += [pb.Segment(tokens=len(read), observation=True)] * bool(read)
                one.tokens += [*tokens, *read]
                one.logprobs += [*logprobs, *[0.0] * len(read)]
                one.reward += reward
        self.games += len(played)
        return played

    @torch.no_grad()
    def say(self, texts: Sequence[Sequence[int]]) -> list[tuple[list[int], list[float]]]:
        """One utterance behind each: tokens and log-probs."""
        said: list[tuple[list[int], list[float]]] = [([], []) for _ in texts]
        going = list(range(len(texts)))
        for _ in range(self._max_tokens):
            rows = [[*texts[place], *said[place][0]] for place in going]
            if not rows:
                break
            longest = max(map(len, rows))
            inputs_BL = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
            logits_BLV = self._model(input_ids=inputs_BL).logits
            last_BV = logits_BLV[torch.arange(len(rows)), torch.tensor([len(row) - 1 for row in rows])]
            logprobs_BV = torch.log_softmax(last_BV.float(), -1)
            drawn_B = torch.multinomial(logprobs_BV.exp(), 1)
            taken_B = logprobs_BV.gather(1, drawn_B)
            for place, token, logprob in zip(going, drawn_B[:, 0].tolist(), taken_B[:, 0].tolist(), strict=True):
                said[place][0].append(token)
                said[place][1].append(logprob)
            going = [place for place in going if said[place][0][-1] not in self._ends]
        self.utterances += len(texts)
        return said

    def sample(self, one: Played, *, group_id: int, index: int, step: int) -> pb.Sample:
        """As the trainer takes it."""
        prompt = len(self._ids(PROMPT))
        tokens = one.tokens[prompt:]
        return pb.Sample(
            group_id=group_id,
            sample_index=index,
            prompt_tokens=pack_int32(one.tokens[:prompt]),
            tokens=pack_int32(tokens),
            logprobs=pack_float32(one.logprobs),
            spans=[pb.VersionSpan(tokens=len(tokens), step=step, attempt=1)],
            generator_id="generator-local-0",
            segments=one.segments,
            reward=one.reward,
        )

    def resample(self, state: pb.TurnState, *, group_id: int, size: int, step: int) -> pb.Group:
        """Turns drawn anew where a sample's turn began."""
        before = [*self._ids(PROMPT), *unpack_int32(state.tokens)]
        samples = [
            pb.Sample(
                group_id=group_id,
                sample_index=index,
                prompt_tokens=pack_int32(before),
                tokens=pack_int32(tokens),
                logprobs=pack_float32(logprobs),
                spans=[pb.VersionSpan(tokens=len(tokens), step=step, attempt=1)],
                generator_id="generator-local-0",
                resampled=True,
            )
            for index, (tokens, logprobs) in enumerate(self.say([before] * size))
        ]
        return pb.Group(group_id=group_id, step=step, samples=samples)


class Reached(NamedTuple):
    """What a run had drawn when it won often enough; None: it never did."""

    utterances: int | None
    games: int | None
    success: float  # at the end


def run(spec: RLJobSpec, *, folder: str) -> Reached:
    """Train, until it wins often enough and beyond."""
    torch.manual_seed(spec.seed)
    models = build_models(spec, model_path=folder, device=torch.device("cpu"))
    engine = TorchEngine(SingleRank(RankWorker(models, spec=spec)), spec=spec, algorithm=create_algorithm(spec))
    actor = load_model(folder).eval()
    sampler, judge = (Sampler(actor, folder=folder, spec=spec) for _ in range(2))
    size, batch = spec.task.group_size, spec.pipeline.batch_groups
    success = 0.0
    hidden = torch.Generator().manual_seed(spec.seed)
    for step in range(spec.pipeline.steps + 1):
        actor.load_state_dict(models.model.state_dict())
        if step % EVERY == 0:
            won = judge.play([Game(number % (HIGHEST + 1)) for number in range(GAMES)])
            success = statistics.fmean(one.reward for one in won)
            print(f"# {step}: {success:.3f} after {sampler.utterances} utterances", file=sys.stderr, flush=True)
            if success >= ENOUGH:
                return Reached(sampler.utterances, sampler.games, success)
        states = engine.states()
        secrets = torch.randint(0, HIGHEST + 1, (batch - len(states),), generator=hidden).tolist()
        played = sampler.play([Game(secret) for secret in secrets for _ in range(size)])
        engine.begin_step(step, attempt=1)
        for number in range(len(secrets)):
            group_id = step * batch + number
            mine = enumerate(played[number * size : (number + 1) * size])
            samples = [sampler.sample(one, group_id=group_id, index=index, step=step) for index, one in mine]
            engine.add([pb.Group(group_id=group_id, step=step, samples=samples)])
        for number, state in enumerate(states, start=step * batch + len(secrets)):
            engine.add([sampler.resample(state, group_id=number, size=size, step=step)])
        engine.finish_step()
    return Reached(None, None, success)


def main() -> None:
    """Run them, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--groups", type=int, default=8, help="a step")
    parser.add_argument("--only", nargs="+", default=list(VARIANTS))
    parser.add_argument("--set", nargs="+", default=[], help="more changes of the job")
    parser.add_argument("--algorithm", help="this one instead, as in `spec.algorithm`")
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = {args.algorithm: args.algorithm} if args.algorithm else {name: VARIANTS[name] for name in args.only}
    found: dict[str, list[Reached]] = {name: [] for name in chosen}
    print("| seed | | utterances to 80 % | games | success at the end |\n|---|---|---|---|---|")
    for seed in args.seeds:
        for name, algorithm in chosen.items():
            changes = [
                f"spec.seed={seed}",
                f"spec.algorithm={algorithm}",
                f"spec.pipeline.steps={args.steps}",
                f"spec.pipeline.batchGroups={args.groups}",
                *args.set,
            ]
            spec = load_job(JOB, overrides=changes).spec
            folder = str(prepare(spec, cache_dir=CACHE, base_dir=JOB.parent, report=lambda _: None))
            found[name].append(one := run(spec, folder=folder))
            print(f"| {seed} | {name} | {one.utterances} | {one.games} | {one.success:.3f} |", flush=True)
    for name, runs in found.items():
        won = [one.utterances for one in runs if one.utterances is not None]
        median = f"{statistics.median(won):,.0f} utterances" if won else "never"
        print(f"{name}: {len(won)} of {len(runs)} seeds, median {median}")


if __name__ == "__main__":
    main()
