import numpy as np
import pytest

from nnx_gpt2 import GradientShares
from owt_data import TokenDocument, load_tokenizer
from pretrain._audit.suspects import Removal, Suspect, parse_removal, rank_documents, rank_windows, replace_windows
from pretrain._errors import UsageError

END = 256
WINDOWS = np.array([[*b"abc", END, *b"d"], [*b"ef", END, *b"gh"], [*b"ijklm"]], np.uint16)
# The document 7 continues from the first window into the second one.
DOCUMENTS = np.array([[5, 5, 5, 5, 7], [7, 7, 7, 9, 9], [2, 2, 2, 2, 2]])


def shares_of(losses, shares):
    losses, shares = (np.asarray(values, np.float32) for values in (losses, shares))
    norms = np.where(np.isfinite(losses.sum(1)), 1.5, np.nan).astype(np.float32)
    return GradientShares(losses=losses, shares=shares, norms=norms, norm=2.0)


PLACES = {
    number: TokenDocument(
        id=number,
        start=0,
        stop=9,
        token_file="train.bin",
        number=number,
        file=None if number == 9 else "c.jsonl",
        row=None if number == 9 else number + 100,
    )
    for number in (2, 5, 7, 9)
}
FOUND = shares_of(
    [[1, 2, 3, 4], [5, 6, 7, 9], [0, 0, 1, 1]], [[0.1, 0.1, 0, 0.1], [0.5, 0.0, -0.05, 0], [0.1, 0.1, 0.1, 0.1]]
)


def test_windows_are_ranked_by_their_share_in_the_gradient_or_by_what_they_add_to_the_loss():
    tokenizer = load_tokenizer("bytes")
    by_gradient, by_loss = (rank_windows(FOUND, WINDOWS, tokenizer, by) for by in ("gradient", "loss"))
    assert [suspect.id for suspect in by_gradient] == ["w1", "w2", "w0"]
    assert [suspect.id for suspect in by_loss] == ["w1", "w0", "w2"]
    share = float(np.asarray([0.5, 0.0, -0.05, 0], np.float32).sum())
    expected = {
        "num_tokens": 4,
        "loss": 6.75,
        "excess": (27 - 4 * 39 / 12) / 12,
        "share": share,
        "norm": 1.5,
        "source": None,
        "text": "ef<|endoftext|>gh",
    }
    assert by_loss[0] == Suspect(id="w1", windows=[1], **expected)


def test_a_prediction_counts_for_the_document_of_its_target():
    by_loss = rank_documents(FOUND, WINDOWS, DOCUMENTS, PLACES, load_tokenizer("bytes"), "loss")
    # The first token of document 9 is predicted from the end of document 7.
    assert [(suspect.id, suspect.num_tokens, suspect.loss) for suspect in by_loss] == [
        ("d9", 2, 8.0),
        ("d7", 3, 5.0),
        ("d5", 3, 2.0),
        ("d2", 4, 0.5),
    ]
    np.testing.assert_allclose([one.excess * 12 for one in by_loss], [2 * 4.75, 3 * 1.75, 3 * -1.25, 4 * -2.75])
    assert [suspect.source for suspect in by_loss] == [None, "c.jsonl:107", "c.jsonl:105", "c.jsonl:102"]
    assert [suspect.windows for suspect in by_loss] == [[1], [0, 1], [0], [2]]
    assert [suspect.text for suspect in by_loss] == ["gh", "d", "abc", "ijklm"]
    by_gradient = rank_documents(FOUND, WINDOWS, DOCUMENTS, PLACES, None, "gradient")
    assert [(suspect.id, round(suspect.share, 6)) for suspect in by_gradient] == [
        ("d7", 0.6),
        ("d2", 0.4),
        ("d5", 0.2),
        ("d9", -0.05),
    ]
    assert {suspect.text for suspect in by_gradient} == {""}


def test_a_window_that_predicts_no_token_of_a_document_is_none_of_its_windows():
    """The first window has the last token of document 5, as the context of the next one."""
    ids = np.array([[5, 7, 7, 7, 7], [5, 5, 9, 9, 9], [2, 2, 2, 2, 2]])
    ranked = rank_documents(FOUND, WINDOWS, ids, PLACES, load_tokenizer("bytes"), "loss")
    assert {one.id: (one.windows, one.num_tokens, one.text) for one in ranked} == {
        "d7": ([0], 4, "bcd"),
        "d5": ([1], 1, "ef"),
        "d9": ([1], 3, "gh"),
        "d2": ([2], 4, "ijklm"),
    }


def test_a_few_tokens_of_a_high_loss_come_after_many_with_a_lower_one():
    losses = [[9, 1, 1, 1], [6, 6, 6, 6], [0, 0, 0, 0]]
    ids = np.array([[5, 7, 5, 5, 5], [2, 2, 2, 2, 2], [9, 9, 9, 9, 9]])
    ranked = rank_documents(shares_of(losses, FOUND.shares), WINDOWS, ids, PLACES, None, "loss")
    assert [(one.id, one.loss) for one in ranked] == [("d2", 6.0), ("d7", 9.0), ("d5", 1.0), ("d9", 0.0)]
    assert [round(one.excess * 12, 6) for one in ranked] == [12, 6, -6, -12]


@pytest.mark.parametrize("by", ["gradient", "loss"])
def test_what_is_not_finite_comes_first(by):
    losses, shares = FOUND.losses.copy(), FOUND.shares.copy()
    losses[2], shares[2] = np.nan, np.nan
    found = shares_of(losses, shares)
    for ranked in (
        rank_windows(found, WINDOWS, None, by),
        rank_documents(found, WINDOWS, DOCUMENTS, PLACES, None, by),
    ):
        assert ranked[0].windows == [2]
        assert not np.isfinite([ranked[0].loss, ranked[0].share]).any()
        assert np.isfinite([suspect.share for suspect in ranked[1:]]).all()


def test_windows_of_removed_documents_go_and_removed_windows_go_in_the_first_step_alone():
    removal = Removal(windows=frozenset({2}), documents=frozenset({9}))
    assert removal.stays(DOCUMENTS, is_first=True).tolist() == [True, False, False]
    assert removal.stays(DOCUMENTS, is_first=False).tolist() == [True, False, True]
    assert Removal(frozenset(), frozenset({7})).stays(DOCUMENTS, is_first=True).tolist() == [False, False, True]


def test_the_next_window_that_stays_takes_the_place_of_one_that_goes():
    windows = np.arange(7, dtype=np.uint16)[:, None]
    stays = np.array([False, True, False, False, True, True, False])
    assert replace_windows(windows, stays).ravel().tolist() == [1, 1, 4, 4, 4, 5, 1]
    assert replace_windows(windows, np.ones(7, np.bool_)).ravel().tolist() == [*range(7)]


@pytest.mark.parametrize("unknown", ["w3", "d4", "7", "d7 ", "w-1", "", "x1", "w" + "1" * 40])
def test_ids_that_are_not_in_the_step_are_rejected(unknown):
    documents = {*DOCUMENTS.ravel().tolist()}
    assert parse_removal(["w2", "d7", "d5"], len(WINDOWS), documents) == Removal(frozenset({2}), frozenset({7, 5}))
    with pytest.raises(UsageError, match=r"--without must be .* of the step, w0 to w2 and such as d2, got"):
        parse_removal(["w2", unknown], len(WINDOWS), documents)
