"""The data set's own answers as samples: prompt and answer of an item as tokens, as an engine would have made them.

Of jobs with algorithm `supervised`. Owns what a completion is: the answer's tokens and the end token, cut behind `maxTokens`; and what
cannot be trained: an empty answer, text that the tokenizer does not know, more tokens than the model has positions for. Every error
says where the item stands. No torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.errors import UserError
from streamrl.files import read_json
from streamrl.spec.algorithm import SupervisedSpec
from streamrl.spec.task import Task
from streamrl_workers.rewards.base import Item
from streamrl_workers.stream.packing import pack_int32
from streamrl_workers.tasks.chat import load_fast_tokenizer
from streamrl_workers.tasks.dataset import SUPERVISED_FIELD, TaskDataset, reward_of
from streamrl_workers.tasks.values import Demonstration

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DATASET_FIELD = "spec.task.dataset"


class Demonstrations:
    """Makes them; pure."""

    def __init__(
        self,
        dataset: TaskDataset,
        *,
        task: Task,
        spec: SupervisedSpec,
        tokenizer: "PreTrainedTokenizerFast",
        positions: int | None,
    ) -> None:
        """`positions`: of the model, prompt and completion together; None: any number."""
        self._dataset = dataset
        self._spec = spec
        self._tokenizer = tokenizer
        self._positions = positions
        self._max_tokens = task.sampling.max_tokens
        self._special = task.chat is None  # a chat template has put them in
        if tokenizer.eos_token_id is None:
            rule = "needs a tokenizer with an end token: where an answer ends is learned too"
            raise UserError(field=SUPERVISED_FIELD, rule=rule)

    def of(self, item: Item) -> Demonstration:
        """The item's. Raises `UserError` if it cannot be trained."""
        place = self._dataset.place(item.source_index)
        if not item.target:
            fix = "leave it out, name answerField, or give spec.task.format a function that returns a target"
            raise UserError(field=DATASET_FIELD, rule=f"{place} has no answer to imitate", fix=fix)
        prompt = self._tokens(item.prompt, special=self._special, place=place)
        answer = self._tokens(item.target, special=False, place=place)
        tokens = [*answer, self._tokenizer.eos_token_id][: self._max_tokens]
        if not prompt:
            raise UserError(field=DATASET_FIELD, rule=f"{place}: the prompt has no tokens", got=item.prompt)
        if self._positions is not None and len(prompt) + len(tokens) > self._positions:
            rule = f"{place}: prompt and answer must have at most {self._positions} tokens, the model's positions"
            fix = "leave it out or lower spec.task.sampling.maxTokens"
            raise UserError(field=DATASET_FIELD, rule=rule, got=f"{len(prompt)} + {len(tokens)}", fix=fix)
        return Demonstration(
            text=item.target,
            prompt_tokens=pack_int32(prompt),
            tokens=pack_int32(tokens),
            truncated=len(answer) >= self._max_tokens,
            reward=reward_of(item, field=self._spec.reward_field, place=self._dataset.place),
        )

    def check(self) -> None:
        """Make each once, if their number is finite. Raises `UserError` as `of`."""
        for index in range(self._dataset.train_size or 0):
            self.of(self._dataset.item("train", index))
        for index in range(self._dataset.held_out_size or 0):
            self.of(self._dataset.item("held_out", index))

    def _tokens(self, text: str, *, special: bool, place: str) -> Sequence[int]:
        try:
            tokens: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        except Exception as error:  # the tokenizers' Rust raises a bare one, as for a character that it does not know
            raise UserError(field=DATASET_FIELD, rule=f"{place} cannot be tokenized: {error}", got=text) from error
        return tokens


def open_demonstrations(dataset: TaskDataset, *, task: Task, spec: SupervisedSpec, model_path: str) -> Demonstrations:
    """Of the model in the directory. Raises `UserError` if it has no tokenizer for this."""
    tokenizer = load_fast_tokenizer(model_path, field=SUPERVISED_FIELD)
    config = read_json(Path(model_path) / "config.json")
    return Demonstrations(dataset, task=task, spec=spec, tokenizer=tokenizer, positions=_positions(config))


def _positions(config: Any) -> int | None:  # noqa: ANN401 - JSON
    """What the model's configuration says, of its text part where it has several."""
    for part in (config, config.get("text_config")) if isinstance(config, dict) else ():
        found = part.get("max_position_embeddings") if isinstance(part, dict) else None
        if isinstance(found, int):
            return found
    return None
