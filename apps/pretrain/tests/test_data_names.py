import re

import pytest

from pretrain._data_names import Mixture, Plain, Splits, label_of, parse_data, token_files
from pretrain._errors import UsageError

WIKITEXT = "Salesforce/wikitext:wikitext-103-raw-v1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("builtin", Plain("builtin")),
        ("./a=b.txt", Plain("./a=b.txt")),
        ("s3://bucket/x?region=a,b=c", Plain("s3://bucket/x?region=a,b=c")),
        ("train=a.txt,val=b.txt", Splits("a.txt", "b.txt")),
        ("val=b.txt,train=a.txt", Splits("a.txt", "b.txt")),
        ("train=a,b.txt,val=s3://x?y=z", Splits("a,b.txt", "s3://x?y=z")),
        (f"train={WIKITEXT}:train,val={WIKITEXT}:test", Splits(f"{WIKITEXT}:train", f"{WIKITEXT}:test")),
        ("web=0.7:a.txt,code=3e-1:b.bin", Mixture(("web", "code"), {"a.txt": 0.7, "b.bin": 0.3})),
        ("web=7:A/B:c:train,b=1:d", Mixture(("web", "b"), {"A/B:c:train": 7.0, "d": 1.0})),
        (
            "web=0.7>0.3@5000:A,code=0>1e0@500>.5@7000:B>C@1:d",
            Mixture(("web", "code"), {"A": [(0, 0.7), (5000, 0.3)], "B>C@1:d": [(0, 0), (500, 1), (7000, 0.5)]}),
        ),
    ],
)
def test_forms(text, expected):
    assert parse_data(text) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (",", "',' has no label"),
        ("a.txt,b.txt", "'a.txt,b.txt' has no label"),
        ("train=a.txt", "val has no name"),
        ("train=,val=b.txt", "train has no name"),
        ("train=a.txt,val=b.txt,test=c.txt", "train must be WEIGHT:NAME, with a number and a colon"),
        ("train=a.txt,train=b.txt", "a label occurs twice"),
        ("web=a.txt,code=b.txt", "web must be WEIGHT:NAME, with a number and a colon"),
        ("web=0:a.txt,code=1:b.txt", "the weight of web must be a number above 0"),
        ("web=1:a.txt,code=-1:b.txt", "the weight of code must be a number above 0"),
        ("web=nan:a.txt,code=1:b.txt", "the weight of web must be a number above 0"),
        ("web=inf:a.txt,code=1:b.txt", "the weight of web must be a number above 0"),
        ("web=x:a.txt,code=1:b.txt", "the weight of web must be a number above 0"),
        ("web=0.7", "web must be WEIGHT:NAME, with a number and a colon; a value with > needs quotes"),
        *(
            (f"web={weight}:a.txt,code=1:b.txt", "the weight of web must be numbers at ascending steps, as in 0.7>0.3")
            for weight in (
                "1>2",
                "1>2@",
                "1>@5",
                "1>2@5>3@5",
                "1>2@9>3@5",
                "1>2@0",
                "1>-2@5",
                ">1@5",
                "1>2@5.0",
            )
        ),
        *(
            (f"web={weight}:a.txt,code=1:b.txt", "the weight of web must be numbers at ascending steps, as in 0.7>0.3")
            for weight in ("1>inf@5", "1>2@2147483648", "1>2@9999999999999", "1@5>2@9", "1>2@\u0661")
        ),
        ("web=0>0@5:a.txt,code=1:b.txt", "the weight of web must be above 0 at some step, and finite"),
        ("web=1>1e999@5:a.txt,code=1:b.txt", "the weight of web must be above 0 at some step, and finite"),
        ("web=1>0@5:a.txt,code=0>1@6:b.txt", "all weights are 0 after 5 steps"),
        ("web=1>0@5>1@9:a.txt,code=1>0@5>0@8:b.txt", "all weights are 0 after 5 steps"),
        ("web=0>1@5:a.txt,code=0>1@5:b.txt", "all weights are 0 after 0 steps"),
        ("web=0.5:,code=1:b.txt", "web must be WEIGHT:NAME, with a number and a colon"),
        ("web=0.5:a.txt", "a mixture has several names"),
        ("web=0.5:a.txt,code=0.5:a.txt", "a name occurs twice"),
        ("web=0.5:a.txt,web=0.5:b.txt", "a label occurs twice"),
    ],
)
def test_the_error_in_another_form_is_named(text, problem):
    message = f"web=0.7:NAME,code=0.3:NAME, got {text!r}: {problem}"
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_data(text)


def test_steps_become_windows():
    data = parse_data("web=0.7>0.3@5000:A,code=2:B")
    assert token_files(data, 6) == {"A": [(0, 0.7), (30_000, 0.3)], "B": 2}


@pytest.mark.parametrize("name", ["train=a,val=b", "a=1:b,c"])
def test_the_name_of_a_file_is_a_plain_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).touch()
    found = parse_data(name)
    assert isinstance(found, Plain)
    assert (tmp_path / found.name).samefile(name)


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("/books/War and Peace.txt", "war-and-peace"),
        ("s3://bucket/x", "x"),
        ("???", "data"),
        (f"/books/{'long ' * 48}.txt", "-".join(["long"] * 20)),  # the name of a folder would be too long
        (f"train={WIKITEXT}:train,val={WIKITEXT}:validation", "wikitext-103-raw-v1"),
        ("train=/corpora/books/train.txt,val=/corpora/books/val.txt", "books"),
        ("train=web-train.bin,val=web-val.bin", "web"),
        ("train=train.bin,val=val.bin", "data"),
        ("web=0.7:a,Code=0.3:b", "web-code"),
        ("web=0.7>1@5:a,Code=0.3:b", "web-code"),
    ],
)
def test_a_label_is_fit_for_a_folder(text, label):
    assert label_of(parse_data(text)) == label
