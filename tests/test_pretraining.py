"""Both pretraining scripts from end to end: what a run leaves behind, resuming, and what is refused."""

import csv
import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import NoNonFiniteCasts
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import pretrain_vae as vae
import pretrain_world_model as wm
from stag_hunt_env import StagHuntConfig, StagHuntFlags

SCRIPTS = {"wm": wm, "vae": vae}
both = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
CONFIG = StagHuntFlags(height=3, width=4, num_players=3, num_hares=3, final_time=15)
COUNTER = {wm: "update", vae: "epoch"}
TINY = {
    wm: {
        "num_transitions": 1000,
        "num_updates": 40,
        "log_every": 10,
        "batch_size": 32,
        "wm_hidden": 16,
        "learning_rate": 0.01,
    },
    vae: {"num_samples": 1000, "epochs": 4, "batch_size": 256, "hidden": 8, "goal_dim": 4, "num_goals": 3},
}
TAGS = {
    wm: {"losses/world_model", "wm/exact_match", "wm/reward_mse", "wm/per_channel_mse/0", "wm_final/exact_match/10"},
    vae: {"losses/total", "losses/moa_cvae", "moa/top1", "moa_state/nll", "moa/recall/3", "ceiling/Bayes from history/nll"},
}
MANY = {wm: {"held_out_games": 300}, vae: {}}
PICTURES = {
    wm: {"cases_worst", "cases_random", "calibration_histogram", "calibration_scatter", "steps_ahead"},
    vae: {"class_distribution", "confusion", "recall", "loss", "by_step"},
}


def tiny(script, run_dir, **changes):
    common = {"device": "cpu", "run_dir": str(run_dir), "held_out_games": 20, "config": CONFIG}
    return script.Args(**{**common, **TINY[script], **changes})


@pytest.fixture
def no_pictures(monkeypatch):
    probe = vae.probe
    for script, names in ((wm, ("draw_cases", "draw_summary")), (vae, ("draw",))):
        for name in names:
            monkeypatch.setattr(script, name, lambda *_: None)
    monkeypatch.setattr(vae, "probe", lambda *args: probe(*args, steps=2))


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A small run of each script, with pictures and a data file: {script: (folder, figures, data file)}"""
    found = {}
    for script in SCRIPTS.values():
        run_dir = tmp_path_factory.mktemp("runs")
        data = run_dir.parent / f"{script.__name__}_games.pt"
        figures = script.main(tiny(script, run_dir, num_seeds=2, save_data=str(data), **MANY[script]))
        found[script] = run_dir, figures, data
    return found


@both
def test_what_a_run_leaves_behind(script, runs):
    run_dir, figures, _ = runs[script]
    folders = sorted(run_dir.iterdir())
    assert len(folders) == 2 and figures["checkpoint"] == str(folders[0] / "checkpoint.pt")
    for folder in folders:
        saved = json.loads((folder / "args.json").read_text())
        assert saved["num_seeds"] == 2 and saved["config"]["final_time"] == 15
        counts = [line[COUNTER[script]] for line in lines_of(folder)]
        assert counts == ([10, 20, 30, 40] if script is wm else [1, 2, 3, 4])
        assert {path.stem for path in folder.glob("*.png")} == PICTURES[script]
        for path in folder.glob("*.png"):
            picture = script.read_picture(path)
            assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.std() > 1
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        assert set(events.Tags()["scalars"]) >= TAGS[script] and set(events.Tags()["images"]) == PICTURES[script]
        tag = "losses/world_model" if script is wm else "losses/total"
        logged = [(event.step, event.value) for event in events.Scalars(tag)]
        key = "loss" if script is wm else tag
        assert logged == [(c, pytest.approx(line[key], rel=1e-5)) for c, line in zip(counts, lines_of(folder), strict=True)]
    numbers = {key: x for key, x in figures.items() if key != "checkpoint" and not key.startswith(("reward_", "ceiling"))}
    may_be_undefined = ("precision/", "recall/")
    undefined = [key for key, x in numbers.items() if not math.isfinite(x) and not any(u in key for u in may_be_undefined)]
    assert undefined == []


def test_tables_of_the_world_model(runs):
    run_dir, figures, _ = runs[wm]
    folder = min(run_dir.iterdir())
    rows = {row["metric"]: row for row in csv.DictReader((folder / "evaluation.csv").open())}
    assert set(rows) == set(figures) - {"checkpoint"} and {f"exact_match/{k}" for k in (1, 3, 5, 10)} <= set(rows)
    for name in ("exact_match", "reward_mse", "possible_boards"):
        seeds = [float(rows[name]["seed_1"]), float(rows[name]["seed_2"])]
        assert float(rows[name]["mean"]) == pytest.approx(np.mean(seeds)) == pytest.approx(figures[name])
    assert figures["possible_boards"] == 1.0 and rows["exact_match"]["seed_1"] != rows["exact_match"]["seed_2"]


def test_tables_of_the_vae(runs):
    run_dir, figures, _ = runs[vae]
    folder = min(run_dir.iterdir()) / "evaluation"
    names = {f"{name}.{end}" for name in ("epoch_1", "epoch_2", "epoch_3", "epoch_4", "final") for end in ("csv", "npz")}
    assert {path.name for path in folder.iterdir()} == names
    rows = {row["metric"]: row for row in csv.DictReader((folder / "final.csv").open())}
    assert set(next(iter(rows.values()))) == {"metric", *vae.PREDICTORS}
    arrays = np.load(folder / "final.npz")
    for name in vae.PREDICTORS:
        confusion = arrays["confusion/" + name.replace(" ", "_").replace(":", "")]
        assert confusion.shape == (7, 7) and confusion.sum() == pytest.approx(
            sum(float(rows[f"count/{a}"][name]) for a in range(7))
        )
    assert 0 <= figures["with history/probe_accuracy"] <= 1


def test_evaluating_a_checkpoint(runs, no_pictures):
    _, figures, _ = runs[wm]
    again = wm.main(wm.Args(evaluate=figures["checkpoint"], device="cpu"))
    assert again == pytest.approx({k: v for k, v in figures.items() if k != "checkpoint"}, rel=1e-5, nan_ok=True)
    other = wm.main(wm.Args(evaluate=figures["checkpoint"], evaluate_board="5x6", device="cpu"))
    assert other["possible_boards"] == 1.0 and other["exact_match"] != figures["exact_match"]


def test_few_held_out_games_can_be_drawn(tmp_path):
    wm.main(tiny(wm, tmp_path, held_out_games=8, num_updates=1))
    assert {path.stem for path in tmp_path.glob("*/*.png")} == PICTURES[wm]


def test_ensemble_and_discrete_goals(tmp_path, no_pictures):
    figures = wm.main(tiny(wm, tmp_path / "wm", wm_ensemble=2, num_updates=2, learning_rate=1e-6))
    assert 0 < figures["disagreement"] <= 1
    assert "disagreement" in lines_of(next((tmp_path / "wm").iterdir()))[-1]
    figures = vae.main(tiny(vae, tmp_path / "vae", goal_kind="discrete"))
    assert math.isfinite(figures["with history/nll"])
    pixel = wm.main(tiny(wm, tmp_path / "pixel", wm_head="pixel", wm_channel_weights=(2, 2, 2, 1, 1, 1)))
    assert math.isfinite(pixel["obs_mse"])


@both
def test_a_data_file_gives_the_same_run(script, runs, tmp_path, no_pictures):
    _, figures, data = runs[script]
    again = script.main(tiny(script, tmp_path, num_seeds=2, data=str(data), **MANY[script]))
    figures, again = ({k: v for k, v in f.items() if k != "checkpoint" and "probe" not in k} for f in (figures, again))
    assert again == pytest.approx(figures, rel=1e-6, nan_ok=True)


@both
def test_training_and_held_out_games_differ(script):
    train, held_out = script.collect(StagHuntConfig(), ("random",), 1, 500, 40, "cpu")
    starts = [{tuple(p) for p in g.states.position[:, 0].tolist()} for g in (train, held_out)]
    other = script.collect(StagHuntConfig(), ("random",), 2, 500, 40, "cpu")[0]
    assert len(starts[0] & starts[1]) < 10 and not torch.equal(train.actions, other.actions)
    assert int(train.acted.sum()) >= 500 and len(held_out.actions) == 40


# ---------------------------------------------------------------------------------------------------------------------
# Resume

RESUMED = [
    (wm, {}),
    (wm, {"wm_head": "pixel", "wm_ensemble": 2}),
    (vae, {"num_seeds": 2}),
    (vae, {"goal_kind": "discrete", "loss": "moa"}),
]


def same_tree(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_tree(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same_tree(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize(("script", "changes"), RESUMED, ids=["wm", "pixel ensemble", "vae", "discrete"])
def test_resumed_run_is_the_same_bit_for_bit(script, changes, device, tmp_path, monkeypatch, no_pictures):
    changes = {**changes, "device": device}
    whole = script.main(tiny(script, tmp_path / "whole", **changes))
    save, calls = script.save_atomically, []

    def killed_at_the_third(path, content):
        calls.append(path)
        if len(calls) == 3:  # its lines are already in metrics.jsonl, its checkpoint is not
            raise KeyboardInterrupt
        save(path, content)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(script, "save_atomically", killed_at_the_third)
        script.main(tiny(script, tmp_path / "killed", **changes))
    (checkpoint,) = (tmp_path / "killed").glob("*/checkpoint.pt")
    assert len(lines_of(checkpoint.parent)) == 3
    resumed = script.main(script.Args(resume=str(checkpoint), device=device, seed=77))
    assert resumed.pop("checkpoint") == str(checkpoint)
    first, second = (torch.load(path, weights_only=True) for path in (whole.pop("checkpoint"), checkpoint))
    for key in ("model", "optimiser", "generators" if script is wm else "generator"):
        assert same_tree(first[key], second[key]), key
    assert resumed == pytest.approx(whole, rel=0, abs=0, nan_ok=True)
    texts = [[(f / "metrics.jsonl").read_text() for f in sorted((tmp_path / name).iterdir())] for name in ("whole", "killed")]
    assert texts[0] == texts[1] and len(texts[0]) == changes.get("num_seeds", 1)


@both
def test_failing_write_leaves_the_last_checkpoint(script, tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    script.save_atomically(path, {"format": "x", "number": 1})

    def disk_full(content, target):
        Path(target).write_bytes(b"half of it")
        raise OSError("no space left")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(torch, "save", disk_full)
        script.save_atomically(path, {"format": "x", "number": 2})
    assert script.load_file(path, "x", "checkpoint")["number"] == 1


@both
def test_not_a_number_stops_the_run(script, tmp_path, monkeypatch, no_pictures):
    name = "train" if script is wm else "train_epoch"
    train, calls = getattr(script, name), []

    def poisoned(args, *rest):
        model = rest[0] if script is wm else rest[1].moa
        calls.append(name)
        if len(calls) == 2:
            with torch.no_grad():
                list(model.parameters())[-2].view(-1)[0] = math.nan
        return train(args, *rest)

    monkeypatch.setattr(script, name, poisoned)
    with pytest.raises(FloatingPointError, match=r"losses/(world_model|moa_cvae)") as error, NoNonFiniteCasts() as seen:
        script.main(tiny(script, tmp_path))
    assert seen.casts > 0
    (bad,) = tmp_path.glob("*/checkpoint_bad.pt")
    assert str(bad) in str(error.value) and len(calls) == 2
    good = torch.load(bad.parent / "checkpoint.pt", weights_only=True)  # the one before is not overwritten
    assert all(x.isfinite().all() for x in good["model"].values())
    assert not all(x.isfinite().all() for x in torch.load(bad, weights_only=True)["model"].values())
    assert len(lines_of(bad.parent)) == 1


@both
@pytest.mark.filterwarnings("error:invalid value encountered in cast")
def test_no_cast_depends_on_the_machine(script, tmp_path, monkeypatch, no_pictures):
    """Not even if the last update makes the model's weights NaN: it is measured before the next loss tells."""
    name = "train" if script is wm else "train_epoch"
    train, calls = getattr(script, name), []

    def poisoned(args, *rest):
        losses, model = train(args, *rest), rest[0] if script is wm else rest[1].moa
        calls.append(name)
        if len(calls) == 4:
            with torch.no_grad():
                list(model.parameters())[-2].fill_(math.nan)
        return losses

    monkeypatch.setattr(script, name, poisoned)
    with NoNonFiniteCasts() as seen:
        script.main(tiny(script, tmp_path))
    assert seen.casts > 0 and len(calls) == 4


@both
def test_what_cannot_be_drawn_costs_nothing(script, tmp_path, monkeypatch, capsys):
    class DiskFull:
        def __init__(self, *_, **__):
            pass

        def add_scalar(self, *_):
            raise OSError("no space left")

    def fails(*_):
        raise RuntimeError("singular")

    monkeypatch.setattr(script, "SummaryWriter", DiskFull)
    monkeypatch.setattr(script, "draw" if script is vae else "draw_summary", fails)
    figures = script.main(tiny(script, tmp_path))
    said = capsys.readouterr().out
    assert "could not draw: RuntimeError: singular; the run goes on\n" in said
    assert said.count("could not write to TensorBoard: OSError: no space left; the run goes on\n") == 5
    assert torch.load(figures["checkpoint"], weights_only=True)["epoch" if script is vae else "updates"] in (4, 40)
    assert len(lines_of(Path(figures["checkpoint"]).parent)) == 4


# ---------------------------------------------------------------------------------------------------------------------
# What is refused

OTHER_BOARD = dataclasses.replace(CONFIG, height=5, width=6)
REFUSED = [  # scripts, flags ("{...}" stands for a file), what the error must name
    ("both", {"data": "{missing}"}, ["no data file", "missing"]),
    ("both", {"data": "{cut data}"}, ["cut short", "bytes"]),
    ("both", {"data": "{text}"}, ["readable"]),
    ("both", {"data": "{checkpoint}"}, ["format", "stag-hunt-games-1"]),
    ("both", {"data": "{data}", "config": OTHER_BOARD}, ["height 3", "5", "width 4", "6"]),
    ("both", {"data": "{data}", "num_seeds": 3}, ["2 seeds", "3"]),
    ("wm", {"data": "{data}", "num_seeds": 2, "num_transitions": 10**7}, ["holds", "10000000"]),
    ("vae", {"data": "{data}", "num_seeds": 2, "num_samples": 10**7}, ["holds", "10000000"]),
    ("both", {"resume": "{missing}"}, ["no ", "checkpoint", "missing"]),
    ("both", {"resume": "{cut checkpoint}"}, ["cut short"]),
    ("both", {"resume": "{text}"}, ["readable"]),
    ("both", {"resume": "{data}"}, ["stag-hunt-games-1"]),
    ("both", {"resume": "{other checkpoint}"}, ["world-model-3", "subgoals-2"]),
    ("both", {"players": ("random", "nearest_wolf")}, ["nearest_wolf"]),
    ("both", {"players": ()}, ["--players"]),
    ("both", {"learning_rate": 0.0}, ["--learning-rate", "0.0"]),
    ("both", {"max_grad_norm": math.nan}, ["--max-grad-norm", "nan"]),
    ("vae", {"kl_coef": math.nan}, ["--kl-coef", "nan"]),
    ("both", {"data": "{data}", "num_seeds": 2, "players": ("random",)}, ["holds games of", "nearest_stag"]),
    ("both", {"resume": "{checkpoint of another device}"}, ["abacus", "cpu"]),
    ("wm", {"config": StagHuntFlags(prosocial=True)}, ["--prosocial", "pixel"]),
    ("both", {"held_out_games": 0}, ["--held-out-games", "0"]),
    ("both", {"num_seeds": 0}, ["--num-seeds"]),
    ("both", {"config": StagHuntFlags(height=2, width=2)}, ["2x2"]),
    ("vae", {"epochs": 0}, ["--epochs", "0"]),
    ("vae", {"temperature": (1.0, 0.0)}, ["--temperature"]),
    ("vae", {"config": StagHuntFlags(height=16, width=17)}, ["272"]),
    ("wm", {"num_updates": 0}, ["--num-updates", "0"]),
    ("wm", {"wm_head": "pixel", "wm_channel_weights": (1.0, 2.0)}, ["6", "2"]),
    ("wm", {"wm_channel_weights": (1.0,) * 7}, ["pixel"]),
    ("wm", {"evaluate_board": "6x9"}, ["--evaluate"]),
    ("wm", {"evaluate": "{missing}"}, ["checkpoint", "missing"]),
    ("wm", {"evaluate": "{cut checkpoint}"}, ["cut short"]),
    ("wm", {"evaluate": "{checkpoint}", "evaluate_board": "sixbynine"}, ["sixbynine"]),
    ("wm", {"evaluate": "{pixel checkpoint}", "evaluate_board": "6x9"}, ["pixel", "3x4"]),
    ("wm", {"evaluate": "{checkpoint}", "resume": "{checkpoint}"}, ["--evaluate", "--resume"]),
]
CASES = [(s, flags, words) for which, flags, words in REFUSED for s in SCRIPTS if which in ("both", s)]


@pytest.fixture(scope="module")
def files(runs, tmp_path_factory):
    """{script: {name: path}}"""
    folder, found = tmp_path_factory.mktemp("files"), {}
    (folder / "text").write_text("hello\n")
    for script, other in ((wm, vae), (vae, wm)):
        _, figures, data = runs[script]
        checkpoint = figures["checkpoint"]
        paths = {"missing": folder / "missing", "text": folder / "text", "data": data, "checkpoint": checkpoint}
        paths["other checkpoint"] = runs[other][1]["checkpoint"]
        for name, whole in (("cut data", data), ("cut checkpoint", checkpoint)):
            paths[name] = folder / f"{script.__name__} {name}"
            content = Path(whole).read_bytes()
            paths[name].write_bytes(content[: len(content) // 2])
        content = torch.load(checkpoint, weights_only=True)
        paths["checkpoint of another device"] = folder / f"{script.__name__} abacus"
        script.save_atomically(paths["checkpoint of another device"], content | {"device": "abacus"})
        found[script] = paths
    content = torch.load(found[wm]["checkpoint"], weights_only=True)
    content["args"]["wm_head"] = "pixel"
    found[wm]["pixel checkpoint"] = folder / "pixel checkpoint"
    wm.save_atomically(folder / "pixel checkpoint", content)
    return found


@pytest.mark.parametrize(
    ("name", "flags", "words"), CASES, ids=[f"{s} {' '.join(map(str, f.values()))}"[:50] for s, f, _ in CASES]
)
def test_refused_before_anything_is_written(name, flags, words, files, tmp_path):
    script = SCRIPTS[name]
    flags = {
        k: v.format_map({n: str(p) for n, p in files[script].items()}) if isinstance(v, str) else v for k, v in flags.items()
    }
    run_dir = tmp_path / "runs"
    before = sorted(Path(files[script]["checkpoint"]).parent.rglob("*"))
    with pytest.raises(ValueError) as error:
        script.main(tiny(script, run_dir, **flags))
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message
    assert not run_dir.exists() and sorted(Path(files[script]["checkpoint"]).parent.rglob("*")) == before


@both
def test_errors_on_the_command_line(script, tmp_path):
    path = Path(script.__file__).resolve()
    command = [sys.executable, str(path), "--data", "nowhere.pt", "--run-dir", "runs", "--device", "cpu"]
    env = {**os.environ, "PYTHONPATH": str(path.parent)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
    assert done.returncode == 2 and done.stderr == "error: there is no data file nowhere.pt\n" and not any(tmp_path.iterdir())


@both
def test_every_flag_has_a_help_text(script):
    source = Path(script.__file__).read_text()
    for field in dataclasses.fields(script.Args):
        if field.name != "config":
            line = source.split(f"    {field.name}: ", 1)[1].split("\n", 2)[1]
            assert line.startswith('    """') and len(line) > 20, field.name
