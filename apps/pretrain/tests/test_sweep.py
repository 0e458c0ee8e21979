"""The command `sweep`: its grid, and the runs that it trains."""

import contextlib
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from pretrain import PRESETS, PretrainConfig, main
from pretrain._command_line.arguments import build_command
from pretrain._command_line.command_classes import SweepCommand
from pretrain._command_line.config_file import _words, to_arguments
from pretrain._command_line.option_table import options_of
from pretrain._commands import sweep
from pretrain._commands.sweep import (
    _cluster,
    _is_finished,
    _show_results,
    _Workers,
    best_settings,
    matching_folders,
    plan_sweep,
)
from pretrain._errors import UsageError
from pretrain._formats import loss
from pretrain._run.folder import RunFolder
from pretrain._run.history import read_starts
from pretrain._run.metrics import read_records
from pretrain._run.names import run_name
from pretrain._run.result import RunResult, write_result

TINY = (
    "--data book.txt --hardware local --trackers --train.sample-tokens 0 --model.seq-len 16 --model.num-layers 1 "
    "--model.num-heads 1 --model.embed-dim 8 --train.global-batch-size 4 --optimizer.warmup-steps 0"
)
SIZES = "batch4-layers1-heads1-width8-context16"


def name(rate, end=""):
    return f"quickstart-book-lr{rate}-warmup0-{SIZES}{end}"


def config_of(words):
    config = build_command("train", words)
    assert isinstance(config, PretrainConfig)
    return config


def configs(line):
    command = build_command("sweep", line.split())
    assert isinstance(command, SweepCommand)
    return command.configs


@pytest.fixture(scope="module", autouse=True)
def one_cache(tmp_path_factory):
    """All tests share the tokens of the text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield os.environ["XDG_CACHE_HOME"]


@pytest.fixture
def place(tmp_path, monkeypatch, one_cache):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", one_cache)
    Path("book.txt").write_text("A short book, of some words. " * 400)
    return tmp_path


@contextlib.contextmanager
def started(line):
    process = subprocess.Popen(
        [sys.executable, "-m", "pretrain", "sweep", *line.split()],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def swept(line):
    """Run a sweep to its end. Return its exit code and its lines."""
    with started(line) as process:
        lines = process.communicate()[0].splitlines()
        return process.returncode, lines


def results(place):
    """The losses of all runs."""
    kept = ("step", "loss", "val_loss", "full_val_loss", "learning_rate")
    return {
        path.parent.name: [{key: line[key] for key in kept if key in line} for line in read_records(path)]
        for path in (place / "runs").glob("*/metrics.jsonl")
    }


def wait_for(holds, process):
    until = time.monotonic() + 120
    while not holds():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.01)


# The grid


def test_each_combination_is_a_run_and_the_last_option_changes_first():
    found = configs("--preset baby --grid optimizer.learning-rate=1e-3,5e-4 seed=1,2 --train.max-steps 7 --parallel 2")
    assert [(one.optimizer.learning_rate, one.seed, one.train.max_steps) for one in found] == [
        (1e-3, 1, 7), (1e-3, 2, 7), (5e-4, 1, 7), (5e-4, 2, 7),
    ]  # fmt: skip


def test_values_are_those_of_the_command_line():
    (found,) = configs("--grid train.mask_documents=true tokenizer=gpt2 train.order=none trackers=wandb seed=3")
    assert (found.train.mask_documents, found.prepare.tokenizer, found.train.order) == (True, "gpt2", None)
    assert (found.trackers, found.seed) == (("wandb",), 3)


def test_a_file_has_options_and_a_grid(place):
    Path("sweep.toml").write_text(
        'preset = "baby"\n[train]\nmax_steps = 9\n[grid]\nseed = [1, 2]\n"data" = ["train=a,val=b", "x"]\n'
        "[grid.optimizer]\nlearning-rate = [1e-3]\nwarmup_steps = [3]\n"
    )
    found = configs("sweep.toml --grid seed=5 --model.num-layers 1")
    assert [(one.preset, one.data, one.seed) for one in found] == [("baby", "train=a,val=b", 5), ("baby", "x", 5)]
    assert {(one.train.max_steps, one.optimizer.warmup_steps, one.model.num_layers) for one in found} == {(9, 3, 1)}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("", "sweep must have a grid, got none. Give --grid OPTION=VALUE,VALUE, or a FILE with [grid]."),
        ("--grid seed", "--grid must be OPTION=VALUE,VALUE such as seed=1,2,3, got seed."),
        ("--grid sed=1", "no option sed, of --grid; did you mean seed?"),
        ("--grid lr=1", "no option lr, of --grid; did you mean optimizer.learning-rate?"),
        ("--grid optimizer.lr=1", "no option optimizer.lr, of --grid; did you mean optimizer.learning-rate?"),
        ("--grid layers=1", "no option layers, of --grid; did you mean model.num-layers?"),
        ("--grid batch=1", "no option batch, of --grid; did you mean train.global-batch-size?"),
        ("--grid minratio=1", "no option minratio, of --grid; did you mean optimizer.min-learning-rate-ratio?"),
        ("--grid seed=1,x", "--grid seed must be an integer, got x."),
        ("--grid seed=1,", "--grid seed must be an integer, got ''."),
        ("--grid train.mask-documents=yes", "--grid train.mask-documents must be true or false, got yes."),
        ("--grid optimizer.name=adam", "--grid optimizer.name must be adamw or muon, got adam. Did you mean adamw?"),
        ("--grid seed=1 seed=2", "--grid must have each option once, got seed twice."),
        ("--grid seed=1 --seed 2", "--seed cannot be given beside its values in the grid. Leave one of them out."),
        ("--grid seed=1 --name x", "name cannot be given to sweep, which names each run by its options."),
        ("--grid seed=1 --parallel 0", "--parallel must be at least 1, got 0."),
        ("--grid seed=1 --trian.max-steps 2", "no option --trian.max-steps of sweep; did you mean --train.max-steps?"),
        ("--grid optimizer.learning-rate=1e-3,0", "optimizer.learning_rate must be above 0"),
        ("--grid train.max-epochs=1 --train.max-steps 2", "--train.max-steps cannot be given with --train.max-epochs"),
        ("a.toml", "grid.seed in a.toml must be a list of values, got 3."),
        ("b.toml", "each of grid.seed in b.toml must be an integer, got 'x'."),
        ("c.toml", "no option sede, of grid in c.toml; did you mean seed?"),
        (f"--grid seed={','.join(map(str, range(1001)))}", "a grid must have at most 1,000 runs, got 1,001."),
    ],
)
def test_a_wrong_grid_is_rejected(place, capsys, line, sentence):
    Path("a.toml").write_text("[grid]\nseed = 3")
    Path("b.toml").write_text("[grid]\nseed = [1, 'x']")
    Path("c.toml").write_text("[grid]\nsede = [1]")
    assert main(["sweep", *line.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {sentence}")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--grid train.max-steps=3,4 seed=1,2", "the runs of a grid must have different names, got "),
        ("--grid prepare.text-column=x seed=1,1", "the runs of a grid must have different names, got "),
        ("--grid seed=1,1", "the runs of a grid must have different names, got "),
        ("--grid seed=1,2 --data none.txt", "none.txt"),
        ("--grid seed=1,2 --hardware cpu:3", "train.global_batch_size must be divisible by 3"),
        ("--grid train.order=random,sequential --data-mode stream", "train.order must be sequential or sequential-fir"),
        ("--grid seed=1,2 --hardware auto --parallel 2", "hardware must be the devices of one run with --parallel"),
    ],
)
def test_runs_that_cannot_be_trained_are_rejected_before_the_first_one_starts(place, capsys, line, sentence):
    assert main(["sweep", *TINY.split(), *line.split()]) == 2
    assert sentence in capsys.readouterr().err
    assert not Path("runs").exists()


def test_data_of_one_label_is_rejected(place, capsys):
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(folder, "book.txt").write_text("text " * 100)
    assert main(["sweep", *TINY.split()[2:], "--grid", "data=a/book.txt,b/book.txt"]) == 2
    assert "the runs of a grid must have different names, got " in capsys.readouterr().err


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    "line",
    [
        "",
        "--train.max-steps 5",
        "--train.max-tokens 500",
        "--train.max-epochs 2 --train.micro-batch-size 1 --train.mask-documents --trackers --seed 3",
        "--train.grad-accum-steps 2 --prompts=-x --mesh.fsdp 2 --optimizer.decay-steps 3 --train.eval-tokens none",
        "--prompts a b --name=-n --dashboard --peak-tflops 2.5",
    ],
)
def test_the_arguments_of_a_configuration_give_it_back(preset, line):
    config = config_of([f"--preset={preset}", *line.split()])
    assert config_of(to_arguments(config)) == config


def test_no_texts_are_an_empty_value_and_no_choices_are_no_value():
    options = {option.name: option for option in options_of(PretrainConfig)}
    assert _words(options["train.eval_tasks"], ()) == ["--train.eval-tasks="]
    assert _words(options["trackers"], ()) == ["--trackers"]


def test_texts_that_no_arguments_give_are_rejected():
    config = PRESETS["baby"]().with_options({"prompts": ("a", "--b")})
    with pytest.raises(UsageError, match=r"prompts must be texts that begin with no -, got \['a', '--b'\]"):
        to_arguments(config)


def test_a_dry_run_prints_the_commands_and_starts_nothing(place, capsys):
    assert main(["sweep", *TINY.split(), "--grid", "seed=1,2", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for seed, line in enumerate(lines, 1):
        found, _, command = line.partition(": ")
        config = config_of(command.partition("pretrain")[2].split())
        assert found == run_name(config)
        assert config.seed == seed
    assert not Path("runs").exists()


# The runs

LONG = (
    f"{TINY} --train.max-steps 400 --train.log-every 20 --train.eval-every 100 --train.checkpoint-every 50 "
    "--train.eval-tokens 32"
)
GRID = "--grid optimizer.learning-rate=1e-3,2e-3"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, one_cache):
    """The output of a sweep of two runs, their losses, the output of two further sweeps, and the folder."""
    place = tmp_path_factory.mktemp("undisturbed")
    (place / "book.txt").write_text("A short book, of some words. " * 400)
    with contextlib.chdir(place):
        code, lines = swept(f"{LONG} {GRID}")
        again = swept(f"{LONG} {GRID}")
        shorter = swept(f"{LONG} {GRID}".replace("--train.max-steps 400", "--train.max-steps 300"))
    assert code == 0, lines
    return lines, results(place), again, shorter, place


def test_a_sweep_trains_plain_runs_and_shows_their_table(undisturbed, monkeypatch):
    lines, found, (code, again), *_, place = undisturbed
    monkeypatch.chdir(place)
    names = [name("1e-3"), name("2e-3").replace("lr2e-3-", "")]  # 2e-3 is that of the preset
    assert sorted(found) == sorted(names)
    assert [line.partition(":")[0] for line in lines if ": started" in line] == names
    ends = [line.split(", ")[-1] for line in lines if "finished in" in line]
    last = [found[one][-1] for one in names]
    assert ends == [
        f"validation loss {loss(one['full_val_loss'])} ({n} of 2 finished)" for n, one in enumerate(last, 1)
    ]
    assert all(loss(one["full_val_loss"]) != loss(one["val_loss"]) for one in last)
    head = next(line for line in lines if line.startswith("run "))
    assert head.split()[:5] == ["run", "state", "lr", "step", "loss"]
    table = [line.split() for line in lines[lines.index(head) + 1 :][:2]]
    assert [row[3] for row in table] == ["400/400", "400/400"]
    assert table[0][5] <= table[1][5]  # the lowest validation loss first
    assert lines[-2].endswith("report 'quickstart-book-*'")  # all have one seed: there are no groups
    best = sorted(names, key=lambda one: found[one][-1]["full_val_loss"])
    assert lines[-1].endswith(f"compare {best[0]} {best[1]}")
    assert main(shlex.split(lines[-1])[-3:]) == 0
    # The second time, no run starts.
    assert code == 0
    assert "2 runs, 2 of them finished" in again
    assert not any("started" in line for line in again)


def test_a_run_that_was_extended_since_is_finished(undisturbed):
    code, lines = undisturbed[3]
    assert code == 0
    assert "2 runs, 2 of them finished" in lines


def test_a_run_of_the_same_name_on_other_data_is_not_finished(undisturbed, monkeypatch):
    monkeypatch.chdir(undisturbed[-1])
    Path("other").mkdir()
    Path("other/book.txt").write_text("Another book. " * 500)
    for data, is_finished in (("book.txt", True), ("other/book.txt", False)):
        runs = plan_sweep(configs(f"{LONG} {GRID}".replace("book.txt", data)), [(), ()])
        assert [(run.name in undisturbed[1], _is_finished(run)) for run in runs] == [(True, is_finished)] * 2


@pytest.mark.parametrize(
    ("hardware", "address", "num_cpus"),
    [("auto", None, 2), ("cpu:2", None, 9), ("cpu:9", None, 33), ("cpu:2", "10.0.0.1:1", None), ("local", None, None)],
)
def test_one_cluster_has_room_for_all_runs_at_once(monkeypatch, hardware, address, num_cpus):
    """Three runs, or one that takes the best hardware. Each has its workers, and a CPU for the data of eight."""
    connected, console = [], Console(quiet=True)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("ray_jax_launch.connect", lambda hardware, **options: connected.append(hardware.num_workers))
    monkeypatch.setattr("ray_jax_launch.joining_variables", lambda: {"RAY_ADDRESS": "here"})
    config = config_of([*TINY.replace("--hardware local", f"--hardware {hardware}").split()])
    variables = _cluster(config, 1 if hardware == "auto" else 3, console)
    assert (connected, variables) == (([], {}) if num_cpus is None else ([num_cpus], {"RAY_ADDRESS": "here"}))


@pytest.fixture
def finished(place):
    """A function that makes the runs of a grid, finished with these losses, without training them."""

    def make(grid, losses, steps=40, base=TINY):
        runs = plan_sweep(given := configs(f"{base} --grid {grid}"), [()] * len(given))
        for run, value in zip(runs, losses, strict=True):
            run.folder.path.mkdir(parents=True)
            write_result(run.folder, RunResult(steps=steps, metrics={}, full_val_loss=value, restarts=0, workers=1))
        return runs

    return make


def test_one_pattern_stands_for_runs_unless_it_matches_another_one(finished):
    runs = finished("seed=1,2 train.mask-documents=false,true", [1.0] * 4)
    beginning = f"quickstart-book-warmup0-{SIZES}"
    assert [folder.name for folder in matching_folders(runs)] == [f"{beginning}-*"]
    plain = [run for run in runs if not run.config.train.mask_documents]
    assert [folder.name for folder in matching_folders(plain)] == [f"{beginning}-seed*"]
    Path(f"runs/{beginning}-seed3").mkdir()
    assert [folder.name for folder in matching_folders(plain)] == [f"{beginning}-seed1", f"{beginning}-seed2"]
    assert [folder.name for folder in matching_folders(plain[:1])] == [f"{beginning}-seed1"]


@pytest.mark.parametrize(
    ("grid", "losses", "steps", "expected"),
    [
        ("optimizer.learning-rate=1e-3,3e-3,5e-3 seed=1,2", [3.0, 1.5, 1.0, 3.0, 2.5, 2.5], 40, [3e-3, 1e-3]),
        ("optimizer.learning-rate=1e-3,3e-3,5e-3", [3.0, 1.5, 1.0], 40, [5e-3, 3e-3]),
        ("optimizer.learning-rate=1e-3,3e-3,5e-3 seed=1,2", [3.0, None, 1.0, 3.0, 2.5, 2.0], 40, [3e-3, 5e-3]),
        ("optimizer.learning-rate=1e-3,3e-3", [3.0, 1.5], 39, None),  # too few steps for `compare`
        ("optimizer.learning-rate=1e-3,3e-3", [3.0, None], 40, None),
        ("train.global-batch-size=4,8", [3.0, 1.5], 40, None),  # other windows
        ("seed=1,2", [3.0, 1.5], 40, None),
    ],
)
def test_the_two_best_settings_are_those_of_the_lowest_mean_losses(finished, grid, losses, steps, expected):
    base = TINY.replace("--train.global-batch-size 4", "") if "global-batch-size" in grid else TINY
    runs = finished(grid, losses, steps, base)
    groups = {}
    for run in runs:
        groups.setdefault((run.config.optimizer, run.config.train), []).append(run)
    best = best_settings([*groups.values()])
    assert (best and [group[0].config.optimizer.learning_rate for group in best]) == expected


def test_a_sweep_ends_with_the_commands_for_its_runs_and_their_seeds(finished, monkeypatch):
    """Also in another folder for runs."""
    shown = []
    monkeypatch.setattr(sweep, "show_runs", lambda *arguments, **options: shown.append((arguments, options["sort"])))
    monkeypatch.setattr("sys.argv", ["pretrain"])
    base = f"{TINY} --storage-path place"
    runs = finished("optimizer.learning-rate=1e-3,3e-3 seed=1,2", [3.0, 2.5, 1.0, 1.5], base=base)
    out = io.StringIO()
    _show_results(runs, Console(file=out, width=300))
    assert (out.getvalue(), shown) == ("", [])  # no run has begun
    for run in runs:
        run.folder.config.touch()
    _show_results(runs, Console(file=out, width=300))
    first, second = (f"quickstart-book-lr{rate}-warmup0-{SIZES}-seed*" for rate in ("1e-3", "3e-3"))
    assert shown == [(("place", [run.name for run in runs]), "val")]
    assert out.getvalue().splitlines() == [
        "pretrain report 'place/quickstart-book-lr*'",
        "pretrain runs place 'quickstart-book-lr*' --group-by seed",
        f"pretrain compare 'place/{second}' --against 'place/{first}'",
    ]


# In place of a run: it goes on when another one has begun, and tells how many there are.
TOGETHER = """
import os, sys, time
from pathlib import Path
place, name = Path(os.environ["PLACE"]), sys.argv[1]
for folder in ("present", "begun"):
    (place / folder / name).touch()
limit_s = time.monotonic() + 30
while len(os.listdir(place / "begun")) < 2 and time.monotonic() < limit_s:
    time.sleep(0.01)
(place / "most" / f"{len(os.listdir(place / 'present'))}").touch()
time.sleep(0.2)
(place / "present" / name).unlink()
sys.exit(3 if name == "three" else 0)
"""


def test_as_many_runs_as_asked_are_at_once_and_get_the_variables_of_the_cluster(place, monkeypatch):
    monkeypatch.setattr(sweep, "CHILD", TOGETHER)
    for folder in ("begun", "present", "most"):
        Path("state", folder).mkdir(parents=True)
    names = ["one", "two", "three"]
    runs = plan_sweep(configs(f"{TINY} --grid seed=1,2,3"), [[name] for name in names])
    out = io.StringIO()
    workers = _Workers(5, 2, Console(file=out, width=300))
    workers.run(runs, 2, {"PLACE": str(place / "state")})
    begun, most = ([path.name for path in Path("state", folder).iterdir()] for folder in ("begun", "most"))
    assert (sorted(begun), max(most)) == (sorted(names), "2")
    lines = out.getvalue().splitlines()
    assert sorted(line.partition(": ")[2] for line in lines if ": started" in line) == ["started"] * 3
    assert workers.failed == [runs[2].name]
    ends = {line.partition(": ")[0]: line.partition(": ")[2] for line in lines if ": started" not in line}
    assert ends[runs[2].name] in [f"failed: its process ended with code 3 ({n} of 5 finished)" for n in (3, 4)]
    assert [*ends.values()][-1].endswith("(4 of 5 finished)")


@pytest.mark.slow
def test_a_sweep_that_is_killed_twice_ends_with_the_same_results(place, undisturbed):
    """The first kill leaves the process of the run, which saves and ends; the second one kills both."""
    first, second = (Path("runs", one) for one in (name("1e-3"), name("2e-3").replace("lr2e-3-", "")))
    with started(f"{LONG} {GRID}") as process:
        wait_for((first / "checkpoints" / "50").exists, process)
        process.kill()
    with started(f"{LONG} {GRID}") as process:
        wait_for((second / "checkpoints" / "50").exists, process)
        owner = json.loads((second / ".lock").read_text())["pid"]
        process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(owner, signal.SIGKILL)
    code, lines = swept(f"{LONG} {GRID}")
    assert code == 0, lines
    assert results(place) == undisturbed[1]


def test_a_run_that_fails_does_not_stop_the_others(place):
    line = f"{TINY} --train.max-steps 100 --train.log-every 10 --optimizer.clip-norm 0 --optimizer.weight-decay 0"
    grid = "--grid optimizer.learning-rate=1e35,1e-3"
    code, lines = swept(f"{line} {grid}")
    failed = next(Path("runs").glob("*lr1e35*")).name
    assert code == 1
    assert any(one.startswith(f"{failed}: failed: ") for one in lines), lines
    assert any("lr1e-3" in one and "finished in" in one for one in lines)
    assert lines[-1] == f"error: 1 of 2 runs have failed: {failed}: the same command continues them"


def test_ctrl_c_saves_the_run_and_the_same_command_continues(place):
    line = f"{LONG} --grid seed=1,2"
    first = Path("runs", name("2e-3", "-seed1").replace("lr2e-3-", ""))
    with started(line) as process:
        wait_for((first / "checkpoints" / "50").exists, process)
        process.send_signal(signal.SIGINT)
        lines = process.communicate()[0].splitlines()
    assert process.returncode == 130
    assert any(one.startswith(f"{first.name}: stopped and saved") for one in lines), lines
    assert lines[-1] == "interrupted: run the same command again to continue"
    assert [path.name for path in Path("runs").iterdir()] == [first.name]
    assert json.loads((first / "phases.jsonl").read_text().splitlines()[-1])["phase"] == "stopped"


def check_last_line(lines, rows):
    """The last line of a sweep is a command that prints a row for each group, with its rank and number of runs."""
    words = shlex.split(lines[-1])
    command = words[words.index("runs") :]
    line = [sys.executable, "-m", "pretrain", *command, "--columns", "rank,runs"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert [line.split() for line in done.stdout.splitlines()] == [["rank", "runs"], *rows]


@pytest.mark.slow
def test_a_sweep_of_seeds_ends_with_the_command_that_ranks_its_groups(place):
    """The table leaves out a run of another name. Two runs are at once."""
    line = f"{TINY} --train.max-steps 5 --storage-path 'a place' --optimizer.weight-decay 0.2 --parallel 2"
    other = [*shlex.split(line)[:-2], "--name", "other"]
    subprocess.run([sys.executable, "-m", "pretrain", "train", *other], capture_output=True, check=True)
    words = [*shlex.split(line), "--grid", "optimizer.learning-rate=1e-3,3e-3", "seed=1,2"]
    done = subprocess.run(
        [sys.executable, "-m", "pretrain", "sweep", *words], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert " report " in lines[-2]
    assert ["started" in one for one in lines if "started" in one or "finished in" in one][:3] == [True, True, False]
    assert lines[-1].endswith("'quickstart-book-lr*' --group-by seed")
    check_last_line(lines, rows=[["1", "2/2"], ["2", "2/2"]])


@pytest.mark.slow
def test_runs_on_ray_share_one_cluster(place):
    ray = TINY.replace("--hardware local", "--hardware cpu:2")
    code, lines = swept(f"{ray} --train.max-steps 5 --grid seed=1,2 --parallel 2")
    assert code == 0, lines
    assert sum("starting Ray" in one for one in lines) == 1
    starts = [read_starts(RunFolder(path)) for path in Path("runs").iterdir()]
    assert [(start["workers"], start["step"]) for (start,) in starts] == [(2, 0)] * 2
