"""Values that are secret, long, deep or large: one short line that does not repeat them."""

import shlex

import pytest

from pretrain import main
from pretrain._errors import short

# What the sentence has for URIs with credentials in it, for each place of a URI.
SECRET = "s3://AKIA:topsecret@bucket/x"
CREDENTIALS = [
    (f"--storage-path {SECRET}", "storage_path must be without credentials, got 's3://***@bucket/x'. Set AWS_"),
    (f"--data {SECRET}", "data must be without credentials, got 's3://***@bucket/x'."),
    (f"--data train={SECRET},val=book.txt", "data must be without credentials, got 'train=s3://***@bucket/x,val=b"),
    (f"--prepare.cache-path {SECRET}", "prepare.cache_path must be without credentials, got 's3://***@bucket/x'."),
    (f"--config {SECRET}", "s3://***@bucket/x must be accessible, got No such file"),
    ("--config secret.toml", "storage_path must be without credentials, got 's3://***@bucket/x'."),
    ("--storage-path s3://bucket/x?secret_key=topsecret", "got 's3://bucket/x?secret_key=***'."),
    *(
        (f"{command} {SECRET}", "a storage path must be without cred")
        for command in ("sample", "eval", "watch", "runs", "report")
    ),
    (f"export {SECRET} out", "a storage path must be without credentials, got 's3://***@bucket/x'."),
    (f"export run {SECRET}", "a storage path must be without credentials, got 's3://***@bucket/x'."),
    (f"report run --out {SECRET}", "a storage path must be without credentials, got 's3://***@bucket/x'."),
    (f"eval run --data {SECRET}", "data must be without credentials, got 's3://***@bucket/x'."),
    (f"book.txt {SECRET}", "no command book.txt;"),
    (f"{SECRET}", "no command s3://***@bucket/x;"),
    (f"--seed 1 {SECRET}", "got s3://***@bucket/x without --NAME."),
    (f"--seed {SECRET}", "--seed must be an integer, got s3://***@bucket/x."),
    (f"--hardware {SECRET}", "got 's3://***@bucket/x'."),
]


@pytest.mark.parametrize(("line", "message"), CREDENTIALS)
def test_credentials_in_a_uri_are_rejected_and_not_repeated(line, message, place, rejected):
    (place / "secret.toml").write_text(f'storage_path = "{SECRET}"')
    err = rejected(shlex.split(line))
    assert message in err
    assert "topsecret" not in err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a" * 80, "a" * 80),
        ("a" * 59 + "b" * 22, f"{'a' * 59}\N{HORIZONTAL ELLIPSIS}{'b' * 20}"),
        ("a" * 500 + "b" * 500, f"{'a' * 59}\N{HORIZONTAL ELLIPSIS}{'b' * 20}"),
        ("", "''"),
        ("s3://A:topsecret@bucket/x", "s3://***@bucket/x"),
        (f"s3://A:{'s' * 70}@bucket/some/place/of/runs", "s3://***@bucket/some/place/of/runs"),
    ],
)
def test_a_long_value_is_shown_by_its_beginning_and_its_end(text: str, expected: str) -> None:
    assert short(text) == expected


# Options with a value that is long, or has line breaks.
BAD_VALUES = ("x" * 5000, "x y " * 2000, "a\nb\x1b[31m\rc\u2028d", "9" * 5000, f"{10**400}", "-" + "9" * 400)


@pytest.mark.parametrize(
    "line",
    [
        *(f"--{name} VALUE" for name in (
            "preset", "seed", "hardware", "data-mode", "train.max-steps", "train.max-epochs", "optimizer.learning-rate",
            "train.order", "trackers", "config", "name ../", "profile", "peak-tflops", "data a=1:", "mesh.fsdp",
            "wait-for-resources-s", "model.num-heads", "model.dtype", "prepare.val-fraction", "tokenizer",
        )),
        "--VALUE 1", "VALUE", "--seed 1 VALUE", "--data book.txt --storage-path VALUE --data nowhere.txt",
        "sample VALUE", "sample run --top-k VALUE", "sample run --seed VALUE", "sample run --temperature VALUE",
        "eval run --batch-size VALUE", "eval run --data VALUE", "export VALUE out", "report VALUE",
        "report run --out nowhere/VALUE", "runs VALUE", "watch VALUE",
    ],
)  # fmt: skip
def test_a_bad_value_gives_one_short_line(line, place, capsys):
    before = sorted(place.rglob("*"))
    for value in BAD_VALUES:
        code = main([word.replace("VALUE", value) for word in line.split(" ")])
        err = capsys.readouterr().err
        assert code == 2, err
        assert err.endswith("\n")
        assert err[:-1].isprintable(), err
        assert len(err) < 1400
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("levels", [2_000, 7_000])
@pytest.mark.parametrize(("name", "text"), [
    ("deep.toml", lambda levels: "a = " + "[" * levels + "]" * levels),
    ("deep.toml", lambda levels: "a" + ".a" * levels + " = 1"),
    ("deep.toml", lambda levels: "[a" + ".a" * levels + "]"),
    ("deep.json", lambda levels: '{"a":' * levels + "1" + "}" * levels),
    ("deep.json", lambda levels: '{"seed":' + "[" * levels + "]" * levels + "}"),
])  # fmt: skip
def test_a_configuration_that_is_nested_deeply_is_rejected(name, text, levels, place, rejected):
    (place / name).write_text(text(levels))
    assert f"{name} must be " in rejected(["--config", name])


@pytest.mark.parametrize("name", ["seed", "train.max_steps", "optimizer.learning_rate", "train.max_epochs", "prompts"])
@pytest.mark.parametrize("value", ["1" + "0" * 400, "-1" + "0" * 400, "1" + "0" * 20, "0x" + "f" * 4000, "[[1]]"])
def test_a_number_that_is_too_large_is_rejected_in_a_file(name, value, place, rejected):
    section, _, last = name.rpartition(".")
    (place / "large.toml").write_text((f"[{section}]\n" if section else "") + f"{last} = {value}\n")
    assert f"{name} in large.toml must be " in rejected(["--config", "large.toml"])
