"""The command `export`: a trained model for other programs."""

from pathlib import Path

from owt_data import load_tokenizer
from pretrain._errors import UsageError
from pretrain._trained import load_trained


def export(run: str, out: Path) -> int:
    """Write a run's newest checkpoint in Hugging Face's layout.

    Args:
        run: the run's folder or name.
        out: a folder that does not exist, or is empty.

    Returns:
        The step of the checkpoint.

    Raises:
        UsageError: there is no such run, it has no checkpoint, or `out` has something in it already.
    """
    out = out.expanduser()
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"expected a new or empty folder to write the model to, got {out}: name another")
        trained = load_trained(run)
        end_of_text = load_tokenizer(trained.description["data"]["tokenizer"]).eot_token
        trained.model.save_pretrained(out, end_of_text=end_of_text)
    except OSError as error:
        raise UsageError(f"expected a folder that can be written, got {out}: {error.strerror}") from error
    return trained.step
