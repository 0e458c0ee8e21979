"""A model as lm-eval asks it: log-likelihoods of continuations and of whole texts, and generated texts."""

# lm-eval is an extra.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from rich.console import Console
from rich.progress import Progress

from nnx_gpt2 import GPT2
from owt_data import Tokenizer
from pretrain._judge.row_batches import Row
from pretrain._judge.scorer import Scorer

# As lm-eval's own model for transformers.
_MAX_NEW_TOKENS = 256
# The names under which a task gives the number of new tokens, the first one that it has.
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class LanguageModel(TemplateLM):
    """A model of nnx-gpt2 for lm-eval.

    Requests are truncated on the left, as those of lm-eval's model for transformers, and get the same scores.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        batch_size: windows of the model's context that are computed at once.
        console: shows the progress.
    """

    def __init__(self, model: GPT2, tokenizer: Tokenizer, *, batch_size: int, console: Console) -> None:
        super().__init__()
        self._tokenizer, self._console = tokenizer, console
        self._scorer = Scorer(model, batch_size=batch_size)
        self._context = model.config.seq_len
        self._end_of_text = tokenizer.decode([tokenizer.eot_token])
        self._vocab_size = min(tokenizer.n_vocab, model.config.vocab_size)

    @property
    def eot_token_id(self) -> int:
        """The token between documents. A text without a context follows it."""
        return self._tokenizer.eot_token

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer."""
        return self._tokenizer.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text. The text of end-of-text is this token, as in lm-eval's other models."""
        first, *others = map(self._encode, string.split(self._end_of_text))
        return [*first, *(token for part in others for token in (self.eot_token_id, *part))]

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer.name == "bytes":  # tiktoken takes a text for one long word
            return [*text.encode()]
        return self._tokenizer.encode_ordinary(text)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation after its context, and whether it is the greedy one."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        rows = [Row([*context, *continuation], len(continuation)) for _, context, continuation in requests]
        return [(score.log_likelihood, score.is_greedy) for score in self._scores(rows, "scoring answers")]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, in windows of the context that do not overlap."""
        windows = [
            [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.eot_token_id, max_seq_len=self._context, context_len=1
                )
            ]
            for request in requests
        ]
        rows = [Row([*context, *scored], len(scored)) for of_text in windows for context, scored in of_text]
        scores = iter(self._scores(rows, "scoring texts"))
        return [sum(next(scores).log_likelihood for _ in of_text) for of_text in windows]

    def _scores(self, rows: Sequence[Row], title: str) -> list[Any]:
        """Score rows. Those that are too long lose their beginning; at most a context of tokens is scored."""
        cut = [
            Row(row.tokens[-(self._context + 1) :], min(row.num_scored, len(row.tokens) - 1, self._context))
            for row in rows
        ]
        return self._with_progress(title, len(rows), lambda done: self._scorer.scores(cut, done))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of each context, up to the first of its stop texts."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            context_and_options: Any = request.args
            groups.setdefault(json.dumps(context_and_options[1], sort_keys=True), []).append(number)

        def work(done: Callable[[int], object]) -> dict[int, str]:
            texts: dict[int, str] = {}
            for options, numbers in groups.items():
                contexts = [requests[number].args[0] for number in numbers]
                texts.update(zip(numbers, self._continuations(contexts, json.loads(options), done), strict=True))
            return texts

        texts = self._with_progress("writing answers", len(requests), work)
        return [texts[number] for number in range(len(requests))]

    def _continuations(
        self, contexts: Sequence[str], given: dict[str, Any], done: Callable[[int], object]
    ) -> list[str]:
        max_new_tokens = int(next((given[name] for name in _LENGTHS if given.get(name) is not None), _MAX_NEW_TOKENS))
        until = given.get("until") or []
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        most = self._context - max_new_tokens  # the context and the new tokens fit the model
        most = most if most > 0 else max(1, self._context // 2)
        prompts = [(self.tok_encode(context) or [self.eot_token_id])[-most:] for context in contexts]
        temperature = float(given.get("temperature") or 0.0) if given.get("do_sample") is not False else 0.0
        texts = self._scorer.continue_texts(
            prompts,
            max_new_tokens,
            has_ended=lambda tokens: self.eot_token_id in tokens or any(stop in self._text(tokens) for stop in stops),
            rows_at_once=self._scorer.texts_at_once(len(prompts), max(map(len, prompts)) + max_new_tokens),
            done=done,
            key=jax.random.key(0),
            temperature=temperature,
            top_k=given.get("top_k") if temperature else None,
            top_p=given.get("top_p") if temperature else None,
            end_of_text=self.eot_token_id,
            vocab_size=self._vocab_size,
        )
        return [_before(self._text(tokens), stops) for tokens in texts]

    def _text(self, tokens: list[int]) -> str:
        end = tokens.index(self.eot_token_id) if self.eot_token_id in tokens else len(tokens)
        return self._tokenizer.decode(tokens[:end], errors="replace")

    def _with_progress(self, title: str, total: int, work: Callable[[Callable[[int], object]], Any]) -> Any:
        with Progress(console=self._console, disable=not self._console.is_terminal) as progress:
            task = progress.add_task(title, total=total)
            return work(lambda number: progress.advance(task, number))


def _before(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the first of the stops."""
    for stop in stops:
        text = text.split(stop, 1)[0]
    return text
