"""The command `runs`: a table of all runs of a storage path."""

import io
import json
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from pretrain import PRESETS, main
from pretrain._commands.runs import show_runs
from pretrain._errors import UsageError
from pretrain._run.description import DataDescription, describe, write_description
from pretrain._run.files import append_line
from pretrain._run.folder import RunFolder
from pretrain._run.result import RunResult, write_result

BEGAN_S = 1_700_000_000.0


def make_run(path, last_phase, after_s, *, hardware="cpu:2", options=None, digest="1", **metrics):
    """A run of 1 500 steps at step 750, whose last phase began some seconds after its start."""
    run = RunFolder(path)
    run.path.mkdir(parents=True)
    config = PRESETS["quickstart"]().with_options({"model.vocab_size": 257, **(options or {})})
    data = DataDescription(tokens="tokens", tokenizer="bytes", fingerprint={"sha256": digest})
    write_description(run, describe(config, data, hardware))
    append_line(run.phases, {"step": 0, "time_s": BEGAN_S, "phase": "training"})
    append_line(run.phases, {"step": 750, "time_s": BEGAN_S + after_s, "phase": last_phase})
    append_line(run.metrics, {"step": 750, "tokens": 768000, "loss": 1.8123, "val_loss": 1.9, **metrics})
    return run


@pytest.fixture
def storage(tmp_path):
    """Four runs and a damaged one, and a file and a folder that are none."""
    root = tmp_path / "storage"
    done = make_run(root / "quickstart-builtin", "finished", 240, full_val_loss=1.5117)
    append_line(done.starts, {"step": 0, "workers": 1, "devices": 4, "device": "TPU v4"})
    append_line(done.starts, {"step": 250, "workers": 2, "devices": 8, "device": "NVIDIA H100 80GB HBM3"})
    make_run(root / "wikitext-a-longer-name-of-a-run", "training", 86_400)
    make_run(root / "silent", "training", 80_000)
    make_run(root / "stopped", "stopped", 3600)
    make_run(root / "broken", "training", 0).config.write_text("{")
    (root / "notes.txt").write_text("no run")
    (root / "empty").mkdir()
    return root


def shown(storage, **options):
    out = io.StringIO()
    show_runs(str(storage), console=Console(file=out, **options), clock=lambda: BEGAN_S + 86_460)
    return out.getvalue()


PLAIN = """\
run                             state               step   loss     val tokens device                        time   age
broken                          damaged
quickstart-builtin              finished        750/1500 1.8123  1.5117   768k 8 x NVIDIA H100 80GB HBM3     4:00  23 h
stopped                         stopped         750/1500 1.8123 1.9000*   768k cpu:2                      1:00:00  23 h
silent                          no sign of life 750/1500 1.8123 1.9000*   768k cpu:2                     22:13:20   1 h
wikitext-a-longer-name-of-a-run training        750/1500 1.8123 1.9000*   768k cpu:2                     24:00:00 1 min
* validation loss on a part of the validation tokens (train.eval_tokens)
"""
NARROW = """\
run                             state           step     val
broken                          damaged
quickstart-builtin              finished    750/1500  1.5117
stopped                         stopped     750/1500 1.9000*
silent                          no sign of  750/1500 1.9000*
                                life
wikitext-a-longer-name-of-a-run training    750/1500 1.9000*
* validation loss on a part of the validation tokens (train.eval_tokens)
"""


def test_each_run_is_a_row_without_a_terminal(storage):
    table, damage = shown(storage).split("broken: ")
    assert table == PLAIN
    assert damage.startswith(f"{storage / 'broken' / 'config.json'} must be JSON as a run writes it, got an error")


def test_control_characters_of_a_device_are_escaped(storage):
    append_line(
        RunFolder(storage / "stopped").starts, {"step": 750, "workers": 1, "devices": 1, "device": "\x1b[31mred"}
    )
    assert "\\x1b[31mred" in shown(storage)
    assert "\x1b" not in shown(storage)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_the_table_fits_a_terminal(storage, width):
    table, _, _ = shown(storage, force_terminal=True, width=width, color_system=None).partition("* validation loss")
    lines = table.splitlines()
    assert max(map(len, lines)) <= width
    assert all("750/1500" in line for line in lines if line.split()[1:2] in (["finished"], ["stopped"], ["training"]))


def test_a_narrow_table_has_the_important_columns_and_whole_numbers(storage):
    text = shown(storage, force_terminal=True, width=60, color_system=None)
    assert "".join(f"{line.rstrip()}\n" for line in text.splitlines()).startswith(NARROW)


def test_a_folder_without_runs_is_rejected(storage):
    with pytest.raises(UsageError, match=r"the storage path must hold the folder of a run, got .* without any"):
        show_runs(str(storage / "empty"), console=Console(quiet=True))


@pytest.mark.parametrize(
    "command", ["runs STORAGE", "watch STORAGE/quickstart-builtin", "report STORAGE/silent --out page.html"]
)
def test_a_command_that_reads_files_imports_neither_ray_nor_jax(storage, tmp_path, command):
    code = (
        "import sys; from pretrain import main; code = main(sys.argv[1:]); print(code, {'ray', 'jax'} & {*sys.modules})"
    )
    arguments = command.replace("STORAGE", str(storage)).split()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 set()", done.stderr


def test_the_loss_of_the_untrained_model_is_not_that_of_a_run(tmp_path):
    for name, step in (("new", 0), ("running", 25)):
        run = make_run(tmp_path / "storage" / name, "stopped", 60)
        lines = [{"step": 0, "tokens": 0, "val_loss": 5.5}, {"step": 25, "tokens": 25, "loss": 4.5}]
        run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines[: 1 + step]))
    assert table(tmp_path / "storage", columns="run,step,val", sort="val")[1:] == [
        ["new", "0/1500", "5.5000*"], ["running", "25/1500"],
    ]  # fmt: skip


def test_a_run_without_phases_has_the_time_of_its_result(tmp_path):
    run = make_run(tmp_path / "storage" / "first", "training", 0)
    run.phases.unlink()
    append_line(run.starts, {"step": 0, "workers": 1, "devices": 1, "device": "TPU v4"})
    append_line(run.metrics, {"step": 1500, "tokens": 1_536_000, "time_s": BEGAN_S})
    write_result(
        run, RunResult(steps=1500, metrics={}, restarts=0, workers=1, seconds={"training": 200.0, "saving": 8.0})
    )
    rows = [line.split() for line in shown(tmp_path / "storage").splitlines()]
    assert rows[1] == ["first", "finished", "1500/1500", "1.8123", "1.9000*", "1.54M", "TPU", "v4", "3:28", "1", "d"]


@pytest.fixture
def sweep(tmp_path):
    """Two learning rates with three seeds each, of which one run is stopped and one has no loss, and another run."""
    root = tmp_path / "sweep"
    losses = {1e-2: (2.0, 2.5, 3.0), 3e-4: (1.5, 1.75, 1.0)}
    for number, (rate, seed) in enumerate((rate, seed) for rate in losses for seed in (1, 2, 3)):
        is_stopped, loss = (rate, seed) == (3e-4, 3), losses[rate][seed - 1]
        full = {} if is_stopped else {"full_val_loss": loss}
        make_run(
            root / f"quickstart-x-lr{rate:g}-seed{seed}",
            "stopped" if is_stopped else "finished",
            number,
            options={"optimizer.learning_rate": rate, "seed": seed},
            val_loss=loss,
            hardware="cpu:2",
            digest="1",
            **full,
        )
    make_run(root / "other-x", "finished", 9, options={"train.mask_documents": True, "train.max_steps": 800})
    return root


def add_run(root, name, seed=4, *, rate=1e-2, steps=1500, digest="1", context=64, **metrics):
    """Another finished run of the sweep."""
    options = {"optimizer.learning_rate": rate, "seed": seed, "train.max_steps": steps, "model.seq_len": context}
    return make_run(root / name, "finished", 20, options=options, digest=digest, **{"full_val_loss": 2.75, **metrics})


def table(root, *globs, **options):
    out = io.StringIO()
    show_runs(str(root), globs, console=Console(file=out), clock=lambda: BEGAN_S + 86_460, **options)
    return [line.split() for line in out.getvalue().splitlines() if not line.startswith("*")]


def test_options_that_differ_are_columns(sweep):
    head, *rows = table(sweep, "quickstart-x-*")
    assert head[:6] == ["run", "state", "seed", "lr", "step", "loss"]
    assert [row[2:4] for row in rows] == [[str(seed), rate] for rate in ("0.01", "3e-4") for seed in (1, 2, 3)]
    head, *rows = table(sweep)  # the length is no column: it is beside the step
    assert head[:6] == ["run", "state", "seed", "mask_documents", "lr", "step"]
    assert rows[-1][:6] == ["other-x", "finished", "2357", "true", "2e-3", "750/800"]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("val_loss", ["lr0.0003-seed3", "lr0.0003-seed1", "lr0.0003-seed2", "lr0.01-seed1", "lr0.01-seed2"]),
        ("lr", ["lr0.0003-seed1", "lr0.0003-seed2", "lr0.0003-seed3", "lr0.01-seed1", "lr0.01-seed2"]),
        ("optimizer.learning-rate", ["lr0.0003-seed1", "lr0.0003-seed2", "lr0.0003-seed3", "lr0.01-seed1"]),
        ("age", ["lr0.0003-seed3", "lr0.0003-seed2", "lr0.0003-seed1", "lr0.01-seed3"]),
        ("name", ["lr0.0003-seed1", "lr0.0003-seed2", "lr0.0003-seed3", "lr0.01-seed1", "lr0.01-seed2"]),
    ],
)
def test_runs_are_sorted_by_a_column(sweep, column, expected):
    _, *rows = table(sweep, "quickstart-*", sort=column)
    assert [row[0].removeprefix("quickstart-x-") for row in rows][: len(expected)] == expected


def test_the_columns_are_those_asked_for(sweep):
    assert table(sweep, "*lr0.01*", columns="lr,run,val,batch")[:2] == [
        ["lr", "run", "val", "batch"],
        ["0.01", "quickstart-x-lr0.01-seed1", "2.0000", "16"],
    ]


def test_the_losses_of_a_mixture_are_columns_to_ask_for(sweep):
    for seed, loss in ((1, 2.0), (2, 3.0)):
        losses: Any = {"val_loss/my-web": 9.0, "full_val_loss/my-web": loss, "val_loss/code": 1.5}
        add_run(sweep, f"mixed-seed{seed}", seed, digest="2", **losses)
    assert table(sweep, "mixed*", sort="val_loss/my-web", columns="run,val_loss/my-web,val_loss/code") == [
        ["run", "val_loss/my-web", "val_loss/code"],
        ["mixed-seed1", "2.0000", "1.5000*"],
        ["mixed-seed2", "3.0000", "1.5000*"],
    ]
    assert table(sweep, "mixed*", group_by="seed", columns="run,val_loss/my-web")[1:] == [["mixed", "2.5000"]]
    with pytest.raises(UsageError, match=r"--columns must be columns, .* got val_loss/mi-web"):
        table(sweep, "mixed*", columns="val_loss/mi-web")


def test_globs_filter_names(sweep):
    assert [row[0] for row in table(sweep, "*-seed1", "other*")[1:]] == [
        "quickstart-x-lr0.01-seed1", "quickstart-x-lr0.0003-seed1", "other-x",
    ]  # fmt: skip
    with pytest.raises(
        UsageError, match=r"the patterns must match the name of a run in .*, got no-\* none\. Leave them"
    ):
        table(sweep, "no-*", "none")


def test_a_glob_may_stand_for_the_storage_path(sweep, monkeypatch, capsys):
    monkeypatch.chdir(sweep.parent)
    sweep.rename("runs")
    assert main(["runs", "*-seed2"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "run", "quickstart-x-lr0.01-seed2", "quickstart-x-lr0.0003-seed2",
    ]  # fmt: skip


def test_runs_that_differ_in_the_seed_alone_are_one_row(sweep):
    """The stopped run of 3e-4 does not count; the spread of 2, 2.5 and 3 is 0.5, that of 1.5 and 1.75 is 0.1768."""
    assert table(sweep, "q*", group_by="seed", columns="rank,run,runs,lr,val,spread,seed") == [
        ["rank", "run", "runs", "lr", "val", "spread", "seed"],
        ["1", "quickstart-x-lr0.0003", "2/3", "3e-4", "1.6250", "0.1768", "1,2,3"],
        ["2", "quickstart-x-lr0.01", "3/3", "0.01", "2.5000", "0.5000", "1,2,3"],
    ]
    (line,) = table(sweep, "q*", group_by="seed", as_json=True)
    first, second = json.loads(" ".join(line))
    assert (first["rank"], first["num_finished"], first["val_loss"]) == (1, 2, 1.625)
    assert first["runs"] == [f"quickstart-x-lr0.0003-seed{seed}" for seed in (1, 2, 3)]
    assert (first["seeds"], first["max_steps"]) == ([1, 2, 3], 1500)
    assert second["options"] == {"optimizer.learning_rate": 0.01}
    assert second["val_loss_std"] == 0.5
    # The newest run has the lowest seed.
    add_run(sweep, "quickstart-x-lr0.01-seed0", 0)
    (line,) = table(sweep, "q*", group_by="seed", as_json=True)
    _, second = json.loads(" ".join(line))
    assert second["seeds"] == [0, 1, 2, 3]
    assert second["runs"] == [f"quickstart-x-lr0.01-seed{seed}" for seed in second["seeds"]]


def test_the_mean_of_losses_on_a_part_of_the_tokens_is_marked_as_each_of_them(sweep):
    """Also that of one name of a mixture, of which the other one is validated on all tokens."""
    for seed in (1, 2):
        losses: Any = {"val_loss": seed, "val_loss/web": 3.0 * seed, "full_val_loss/code": 2.0 * seed}
        make_run(sweep / f"part-seed{seed}", "finished", 9, options={"seed": seed}, digest="3", **losses)
    columns = "run,val,spread,val_loss/web,val_loss/code"
    assert table(sweep, "part*", group_by="seed", columns=columns)[1:] == [
        ["part", "1.5000*", "0.7071", "4.5000*", "3.0000"]
    ]
    out = io.StringIO()
    show_runs(str(sweep), ["part*"], group_by="seed", console=Console(file=out))
    assert out.getvalue().splitlines()[-1].startswith("* validation loss on a part of the validation tokens")


GROUP = "rank,run,runs,seed,val,spread"


def test_a_second_run_of_a_seed_has_a_row_of_its_own(sweep):
    add_run(sweep, "quickstart-x-copy", 3, full_val_loss=3.0)
    assert table(sweep, "*-lr0.01-*", "*-copy", group_by="seed", columns=GROUP)[1:] == [
        ["1", "quickstart-x-lr0.01", "3/3", "1,2,3", "2.5000", "0.5000"],
        ["2", "quickstart-x-copy", "1/1", "3", "3.0000"],
    ]
    # A finished run comes before one that is not.
    add_run(sweep, "quickstart-x-again", 3, rate=3e-4, full_val_loss=1.25)
    _, first, second = table(sweep, "*-lr0.0003-*", "*-again", group_by="seed", columns=GROUP)
    assert first[2:] == ["3/3", "1,2,3", "1.5000", "0.2500"]
    assert second == ["quickstart-x-lr0.0003", "0/1", "3"]


def ranks(lines):
    """The ranks of the rows, and the last line."""
    return [row[0] for row in lines[1:] if row[0].isdigit()], " ".join(lines[-1])


def test_runs_of_different_lengths_are_groups_without_a_rank(sweep):
    add_run(sweep, "quickstart-x-lr0.01-long-seed4", steps=3000)
    lines = table(sweep, "*-lr0.01-*", group_by="seed")
    assert lines[0] == ["rank", "run", "runs", "steps", "val", "spread"]
    assert [row[:3] for row in lines[1:3]] == [
        ["quickstart-x-lr0.01", "3/3", "1500"],
        ["quickstart-x-lr0.01-long", "1/1", "3000"],
    ]
    assert ranks(lines) == (
        [], "no ranks: the runs have different lengths (train.max_steps). Choose runs by their names.",
    )  # fmt: skip
    assert ranks(table(sweep, "*-lr0.01-seed*", group_by="seed"))[0] == ["1"]


@pytest.mark.parametrize("other", [{"digest": "2"}, {"context": 32}])
def test_runs_of_other_validation_data_have_no_rank(sweep, other):
    """The same options and a new seed, but the losses of other tokens: another group."""
    add_run(sweep, "quickstart-x-lr0.01-new-seed4", **other)
    lines = table(sweep, "*-lr0.01-*", group_by="seed", columns=GROUP)
    assert [row[1] for row in lines[1:3]] == ["3/3", "1/1"]
    assert ranks(lines) == ([], "no ranks: the runs have different validation data. Choose runs by their names.")


def test_losses_of_other_parts_of_the_validation_tokens_have_no_rank(sweep):
    part = add_run(sweep, "quickstart-x-lr3-seed4", rate=3.0)
    part.metrics.write_text(part.metrics.read_text().replace("full_val_loss", "other"))
    lines = table(sweep, "*-lr0.01-*", "*-lr3-*", group_by="seed", columns=GROUP)
    assert ranks(lines)[0] == []
    assert "different parts of the validation tokens (train.eval_tokens)" in ranks(lines)[1]


@pytest.mark.parametrize("end", [{"val_loss": 1.0}, {"loss": 1.0}, {}])
def test_a_diverged_run_has_no_rank(sweep, end):
    """Its validations before are no result. The mean of the other seeds is none of all seeds."""
    run = add_run(sweep, "quickstart-x-lr0.0003-seed4", rate=3e-4, full_val_loss=0.5)
    append_line(run.metrics, {"step": 1500, **end})
    lines = table(sweep, "q*", group_by="seed", columns=GROUP)
    assert lines[1] == ["1", "quickstart-x-lr0.01", "3/3", "1,2,3", "2.5000", "0.5000"]
    assert lines[2] == ["quickstart-x-lr0.0003", "2/4", "1,2,3,4", "1.6250", "0.1768"]
    assert ranks(lines)[1] == (
        "no rank with a run that is finished, but has no loss or no validation loss of its last step: "
        "quickstart-x-lr0.0003-seed4"
    )
    append_line(run.metrics, {"step": 1500, "loss": 1.0, "val_loss": 1.0})
    assert ranks(table(sweep, "q*", group_by="seed", columns=GROUP))[0] == ["1", "2"]


def test_a_good_run_of_a_seed_comes_before_one_that_has_diverged(sweep):
    run = add_run(sweep, "quickstart-x-lr0.0003-seed2-a", 4, rate=3e-4, full_val_loss=0.5)
    append_line(run.metrics, {"step": 1500, "loss": 1.0})
    add_run(sweep, "quickstart-x-lr0.0003-seed4-again", 4, rate=3e-4, full_val_loss=1.75)
    lines = table(sweep, "q*", group_by="seed", columns=GROUP)
    assert lines[1] == ["1", "quickstart-x-lr0.0003", "3/4", "1,2,3,4", "1.6667", "0.1443"]  # seed 3 has stopped
    assert lines[3] == ["quickstart-x-lr0.0003-seed2-a", "0/1", "4"]


def test_the_name_of_a_run_may_stand_for_the_storage_path(sweep, monkeypatch, capsys):
    monkeypatch.chdir(sweep.parent)
    sweep.rename("runs")
    assert main(["runs", "other-x", "quickstart-x-lr0.01-seed1"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()][1:3] == [
        "quickstart-x-lr0.01-seed1", "other-x",
    ]  # fmt: skip
    assert main(["runs", "other-y"]) == 2
    assert "the storage path must be a folder of runs, got other-y, which does not exist." in capsys.readouterr().err


def test_the_only_choice_of_an_option_is_named(capsys):
    assert main(["runs", "--group-by", "lr"]) == 2
    assert "--group-by must be seed or none, got lr." in capsys.readouterr().err


def test_json_has_all_numbers_and_the_options_that_differ(sweep, storage):
    (line,) = table(sweep, "*0.0003-seed[12]", as_json=True)
    first, second = json.loads(" ".join(line))
    assert (first["name"], first["step"], first["max_steps"]) == ("quickstart-x-lr0.0003-seed1", 750, 1500)
    assert (first["val_loss"], first["val_is_full"], first["metrics"]["tokens"]) == (1.5, True, 768000)
    assert [first["options"], second["options"]] == [{"seed": 1}, {"seed": 2}]
    (line,) = table(storage, "broken", as_json=True)
    (broken,) = json.loads(" ".join(line))
    assert broken["state"] == "damaged"
    assert "must be JSON as a run writes it" in broken["problem"]


def test_an_unknown_column_is_rejected(sweep):
    with pytest.raises(
        UsageError, match=r"--sort must be columns, such as run, state, .*, got vall\. Did you mean val"
    ):
        table(sweep, sort="vall")
    with pytest.raises(UsageError, match=r"--columns must be columns, such as rank, .*, got steps of"):
        table(sweep, group_by="seed", columns="run,steps of")


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_table_with_options_fits_a_terminal(sweep, width):
    out = io.StringIO()
    show_runs(str(sweep), console=Console(file=out, force_terminal=True, width=width, color_system=None))
    lines = out.getvalue().partition("* validation")[0].splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].split()[:2] == ["run", "state"]
    assert ("lr" in lines[0].split()) == (width == 80)


def test_the_name_of_a_run_is_whole_and_rare_options_and_the_data_leave_room(tmp_path):
    name = "baby-shakespeare-lr3e-3-seed2"
    for number in range(1, 4):
        make_run(tmp_path / "storage" / name.replace("2", str(number)), "finished", 60)
    fork = make_run(tmp_path / "storage" / "fork", "finished", 60)
    description = json.loads(fork.config.read_text())
    description["config"] |= {"data": "/a/long/path/to/another-text.txt", "from_checkpoint": name}
    fork.config.write_text(json.dumps(description))
    out = io.StringIO()
    show_runs(str(tmp_path / "storage"), console=Console(file=out, force_terminal=True, width=80, color_system=None))
    heads, *lines = out.getvalue().splitlines()
    assert {"run", "data", "val"} <= {*heads.split()}
    assert "from_checkpoint" not in heads
    assert any(line.startswith(f"{name} ") for line in lines)
    assert any(line.startswith("fork ") and " another-text " in line for line in lines)
