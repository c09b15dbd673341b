"""Both pretraining scripts from end to end: what a run leaves behind, imported games, resuming, what is refused"""

import csv
import dataclasses
import json
import math
import re
import shutil
import signal
from pathlib import Path

import hopplus_ppo
import pretrain_vae as vae
import pretrain_world_model as wm
from evaluation.strangers import STRANGER_PROBS
from stag_hunt_env import ACTION_NAMES, STAY, StagHuntConfig

import numpy as np
import pytest
import torch
from helpers import TINY_FLAGS, lines_of, record_learning_rates, refused, resume, same_tree, start_script
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

SCRIPTS = {"wm": wm, "vae": vae}
both = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
CONFIG = StagHuntConfig(height=3, width=4, num_players=3, num_hares=3, final_time=11)
TINY = {
    wm: {"num_transitions": 1000, "num_updates": 40, "log_every": 10, "batch_size": 32, "wm_hidden": 16},
    vae: {"num_samples": 1000, "epochs": 4, "batch_size": 256, "subgoal_hidden": 8, "goal_dim": 4},
}
STEPS = {wm: [10, 20, 30, 40], vae: [1, 2, 3, 4]}
TAGS = {
    wm: {"losses/world_model", "wm/exact_match", "wm/reward_mse", "wm_final/exact_match/10", "charts/learning_rate"},
    vae: {"losses/total", "losses/moa_cvae", "moa/top1", "moa_prior/nll", "moa/bayes/nll", "moa/ceiling/top1"},
}


def tiny(script, run_dir, **changes):
    common = {"device": "cpu", "run_dir": str(run_dir), "held_out_games": 20, "config": CONFIG}
    return script.Args(**{**common, **TINY[script], **changes})


savefig = Figure.savefig


def draw_first(figure, path, **options):
    """The first seed's: pictures take most of the time"""
    if "__1__" in str(path):
        savefig(figure, path, **options)
    else:
        path.touch()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A small run of each script, two seeds, with pictures: {script: the folders}"""
    found = {}
    for script in SCRIPTS.values():
        run_dir = tmp_path_factory.mktemp("runs")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Figure, "savefig", draw_first)
            patch.setattr(SummaryWriter, "add_figure", lambda *_: None)
            script.main(tiny(script, run_dir, num_seeds=2))
        found[script] = sorted(run_dir.iterdir())
    return found


# ---- What a run leaves behind


@both
def test_what_a_run_leaves_behind(script, runs):
    folders = runs[script]
    assert len(folders) == 2
    assert (folders[0] / "checkpoint.pt").exists()
    for number, folder in enumerate(folders, start=1):
        kind = "structured" if script is wm else "continuous"
        assert re.fullmatch(rf"{script.__name__}__3x4_3h1s_{kind}__{number}__\d+", folder.name)
        assert json.loads((folder / "args.json").read_text())["config"]["final_time"] == 11
        lines = lines_of(folder)
        assert [line["steps"] for line in lines] == STEPS[script]
        assert {path.stem for path in folder.rglob("*.png")} == {"worst_cases" if script is wm else "final"}
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        assert set(events.Tags()["scalars"]) >= TAGS[script]
        for tag in TAGS[script] & lines[0].keys():
            logged = [(event.step, event.value) for event in events.Scalars(tag)]
            assert logged == [(line["steps"], pytest.approx(line[tag], rel=1e-5)) for line in lines]
    first, second = (lines_of(folder)[-1] for folder in folders)
    assert all(first[tag] != second[tag] for tag in first if tag.startswith("losses/"))


def test_each_epoch_leaves_a_table(runs):
    for folder in runs[vae]:
        for name, line in zip(("epoch_1", "epoch_4"), (lines_of(folder)[0], lines_of(folder)[3]), strict=True):
            arrays = np.load(folder / "evaluation" / f"{name}.npz")
            rows = [*csv.DictReader((folder / "evaluation" / f"{name}.csv").open())]
            for predictor in ("moa_prior", "moa", "moa/bayes", "moa/ceiling"):
                assert float(arrays[f"{predictor}/nll"]) == line[f"{predictor}/nll"]
                mine = [row for row in rows if row["predictor"] == predictor]
                assert [row["action"] for row in mine] == [*ACTION_NAMES]
                for figure in vae.ACTION_FIGURES:
                    values = [float(row[figure]) for row in mine]
                    np.testing.assert_allclose(values, arrays[f"{predictor}/{figure}"])


@both
def test_training_and_held_out_games_differ(script, tmp_path):
    """There is a hare for each player, and all go for it: also in the games to measure on"""
    args = tiny(script, tmp_path, population="nearest_hare", held_out_games=40, config=StagHuntConfig())
    train, held_out = script.collect(args, 500, 1, "cpu")
    other, _ = script.collect(args, 500, 2, "cpu")
    assert len(held_out["acted"]) == 40
    starts = [{tuple(row) for row in part["board"][:, 0, 0].tolist()} for part in (train, held_out, other)]
    assert not starts[0] & (starts[1] | starts[2])
    for part in (train, held_out):
        assert not (part["joint"][..., 0][part["acted"]] == STAY).any()


@both
def test_imported_games_are_learned_from_as_own_ones(script, tmp_path, no_pictures):
    """A file of the games that a run plays by itself gives the same run"""
    script.main(tiny(script, tmp_path / "own"))
    args = tiny(script, tmp_path / "imported", data=str(tmp_path / "games.npz"))
    samples = args.num_samples if script is vae else args.num_transitions
    games, held_out = script.collect(dataclasses.replace(args, data=None), samples, args.seed, "cpu")
    both = {name: torch.cat([held_out[name], games[name]]) for name in games}
    np.savez(args.data, setting="3x4_3h1s", strange=np.zeros(3), **both)
    script.main(args)
    rows = [lines_of(next((tmp_path / name).iterdir())) for name in ("own", "imported")]
    assert rows[0] == rows[1]
    if script is vae:
        np.savez(args.data, setting="3x4_3h1s", **{name: x for name, x in both.items() if "/" not in name})
        script.main(dataclasses.replace(args, run_dir=str(tmp_path / "no ceilings")))
        (folder,) = (tmp_path / "no ceilings").iterdir()
        assert lines_of(folder) == [{k: x for k, x in row.items() if not k.startswith(vae.CEILINGS)} for row in rows[0]]


@both
def test_the_learning_rate_falls_once_along_a_cosine(script, tmp_path, monkeypatch, no_pictures):
    """In the whole run, not in each epoch"""
    rates = record_learning_rates(monkeypatch)
    few = {"num_updates": 6, "log_every": 2} if script is wm else {"epochs": 2, "num_samples": 200, "batch_size": 16}
    script.main(tiny(script, tmp_path, **few, learning_rate=0.01))
    (rates,) = rates
    steps = len(rates)
    assert steps >= 4
    assert rates == pytest.approx([0.005 * (1 + math.cos(math.pi * i / steps)) for i in range(steps)])
    (folder,) = tmp_path.iterdir()
    assert lines_of(folder)[-1]["charts/learning_rate"] == rates[-1]


# ---- Start from pretrained


def learner_args(tmp_path, **changes):
    flags = {**TINY_FLAGS, "device": "cpu", "run_dir": str(tmp_path), "num_seeds": 2, "config": CONFIG, **changes}
    return dataclasses.replace(hopplus_ppo.default_args("hopplus", "cpu"), **flags)


def test_hopplus_starts_from_these_checkpoints(tmp_path, runs):
    """Seed s takes the checkpoint's seed s, again from the first where there are fewer; each learner of a seed gets a
    copy."""
    paths = {"vae_checkpoint": str(runs[vae][0]), "world_model_checkpoint": str(runs[wm][0] / "checkpoint.pt")}
    state = hopplus_ppo.TrainState(learner_args(tmp_path, num_seeds=3, **paths), 0, torch.device("cpu"))
    hopplus_ppo.pretrain(state, 0)
    saved = vae.load_checkpoint(paths["vae_checkpoint"], vae.FORMAT)["networks"]
    saved |= wm.load_checkpoint(paths["world_model_checkpoint"], wm.FORMAT)["networks"]
    for name in ("prior", "inference", "moa", "world"):
        for key, ours in state.networks[name].state_dict().items():
            assert torch.equal(ours, saved[name][key][[0, 0, 0, 1, 1, 1, 0, 0, 0]]), (name, key)
            assert not torch.equal(ours[0], ours[3]) or not ours.any()


def test_what_does_not_fit_is_refused(tmp_path, runs, capsys, no_pictures):
    """One stag and 3 hares, or 2 and 2: a VAE's tables have as many rows; a pixel model would be ignored"""
    wm.main(tiny(wm, tmp_path / "pixel", wm_head="pixel"))
    (pixel,) = (tmp_path / "pixel").iterdir()
    other_prey = dataclasses.replace(CONFIG, num_stags=2, num_hares=2)
    longer = dataclasses.replace(CONFIG, final_time=12)  # its MOA's clock has as many ticks
    cases = [
        ({"vae_checkpoint": str(runs[vae][0]), "config": other_prey}, "num_stags is 1, here 2"),
        ({"vae_checkpoint": str(runs[vae][0]), "config": longer}, "final_time is 11, here 12"),
        ({"vae_checkpoint": str(runs[vae][0]), "goal_dim": 5}, "goal_dim is 4, here 5"),
        ({"world_model_checkpoint": str(pixel)}, "'pixel_world' is not used here"),
        ({"world_model_checkpoint": str(runs[vae][0])}, "pretrain_vae 12, not of pretrain_world_model 11"),
    ]
    for flags, reason in cases:
        assert reason in refused(capsys, hopplus_ppo.main, learner_args(tmp_path / "hopplus", **flags))
    assert not (tmp_path / "hopplus").exists()


# ---- Resume


def assert_same_runs(script, first, second):
    """Folders with all seeds"""
    folders = [sorted(path.iterdir()) for path in (first, second)]
    for one, other in zip(*folders, strict=True):
        assert (one / "metrics.jsonl").read_text() == (other / "metrics.jsonl").read_text()
        tables = [{path.name: path.read_bytes() for path in run.glob("evaluation/*.csv")} for run in (one, other)]
        assert tables[0] == tables[1]
        assert len(tables[0]) > 0
    saved = [script.load_checkpoint(str(of_run[0]), script.FORMAT) for of_run in folders]
    for key in saved[0].keys() - {"args", "folder", "folders"}:
        assert same_tree(saved[0][key], saved[1][key]), key


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize(
    ("script", "changes"),
    [(wm, {"wm_head": "pixel", "num_seeds": 2}), (vae, {"goal_kind": "discrete", "loss": "moa"})],
    ids=["pixel", "discrete"],
)
def test_resumed_run_is_the_same_bit_for_bit(script, changes, device, tmp_path, monkeypatch, no_pictures):
    """Killed, moved and resumed"""
    changes = {**changes, "device": device}
    script.main(tiny(script, tmp_path / "whole", **changes))
    write, calls = script.write_checkpoint, []

    def killed_at_the_third(*given):
        calls.append(given)
        if len(calls) == 3:  # its lines are already in metrics.jsonl, its checkpoint is not
            raise KeyboardInterrupt
        write(*given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(script, "write_checkpoint", killed_at_the_third)
        script.main(tiny(script, tmp_path / "killed", **changes))
    shutil.copytree(tmp_path / "killed", tmp_path / "moved")
    (checkpoint,) = (tmp_path / "moved").glob("*/checkpoint.pt")
    assert len(lines_of(checkpoint.parent)) == 3
    resume(script, checkpoint)
    assert_same_runs(script, tmp_path / "whole", tmp_path / "moved")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@both
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(
    script, number, code, runs, tmp_path, monkeypatch, capsys, no_pictures
):
    """Stopped within the second epoch, or block of updates: it is finished, saved, and says how to go on"""
    name = "train_updates" if script is wm else "train_epoch"
    train, calls = getattr(script, name), []

    def interrupted(*given):
        calls.append(name)
        if len(calls) == 2:
            signal.raise_signal(number)
        return train(*given)

    signal.signal(number, lambda *_: pytest.fail("the script does not listen"))
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(script, name, interrupted)
        patch.setattr("sys.argv", ["script.py"])
        script.main(tiny(script, tmp_path / "stopped", num_seeds=2))
    assert stop.value.code == code
    folder = min((tmp_path / "stopped").iterdir())
    assert capsys.readouterr().out.endswith(f"\npython script.py --resume {folder}\n")
    assert [line["steps"] for line in lines_of(folder)] == STEPS[script][:2]
    resume(script, folder)
    assert_same_runs(script, runs[script][0].parent, tmp_path / "stopped")


@both
def test_a_resumed_run_may_get_longer(script, runs, tmp_path, no_pictures):
    flag, length = ("--num-updates", 50) if script is wm else ("--epochs", 5)
    folder = min(Path(shutil.copytree(runs[script][0].parent, tmp_path / "runs")).iterdir())
    start_script(script, "--resume", folder, flag, length)
    assert [line["steps"] for line in lines_of(folder)] == [*STEPS[script], length]


@both
def test_not_a_number_stops_the_run(script, tmp_path, monkeypatch, capsys, no_pictures):
    name = "train_updates" if script is wm else "train_epoch"
    train, calls = getattr(script, name), []

    def poisoned(args, networks, *rest):
        calls.append(name)
        if len(calls) == 2:
            network = networks if script is wm else networks["moa"]
            [*network.params.values()][-1].data.fill_(math.nan)
        return train(args, networks, *rest)

    monkeypatch.setattr(script, name, poisoned)
    line = refused(capsys, script.main, tiny(script, tmp_path))
    assert re.match(r"error: the loss is no number in (epoch 2|update 20)", line)
    (folder,) = tmp_path.iterdir()
    saved = script.load_checkpoint(str(folder), script.FORMAT)["networks"]
    assert all(x.isfinite().all() for weights in saved.values() for x in weights.values())
    assert len(calls) == 2


# ---- What is refused

WRONG_WORDS = [  # scripts, words, what the line says
    ("wm vae", "--learning-rate nan", "learning_rate must be 0 or more"),
    ("wm vae", "--population random,waiting", "waiting"),
    ("wm vae", "--device cuda", "no GPU here"),
    ("wm vae", "--height 16 --width 17", "255"),
    ("wm vae", "--resume {folder} --seed 3", "--seed 3"),
    ("wm vae", "--resume {other}", "is a checkpoint of"),
    ("wm vae", "--run-dir {games}", "cannot write"),
    ("wm vae", "--data {folder}/args.json", "no .npz of arrays"),
    ("vae", "--goal-kind discrete --goal-dim 1", "--goal-dim"),
    ("wm", "--wm-head pixel --wm-channel-weights 1 2", "7 numbers"),
    ("wm", "--wm-channel-weights 1 1 1 1 1 1", "--wm-head pixel"),
]


@both
def test_wrong_words_are_refused_before_anything_is_written(script, runs, tmp_path, monkeypatch, capsys):
    for stranger in STRANGER_PROBS:  # other tests in this process have them
        monkeypatch.delitem(script.game.PLAYER_PROBS, stranger, raising=False)
    (tmp_path / "games").touch()
    files = {"folder": runs[script][0], "other": runs[wm if script is vae else vae][0], "games": tmp_path / "games"}
    before = sorted(runs[script][0].rglob("*"))
    for names, words, reason in WRONG_WORDS:
        if {wm: "wm", vae: "vae"}[script] in names.split():
            given = [word.format_map(files) for word in words.split()]
            board = [] if "--resume" in words else ["--device", "cpu", "--run-dir", tmp_path / "runs"]
            assert reason in refused(capsys, start_script, script, *board, *given), words
    assert [path.name for path in tmp_path.iterdir()] == ["games"]
    assert sorted(runs[script][0].rglob("*")) == before


@both
def test_games_that_do_not_fit_are_refused(script, tmp_path, capsys):
    args = tiny(script, tmp_path / "runs", data=str(tmp_path / "games.npz"))
    games = script.play_games(args, script.StagHuntEnv(CONFIG, 30))
    beyond = {"board": torch.where(games["board"] == 12, 255, games["board"])}
    illegal = {"joint": torch.where(games["acted"][..., None], 5, games["joint"])}
    cases = [  # what is in the file, flags, what the line says
        (games, {"config": dataclasses.replace(CONFIG, height=4, width=3)}, "games of 3x4_3h1s, not of 4x3_3h1s"),
        (games, {"config": dataclasses.replace(CONFIG, num_players=4)}, "board is (30, 11, 3, 8), not (30, 11, 4, 9)"),
        (games, {"config": dataclasses.replace(CONFIG, final_time=9)}, "board is (30, 11, 3, 8), not (30, 9, 3, 8)"),
        (games, {"held_out_games": 30}, "30 games"),
        ({name: x for name, x in games.items() if name != "joint"}, {}, "joint is missing"),
        (games | beyond, {}, "a cell beyond the board"),
        *([(games | illegal, {}, "an action that is not legal")] if script is vae else []),
    ]
    for content, flags, reason in cases:
        np.savez(args.data, setting="3x4_3h1s", **content)
        assert reason in refused(capsys, script.main, dataclasses.replace(args, **flags)), reason
    assert not (tmp_path / "runs").exists()
