"""The tokens of a run: opens token files, and prepares text first."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from owt_data import (
    DataError,
    GrowingTokens,
    PrepareOptions,
    Progress,
    TokenData,
    find_source,
    is_prepared,
    open_tokens,
    prepare,
    prepare_in_background,
    progress_bar,
    read_manifest,
    same_tokenizer,
    source_digest,
)
from pretrain._config import PrepareConfig, PretrainConfig
from pretrain._data_names import Mixture, Plain, Splits, label_of, labels_of, names_of, parse_data, token_files
from pretrain._errors import UsageError
from pretrain._screen.printing import print_line
from pretrain._surroundings.private_cache import private_cache
from ray_jax_launch import as_storage_path


def cache_folder() -> Path:
    """Return the folder of prepared tokens: `owt-data` in the user's cache, which is `~/.cache` on Linux."""
    return private_cache("owt-data")


def load_tokens(config: PretrainConfig, console: Console) -> TokenData:
    """Open the tokens of a run. Text is prepared into the cache, once for the same content and options.

    Raises:
        DataError: the data cannot be read, or either split is shorter than one window.
        UsageError: `config.data` has no valid form, or names text for one split and token files for the other.
    """
    data, tokenizer = parse_data(config.data), config.prepare.tokenizer
    match data:
        case Plain(name):
            tokens = open_tokens(prepared_name(name, config.prepare, console), tokenizer=tokenizer)
        case Splits(train, val):
            names = [f"train={train}", f"val={val}"]
            are_prepared = {is_prepared(train), is_prepared(val)}
            if len(are_prepared) > 1:
                raise UsageError(f"data must be text or token files for both splits, got {config.data}. Give one kind.")
            tokens = open_tokens(
                names if True in are_prepared else _prepare(names, data, config.prepare, console), tokenizer=tokenizer
            )
        case Mixture():
            weights = data.of_windows(config.train.global_batch_size)
            tokens = open_tokens(
                {prepared_name(name, config.prepare, console): weight for name, weight in weights.items()},
                tokenizer=tokenizer,
            )
    if not same_tokenizer(tokens.tokenizer, tokenizer):
        print_line(
            console, f"{config.data} has tokens of {tokens.tokenizer}; prepare.tokenizer, {tokenizer}, is not used"
        )
    return _check_windows(config, tokens)


def open_prepared(config: PretrainConfig) -> TokenData | None:
    """Open the tokens of a run if all its data is token files, else return None.

    Raises:
        DataError: the tokens cannot be read.
    """
    data = parse_data(config.data)
    are_prepared = all(map(is_prepared, names_of(data)))
    if not are_prepared:
        return None
    return open_tokens(token_files(data, config.train.global_batch_size), tokenizer=config.prepare.tokenizer)


def find_texts(config: PretrainConfig) -> None:
    """Check that the text of a run exists. Names of hub datasets are not looked up.

    Raises:
        DataError: a text does not exist.
    """
    for name in names_of(parse_data(config.data)):
        if not is_prepared(name):
            find_source(name)


class TextStream(NamedTuple):
    """Text that is tokenized while the run trains."""

    sources: list[str]
    """Names of the text, for `prepare_in_background`."""

    folder: Path
    """The folder of the tokens."""

    options: PrepareOptions
    """Tokenizer, documents and split."""

    sha256: str
    """Digest of the text."""


def find_stream(config: PretrainConfig) -> TextStream:
    """Find the text of a run that is tokenized while the run trains.

    Raises:
        DataError: the text does not exist or cannot be read.
        UsageError: `config.data` is not text, or is a mixture.
    """
    match data := parse_data(config.data):
        case Plain(name) if not is_prepared(name):
            sources = [name]
        case Splits(train, val) if not (is_prepared(train) or is_prepared(val)):
            sources = [f"train={train}", f"val={val}"]
        case _:
            raise UsageError(
                f"data must be text, as NAME or train=NAME,val=NAME, with data_mode stream, got {config.data}. Leave "
                "out --data-mode for token files and mixtures."
            )
    options = config.prepare.options()
    if isinstance(data, Plain) and options.split == "auto":
        options = dataclasses.replace(options, split="start")
    sha256 = source_digest(sources)
    folder = _cache_root(config.prepare) / _cache_key(label_of(data), sha256, options)
    return TextStream(sources=sources, folder=folder, options=options, sha256=sha256)


@contextlib.contextmanager
def stream_tokens(
    stream: TextStream,
    config: PretrainConfig,
    console: Console,
    *,
    num_tasks: int | None,
    report: Callable[[Progress], None],
) -> Iterator[TokenData]:
    """Open the tokens of a run as soon as the first tokens exist. Text is tokenized during the block.

    Args:
        stream: the text.
        config: the configuration.
        console: shows the folder.
        num_tasks: number of concurrent tasks of the connected Ray cluster; None tokenizes in processes of this machine.
        report: called after each shard.

    Raises:
        DataError: the text cannot be read, or the validation tokens are fewer than one window.
    """
    names = " ".join(stream.sources)
    if _is_on_hub(parse_data(config.data)):
        print_line(console, f"looking for {names} on the Hugging Face hub")
    with prepare_in_background(
        stream.sources,
        stream.folder,
        stream.options,
        num_processes=num_tasks or config.prepare.num_processes,
        use_ray=num_tasks is not None,
        progress=report,
    ) as tokens:
        print_line(
            console,
            f"tokenizing {names} into {stream.folder} during the training, whose first epoch has the order of the text",
        )
        yield _check_windows(config, tokens)


def validation_sources(text: str, data: TokenData) -> list[tuple[str, int]]:
    """Return the label and the number of validation tokens of each name of a mixture; none for other data.

    Args:
        text: the names, in a form of `parse_data`.
        data: their tokens.
    """
    labels = labels_of(text)
    return [*zip(labels, data.val_lengths, strict=bool(labels))]


def _check_windows(config: PretrainConfig, tokens: TokenData) -> TokenData:
    """Check that both splits have a window. Training tokens that are being prepared are not checked."""
    has_fraction = config.data_mode == "prepared" and not isinstance(parse_data(config.data), Splits)
    more = "more text, a larger --prepare.val-fraction" if has_fraction else "more text"
    for name, part, remedy in (("training", tokens.train, "more text"), ("validation", tokens.val, more)):
        if isinstance(part, GrowingTokens) and name == "training":
            continue
        if part.num_windows(config.model.seq_len) == 0:
            raise DataError(
                f"{config.data} must have at least {config.model.seq_len + 1} {name} tokens, one window of "
                f"model.seq_len inputs and a target, got {len(part)}. Give {remedy} or a shorter --model.seq-len."
            )
    return tokens


def prepared_name(name: str, options: PrepareConfig, console: Console) -> str:
    """Return the name of token files: the name itself, or the folder into which its text is prepared."""
    return name if is_prepared(name) else _prepare([name], Plain(name), options, console)


def _prepare(sources: Sequence[str], data: Plain | Splits, config: PrepareConfig, console: Console) -> str:
    """Prepare text into the cache, unless the cache has it, and return the folder."""
    options = config.options()
    folder = _cache_root(config) / _cache_key(label_of(data), source_digest(sources), options)
    if read_manifest(folder) is None:
        announcement = f"preparing {' '.join(sources)} into {folder}"
        shown: list[str] = []

        def report(progress: Progress) -> None:
            if not shown:  # the source has been found
                print_line(console, announcement)
                shown.append(announcement)
            show(progress)

        if _is_on_hub(data):
            print_line(console, f"looking for {' '.join(sources)} on the Hugging Face hub")
        with progress_bar(console) as show:
            prepare(
                sources,
                folder,
                options,
                num_processes=config.num_processes,
                use_ray=config.on_cluster,
                progress=report,
            )
    return str(folder)


def _is_on_hub(data: Plain | Splits | Mixture) -> bool:
    """Return whether a name of text is that of a hub dataset. The hub may not have the dataset."""
    return any(find_source(name).kind == "hub" for name in names_of(data))


def _cache_root(config: PrepareConfig) -> Path:
    """Return the folder of all prepared tokens."""
    root = cache_folder() if config.cache_path is None else as_storage_path(config.cache_path)
    if not isinstance(root, Path):
        raise UsageError(f"prepare.cache_path must be a folder that all nodes share, got {root}. Mount it, or copy it.")
    return root


def _cache_key(label: str, sha256: str, options: PrepareOptions) -> str:
    contents = sha256 + json.dumps(options.record(), sort_keys=True)
    return f"{label}-{options.record()['tokenizer']}-{hashlib.sha256(contents.encode()).hexdigest()[:16]}"
