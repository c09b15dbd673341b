"""Both pretraining scripts from end to end: what a run leaves behind, imported games, resuming, what is refused"""

import csv
import dataclasses
import json
import math
import re
import shutil
import signal
import sys
import textwrap
from pathlib import Path

import hopplus_ppo
import pretrain_vae as vae
import pretrain_world_model as wm
from evaluation.strangers import STRANGER_PROBS
from stag_hunt_env import ACTION_NAMES, STAY, StagHuntConfig

import numpy as np
import pytest
import torch
from helpers import TINY_FLAGS, lines_of, record_learning_rates, same_tree
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

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


def tiny(script, run_dir, **changes):
    common = {"device": "cpu", "run_dir": str(run_dir), "held_out_games": 20, "config": CONFIG}
    return script.Args(**{**common, **TINY[script], **changes})


def resume(script, path, **changes):
    saved = script.load_checkpoint(str(path), script.FORMAT)["args"]
    saved |= {"config": StagHuntConfig(**saved["config"]), "resume": str(path), **changes}
    script.main(script.Args(**saved))


def refused(script, words, monkeypatch, capsys):
    """Starts the script with these words -> the one line that says why it does not run"""
    monkeypatch.setattr(sys, "argv", ["script", *words])
    entry = Path(script.__file__).read_text().split('\nif __name__ == "__main__":\n')[1]
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        exec(textwrap.dedent(entry), script.__dict__ | {"__name__": "__main__"})
    assert stop.value.code == 1
    (line,) = re.findall(r"error: [^\r\n]*", capsys.readouterr().err)  # beside a progress bar
    return line


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr(Figure, "savefig", lambda *args, **kwargs: None)
    monkeypatch.setattr(SummaryWriter, "add_figure", lambda *args, **kwargs: None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A small run of each script, two seeds, with pictures: {script: the folders}"""
    found = {}
    for script in SCRIPTS.values():
        run_dir = tmp_path_factory.mktemp("runs")
        script.main(tiny(script, run_dir, num_seeds=2, held_out_games=60))
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
        assert json.loads((folder / "args.json").read_text())["config"]["final_time"] == 15
        lines = lines_of(folder)
        assert [line["steps"] for line in lines] == STEPS[script]
        assert {path.stem for path in folder.rglob("*.png")} == {"worst_cases" if script is wm else "final"}
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        assert set(events.Tags()["scalars"]) >= TAGS[script]
        assert len(events.Tags()["images"]) == 1
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


def test_pixels_and_discrete_goals(tmp_path, no_pictures):
    vae.main(tiny(vae, tmp_path / "vae", goal_kind="discrete", augment=False))
    wm.main(tiny(wm, tmp_path / "wm", wm_head="pixel", wm_channel_weights=(2, 2, 2, 1, 1, 1)))
    for kind, figure in (("vae", "moa/nll"), ("wm", "wm/obs_mse")):
        (folder,) = (tmp_path / kind).iterdir()
        assert lines_of(folder)[-1][figure] < lines_of(folder)[0][figure]


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
    """Seed s takes the checkpoint's seed s; each learner of a seed gets a copy."""
    paths = {"vae_checkpoint": str(runs[vae][0]), "world_model_checkpoint": str(runs[wm][0] / "checkpoint.pt")}
    state = hopplus_ppo.TrainState(learner_args(tmp_path, **paths), 0, torch.device("cpu"))
    hopplus_ppo.pretrain(state, 0)
    saved = vae.load_checkpoint(paths["vae_checkpoint"], vae.FORMAT)["networks"]
    saved |= wm.load_checkpoint(paths["world_model_checkpoint"], wm.FORMAT)["networks"]
    for name in ("prior", "inference", "moa", "world"):
        for key, ours in state.networks[name].state_dict().items():
            assert torch.equal(ours, saved[name][key].repeat_interleave(3, 0)), (name, key)
            assert not torch.equal(ours[0], ours[3]) or not ours.any()


def test_what_does_not_fit_is_refused(tmp_path, runs, capsys, no_pictures):
    """One stag and 3 hares, or 2 and 2: a VAE's tables have as many rows; a pixel model would be ignored"""
    wm.main(tiny(wm, tmp_path / "pixel", wm_head="pixel"))
    (pixel,) = (tmp_path / "pixel").iterdir()
    other_prey = dataclasses.replace(CONFIG, num_stags=2, num_hares=2)
    cases = [
        ({"vae_checkpoint": str(runs[vae][0]), "config": other_prey}, "num_stags is 1, here 2"),
        ({"vae_checkpoint": str(runs[vae][0]), "goal_dim": 5}, "goal_dim is 4, here 5"),
        ({"world_model_checkpoint": str(pixel)}, "'pixel_world' is not used here"),
        ({"world_model_checkpoint": str(runs[vae][0])}, "pretrain_vae 11, not of pretrain_world_model 11"),
    ]
    for flags, reason in cases:
        with pytest.raises(SystemExit):
            hopplus_ppo.main(learner_args(tmp_path / "hopplus", **flags))
        assert reason in capsys.readouterr().err
    assert not (tmp_path / "hopplus").exists()


# ---- Resume

RESUMED = [
    (wm, {"wm_head": "pixel", "num_seeds": 2}),
    (wm, {}),
    (vae, {"num_seeds": 2}),
    (vae, {"goal_kind": "discrete", "loss": "moa"}),
]


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
@pytest.mark.parametrize(("script", "changes"), RESUMED, ids=["pixel", "wm", "vae", "discrete"])
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
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(script, number, code, tmp_path, monkeypatch, capsys):
    """Stopped within the second epoch, or block of updates: it is finished, saved, and says how to go on"""
    monkeypatch.setattr(Figure, "savefig", lambda *args, **kwargs: None)
    script.main(tiny(script, tmp_path / "whole"))
    name = "train_updates" if script is wm else "train_epoch"
    train, calls = getattr(script, name), []

    def interrupted(*given):
        calls.append(name)
        if len(calls) == 2:
            signal.raise_signal(number)
        return train(*given)

    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(script, name, interrupted)
        patch.setattr(sys, "argv", ["script.py"])
        script.main(tiny(script, tmp_path / "stopped"))
    for each, handler in handlers.items():
        signal.signal(each, handler)
    assert stop.value.code == code
    (folder,) = (tmp_path / "stopped").iterdir()
    assert capsys.readouterr().out.endswith(f"\npython script.py --resume {folder}\n")
    assert [line["steps"] for line in lines_of(folder)] == STEPS[script][:2]
    resume(script, folder)
    assert_same_runs(script, tmp_path / "whole", tmp_path / "stopped")


@both
def test_weights_of_other_shapes_are_refused(script, runs, capsys):
    """As in an edited copy"""
    wider, tensor = ({"wm_hidden": 17}, "trunk.2.weight") if script is wm else ({"subgoal_hidden": 9}, "head.weight")
    before = sorted(runs[script][0].rglob("*"))
    with pytest.raises(SystemExit):
        resume(script, runs[script][0], **wider)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the checkpoint does not fit: ") and f"size mismatch for {tensor}" in line
    assert sorted(runs[script][0].rglob("*")) == before


@both
def test_a_resumed_run_may_get_longer(script, tmp_path, monkeypatch, no_pictures):
    length = "num_updates" if script is wm else "epochs"
    script.main(tiny(script, tmp_path, **{length: STEPS[script][1]}))
    (folder,) = tmp_path.iterdir()
    assert [line["steps"] for line in lines_of(folder)] == STEPS[script][:2]
    flag = f"--{length.replace('_', '-')}"
    monkeypatch.setattr(sys, "argv", ["script", "--resume", str(folder), flag, str(STEPS[script][-1])])
    script.main(script.parse_args())
    assert [line["steps"] for line in lines_of(folder)] == STEPS[script]


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
    with pytest.raises(SystemExit) as stop:
        script.main(tiny(script, tmp_path))
    assert stop.value.code == 1
    assert re.search(r"error: the loss is no number in (epoch 2|update 20)", capsys.readouterr().err)
    (folder,) = tmp_path.iterdir()
    saved = script.load_checkpoint(str(folder), script.FORMAT)["networks"]
    assert all(x.isfinite().all() for weights in saved.values() for x in weights.values())
    assert len(calls) == 2


# ---- What is refused

REFUSED = [  # scripts, words ("{...}" stands for a file), what the line says
    ("both", "--resume {missing}", "there is no"),
    ("both", "--resume {cut}", "damaged or no checkpoint"),
    ("both", "--resume {other}", "is a checkpoint of"),
    ("both", "--resume {checkpoint} --seed 3", "--seed 3"),
    ("both", "--population random,nearest_wolf", "nearest_wolf"),
    ("both", "--population random,waiting", "waiting"),
    ("both", "--learning-rate nan", "learning_rate must be 0 or more"),
    ("both", "--batch-size 0", "batch_size must be 1 or more"),
    ("both", "--device cuda", "no GPU here"),
    ("both", "--run-dir {text}", "cannot write"),
    ("both", "--height 16 --width 17", "255"),
    ("both", "--data {missing}", "no such file"),
    ("both", "--data {text}", "no .npz of arrays"),
    ("both", "--data {games} --height 4 --width 3", "games of 3x4_3h1s, not of 4x3_3h1s"),
    ("both", "--data {games} --num-players 4", "board is (30, 15, 3, 8), not (30, 15, 4, 9)"),
    ("both", "--data {games} --final-time 9", "board is (30, 15, 3, 8), not (30, 9, 3, 8)"),
    ("both", "--data {games} --held-out-games 30", "30 games"),
    ("both", "--data {no_joint}", "joint is missing"),
    ("both", "--data {beyond}", "a cell beyond the board"),
    ("vae", "--data {illegal}", "an action that is not legal"),
    ("vae", "--goal-kind discrete --goal-dim 1", "--goal-dim"),
    ("wm", "--wm-head pixel --wm-channel-weights 1 2", "6 numbers"),
    ("wm", "--wm-channel-weights 1 1 1 1 1 1", "--wm-head pixel"),
]
CASES = [(name, words, reason) for which, words, reason in REFUSED for name in SCRIPTS if which in ("both", name)]


@pytest.fixture(scope="module")
def files(runs, tmp_path_factory):
    """{script: {name: path}}"""
    folder, found = tmp_path_factory.mktemp("files"), {}
    (folder / "text").write_text("hello\n")
    for script, other in ((wm, vae), (vae, wm)):
        checkpoint = runs[script][0] / "checkpoint.pt"
        names = ("cut", "games.npz", "no joint.npz", "beyond.npz", "illegal.npz")
        paths = {name.partition(".")[0]: folder / f"{script.__name__} {name}" for name in names}
        paths |= {"missing": folder / "missing", "text": folder / "text", "checkpoint": checkpoint}
        paths["other"] = runs[other][0]
        whole = checkpoint.read_bytes()
        paths["cut"].write_bytes(whole[: len(whole) // 2])
        args = tiny(script, folder)
        games = script.play_games(args, script.StagHuntEnv(CONFIG, 30))
        illegal = torch.where(games["acted"][..., None], 5, games["joint"])
        contents = {
            "games": games,
            "no joint": {name: x for name, x in games.items() if name != "joint"},
            "beyond": games | {"board": torch.where(games["board"] == 12, 255, games["board"])},
            "illegal": games | {"joint": illegal},
        }
        for name, content in contents.items():
            np.savez(paths[name], setting="3x4_3h1s", **content)
        found[script] = {name: str(path) for name, path in paths.items()}
    return found


@pytest.mark.parametrize(("name", "words", "reason"), CASES, ids=[f"{name} {words}" for name, words, _ in CASES])
def test_refused_before_anything_is_written(name, words, reason, files, runs, tmp_path, monkeypatch, capsys):
    script = SCRIPTS[name]
    for stranger in STRANGER_PROBS:  # other tests in this process have them
        monkeypatch.delitem(script.game.PLAYER_PROBS, stranger, raising=False)
    board = "--height 3 --width 4 --num-players 3 --num-hares 3 --final-time 15 --held-out-games 20 --device cpu"
    board = [] if "--resume" in words else [*board.split(), "--run-dir", str(tmp_path / "runs")]
    given = [word.replace("_", " ").format_map(files[script]) if "{" in word else word for word in words.split()]
    before = sorted(runs[script][0].rglob("*"))
    line = refused(script, [*board, *given], monkeypatch, capsys)
    assert reason in line, line
    assert not (tmp_path / "runs").exists()
    assert sorted(runs[script][0].rglob("*")) == before
