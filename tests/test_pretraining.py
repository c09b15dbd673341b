"""Both pretraining scripts from end to end: what a run leaves behind, resuming, and what is refused."""

import csv
import dataclasses
import json
import math
from pathlib import Path

import hopplus_ppo
import pretrain_vae as vae
import pretrain_world_model as wm
import stag_hunt_env as game
from evaluation import world_model
from stag_hunt_env import StagHuntConfig

import numpy as np
import pytest
import torch
from helpers import TINY_FLAGS, lines_of, record_learning_rates, same_tree, write_checkpoint
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._pytree import tree_leaves

SCRIPTS = {"wm": wm, "vae": vae}
both = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
CONFIG = StagHuntConfig(height=3, width=4, num_players=3, num_hares=3, final_time=15)
TINY = {
    wm: {"num_transitions": 1000, "num_updates": 40, "log_every": 10, "batch_size": 32, "wm_hidden": 16},
    vae: {"num_samples": 1000, "epochs": 4, "batch_size": 256, "subgoal_hidden": 8, "goal_dim": 4},
}
STEPS = {wm: [10, 20, 30, 40], vae: [1, 2, 3, 4]}
TAGS = {
    wm: {"losses/world_model", "wm/exact_match", "wm/reward_mse", "wm_final/exact_match/10", "charts/learning_rate"},
    vae: {"losses/total", "losses/moa_cvae", "moa/top1", "moa_prior/nll", "moa/bayes/nll", "moa/ceiling/top1"},
}
PICTURES = {wm: {"cases_worst", "calibration_histogram", "steps_ahead"}, vae: {"confusion", "by_step"}}


def tiny(script, run_dir, **changes):
    common = {"device": "cpu", "run_dir": str(run_dir), "held_out_games": 20, "config": CONFIG}
    return script.make_args(**{**common, **TINY[script], **changes})


@pytest.fixture
def no_pictures(monkeypatch):
    for script in SCRIPTS.values():
        monkeypatch.setattr(script, "draw_pictures", lambda *_: None)
    monkeypatch.setattr(vae, "probe", lambda *given: torch.ones_like(given[3][..., 0], dtype=torch.bool))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A small run of each script, with pictures: {script: (folder, figures)}"""
    found = {}
    for script in SCRIPTS.values():
        run_dir = tmp_path_factory.mktemp("runs")
        found[script] = run_dir, script.main(tiny(script, run_dir, num_seeds=2, held_out_games=60))
    return found


@both
def test_what_a_run_leaves_behind(script, runs):
    run_dir, figures = runs[script]
    folders = sorted(run_dir.iterdir())
    assert len(folders) == 2 and figures["checkpoint"] == str(folders[0] / "checkpoint.pt")
    for folder in folders:
        assert folder.name.startswith(f"{script.__name__}__3x4_3h1s_3hares_")
        saved = json.loads((folder / "args.json").read_text())
        assert saved["num_seeds"] == 2 and saved["config"]["final_time"] == 15
        assert (folder / saved["checkpoint"]).resolve() == Path(figures["checkpoint"]).resolve()
        lines = lines_of(folder)
        assert [line["steps"] for line in lines] == STEPS[script]
        assert {path.stem for path in folder.glob("*.png")} == PICTURES[script]
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        scalars = set(events.Tags()["scalars"])
        assert scalars >= TAGS[script]
        assert set(events.Tags()["images"]) == PICTURES[script]
        for tag in TAGS[script] & lines[0].keys():
            logged = [(event.step, event.value) for event in events.Scalars(tag)]
            assert logged == [(line["steps"], pytest.approx(line[tag], rel=1e-5)) for line in lines]
    undefined = ("precision/", "recall/", "reward_")
    numbers = {name: x for name, x in figures.items() if name != "checkpoint" and not any(u in name for u in undefined)}
    assert all(math.isfinite(x) for x in numbers.values())


def test_tables_of_the_world_model(runs):
    run_dir, figures = runs[wm]
    rows = {row["metric"]: row for row in csv.DictReader((min(run_dir.iterdir()) / "evaluation.csv").open())}
    assert set(rows) == set(figures) - {"checkpoint"} and {f"exact_match/{k}" for k in (1, 3, 5, 10)} <= set(rows)
    for name in ("exact_match", "reward_mse", "possible_boards"):
        seeds = [float(rows[name]["seed_1"]), float(rows[name]["seed_2"])]
        assert float(rows[name]["mean"]) == pytest.approx(np.mean(seeds)) == pytest.approx(figures[name])
    assert figures["possible_boards"] == 1.0 and rows["exact_match"]["seed_1"] != rows["exact_match"]["seed_2"]


def test_tables_of_the_vae(runs):
    run_dir, figures = runs[vae]
    tables = [
        list(csv.DictReader((folder / "evaluation" / "final.csv").open())) for folder in sorted(run_dir.iterdir())
    ]
    assert set(tables[0][0]) == {"metric", *vae.PREDICTORS}
    for name in vae.PREDICTORS:
        nll = [float(row[name]) for table in tables for row in table if row["metric"] == "nll"]
        assert np.mean(nll) == pytest.approx(figures[f"{name}/nll"])
    assert 0 <= figures["with history/probe_accuracy"] <= 1


def test_measuring_a_saved_world_model(runs, tmp_path):
    """Held-out games, not those of the training; the same as at its end; on another board; of a run"""
    _, figures = runs[wm]
    words = [figures["checkpoint"], "--games", "60", "--device", "cpu"]
    again = world_model.main(world_model.parse_args(words))
    assert again == pytest.approx({k: v for k, v in figures.items() if k != "checkpoint"}, rel=1e-5, nan_ok=True)
    other = world_model.main(world_model.parse_args([*words, "--height", "5", "--width", "6"]))
    assert other["possible_boards"] == 1.0 and other["exact_match"] != figures["exact_match"]
    names = sorted(path.name for path in Path(figures["checkpoint"]).parent.glob("world_model_*"))
    assert names == ["world_model_3x4_3h1s_3hares.csv", "world_model_5x6_3h1s_3hares.csv"]

    args = hopplus_ppo.make_args("hopplus", "cpu", **TINY_FLAGS, run_dir=str(tmp_path))
    run = hopplus_ppo.main(args)
    of_run = world_model.main(world_model.parse_args([run["checkpoint"], "--games", "20", "--device", "cpu"]))
    assert of_run["possible_boards"] == 1.0 and "exact_match/5" in of_run
    table = (Path(run["checkpoint"]).parent / "world_model_3x4_3h1s_3hares.csv").read_text()
    assert table.splitlines()[0].endswith("model_0,model_1,model_2"), "each learner's"


def test_a_world_model_that_cannot_be_measured_is_refused(files):
    with pytest.raises(game.UserError, match="holds no world model"):
        world_model.main(world_model.Args(path=files[vae]["checkpoint"]))
    with pytest.raises(game.UserError, match="the pixel head knows one board, 3x4"):
        world_model.main(world_model.Args(path=files[wm]["pixel"], height=6))


def test_pixels_and_discrete_goals(tmp_path, no_pictures):
    figures = vae.main(tiny(vae, tmp_path / "vae", goal_kind="discrete", augment=False))
    assert math.isfinite(figures["with history/nll"])
    pixel = wm.main(tiny(wm, tmp_path / "pixel", wm_head="pixel", wm_channel_weights=(2, 2, 2, 1, 1, 1)))
    assert math.isfinite(pixel["obs_mse"])


def test_the_world_models_learning_rate_falls_along_a_cosine(tmp_path, monkeypatch, no_pictures):
    rates = record_learning_rates(monkeypatch)
    wm.main(tiny(wm, tmp_path, num_transitions=200, num_updates=6, log_every=2, learning_rate=0.01))
    (folder,) = tmp_path.iterdir()
    expected = [0.01, 0.00933, 0.0075, 0.005, 0.0025, 0.00067]
    assert rates == [pytest.approx(expected, rel=1e-2)]
    assert [line["charts/learning_rate"] for line in lines_of(folder)] == pytest.approx(expected[1::2], rel=1e-2)


def test_the_vaes_learning_rate_falls_once_along_a_cosine(tmp_path, monkeypatch, no_pictures):
    """In the whole run, not in each epoch"""
    rates = record_learning_rates(monkeypatch)
    vae.main(tiny(vae, tmp_path, num_samples=200, epochs=2, batch_size=16, learning_rate=0.01))
    (rates,) = rates
    steps = len(rates)
    assert steps >= 4
    assert rates == pytest.approx([0.005 * (1 + math.cos(math.pi * i / steps)) for i in range(steps)])


def test_hopplus_starts_from_these_checkpoints(tmp_path, runs):
    """Seed s takes the checkpoint's seed s; each learner of a seed gets a copy."""
    flags = {"num_envs": 4, "num_steps": 8, "subgoal_hidden": 8, "goal_dim": 4, "wm_hidden": 16, "pretraining_games": 4}
    flags |= {"vae_checkpoint": runs[vae][1]["checkpoint"], "world_model_checkpoint": runs[wm][1]["checkpoint"]}
    args = hopplus_ppo.make_args(device="cpu", num_seeds=2, config=CONFIG, pretraining_updates=2, **flags)
    state = hopplus_ppo.make_train_state(args, [["learner"] * 3] * 2, [1, 2], torch.device("cpu"))
    hopplus_ppo.pretrain(args, state, [1, 2], 0)
    for path, names in (
        (flags["vae_checkpoint"], ("prior", "inference", "moa")),
        (flags["world_model_checkpoint"], ("world",)),
    ):
        saved = torch.load(path, weights_only=True)["networks"]
        for name in names:
            for key, ours in getattr(state.networks, name).state_dict().items():
                assert torch.equal(ours, saved[name][key].repeat_interleave(3, 0)), (name, key)


def test_a_vae_of_other_prey_is_refused(tmp_path, runs):
    """One stag and 3 hares, or 2 and 2: its tables have as many rows"""
    config = dataclasses.replace(CONFIG, num_stags=2, num_hares=2)
    flags = {**TINY_FLAGS, "config": config, "vae_checkpoint": runs[vae][1]["checkpoint"]}
    args = hopplus_ppo.make_args(device="cpu", run_dir=str(tmp_path), **flags)
    with pytest.raises(game.UserError, match="does not fit: num_stags 1, here 2"):
        hopplus_ppo.main(args)


# ---------------------------------------------------------------------------------------------------------------------
# Resume

RESUMED = [
    (wm, {"wm_head": "pixel", "num_seeds": 2}),
    (wm, {}),
    (vae, {"num_seeds": 2}),
    (vae, {"goal_kind": "discrete", "loss": "moa"}),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize(("script", "changes"), RESUMED, ids=["pixel", "wm", "vae", "discrete"])
def test_resumed_run_is_the_same_bit_for_bit(script, changes, device, tmp_path, monkeypatch, no_pictures):
    changes = {**changes, "device": device}
    whole = script.main(tiny(script, tmp_path / "whole", **changes))
    save, calls = game.Run.save, []

    def killed_at_the_third(run, content):
        calls.append(run)
        if len(calls) == 3:  # its lines are already in metrics.jsonl, its checkpoint is not
            raise KeyboardInterrupt
        save(run, content)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(game.Run, "save", killed_at_the_third)
        script.main(tiny(script, tmp_path / "killed", **changes))
    (checkpoint,) = (tmp_path / "killed").glob("*/checkpoint.pt")
    assert len(lines_of(checkpoint.parent)) == 3
    resumed = script.main(script.make_args(resume=str(checkpoint), device=device))
    assert resumed.pop("checkpoint") == str(checkpoint)
    first, second = (torch.load(path, weights_only=True) for path in (whole.pop("checkpoint"), checkpoint))
    assert first.keys() == second.keys()
    for key in {"networks", "moa_prior", "optimizer", "must_match", "step"} & first.keys():
        assert same_tree(first[key], second[key]), key
    assert resumed == pytest.approx(whole, rel=0, abs=0, nan_ok=True)
    texts = [[(f / "metrics.jsonl").read_text() for f in sorted((tmp_path / d).iterdir())] for d in ("whole", "killed")]
    assert texts[0] == texts[1] and len(texts[0]) == changes.get("num_seeds", 1)


@both
def test_not_a_number_stops_the_run(script, tmp_path, monkeypatch, no_pictures):
    name = "train" if script is wm else "train_epoch"
    train, calls = getattr(script, name), []

    def poisoned(args, *rest):
        stacked = rest[0] if script is wm else rest[1]["moa"]
        calls.append(name)
        if len(calls) == 2:
            stacked.parameters()[-1].data.fill_(math.nan)
        return train(args, *rest)

    monkeypatch.setattr(script, name, poisoned)
    with pytest.raises(FloatingPointError, match=r"losses/(world_model|moa_cvae)"):
        script.main(tiny(script, tmp_path))
    (checkpoint,) = tmp_path.glob("*/checkpoint.pt")
    rows = lines_of(checkpoint.parent)
    assert len(calls) == len(rows) == 2 and None in rows[1].values(), "the bad row is in the log"
    saved = torch.load(checkpoint, weights_only=True)["networks"]
    assert all(x.isfinite().all() for x in tree_leaves(saved)), "the one before is not overwritten"


# ---------------------------------------------------------------------------------------------------------------------
# What is refused

REFUSED = [  # scripts, flags ("{...}" stands for a file), what the error must name
    ("both", {"resume": "{missing}"}, ["no ", "checkpoint", "missing"]),
    ("both", {"resume": "{cut}"}, ["cut short", "bytes"]),
    ("both", {"resume": "{other}"}, [wm.FORMAT, vae.FORMAT]),
    ("both", {"resume": "{abacus}"}, ["abacus", "cpu"]),
    ("both", {"resume": "{checkpoint}", "learning_rate": 0.5}, ["--learning-rate 0.5: the resumed run has 0.00"]),
    ("both", {"population": "random,nearest_wolf"}, ["nearest_wolf"]),
    ("both", {"learning_rate": 0.0}, ["--learning-rate", "0.0"]),
    ("both", {"run_dir": "{text}"}, ["could not write to", "text"]),
    ("both", {"config": StagHuntConfig(height=16, width=17)}, ["272"]),
    ("vae", {"goal_kind": "discrete", "goal_dim": 1}, ["--goal-dim"]),
    ("wm", {"wm_head": "pixel", "wm_channel_weights": (1.0, 2.0)}, ["6"]),
    ("wm", {"wm_channel_weights": (1.0,) * 6}, ["pixel"]),
]
CASES = [(name, flags, words) for which, flags, words in REFUSED for name in SCRIPTS if which in ("both", name)]


@pytest.fixture(scope="module")
def files(runs, tmp_path_factory):
    """{script: {name: path}}"""
    folder, found = tmp_path_factory.mktemp("files"), {}
    (folder / "text").write_text("hello\n")
    for script, other in ((wm, vae), (vae, wm)):
        checkpoint = runs[script][1]["checkpoint"]
        paths = {"missing": folder / "missing", "text": folder / "text", "checkpoint": checkpoint}
        paths |= {name: folder / f"{script.__name__} {name}" for name in ("cut", "abacus", "pixel")}
        paths["other"] = runs[other][1]["checkpoint"]
        whole, content = Path(checkpoint).read_bytes(), torch.load(checkpoint, weights_only=True)
        paths["cut"].write_bytes(whole[: len(whole) // 2])
        write_checkpoint(paths["abacus"], content | {"device": "abacus"})
        write_checkpoint(paths["pixel"], content | {"args": content["args"] | {"wm_head": "pixel"}})
        found[script] = {name: str(path) for name, path in paths.items()}
    return found


@pytest.mark.parametrize(("name", "flags", "words"), CASES, ids=[f"{s} {' '.join(map(str, f))}" for s, f, _ in CASES])
def test_refused_before_anything_is_written(name, flags, words, files, tmp_path):
    script, run_dir = SCRIPTS[name], tmp_path / "runs"
    flags = {k: v.format_map(files[script]) if isinstance(v, str) else v for k, v in flags.items()}
    folder = Path(files[script]["checkpoint"]).parent
    before = sorted(folder.rglob("*"))
    with pytest.raises(ValueError) as error:
        resumed = "resume" in flags
        script.main(
            script.make_args(device="cpu", **flags) if resumed else tiny(script, **{"run_dir": run_dir, **flags})
        )
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message
    assert not run_dir.exists() and sorted(folder.rglob("*")) == before
