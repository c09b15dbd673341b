"""Whole runs of hopplus_ppo.py: what they leave behind, what stops them, and how they go on"""

import dataclasses
import itertools
import json
import math
import re
import shutil
from pathlib import Path

import hopplus_mcts
import hopplus_ppo as hop
from evaluation.runs import load_script
from stag_hunt_env import StagHuntEnv

import pytest
import torch
from helpers import (
    TINY_CONFIG,
    lines_of,
    refused,
    resume,
    same_tree,
    start_script,
    tiny_args,
    train_tiny,
    without_times,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._pytree import tree_leaves


def load(path):
    return hop.load_checkpoint(str(path), hop.FORMAT)


# ---- What a run leaves behind


def folders_of(first):
    """Of a run of two seeds"""
    return [first, Path(str(first).replace("__1__", "__2__"))]


@pytest.mark.parametrize("method", hop.METHODS)
def test_what_a_run_leaves_behind(method, trained):
    first = trained(method, total_timesteps=90)
    assert re.fullmatch(rf"hopplus_ppo__3x4_3h1s_{method}__1__\d+", first.name)
    files = sorted(path.name for path in first.iterdir() if "tfevents" not in path.name)
    assert files == ["args.json", "checkpoint.pt", "metrics.jsonl"]
    args = tiny_args(method, num_seeds=2, total_timesteps=90, run_dir=str(first.parent))
    saved = load(first)
    assert saved["iteration"] == 3 and saved["script"] == "hopplus_ppo.py"
    assert hop.Args(**saved["args"] | {"config": TINY_CONFIG}) == args
    assert saved["folders"] == [folder.name for folder in folders_of(first)]
    assert "moa_prior" not in saved["states"][0]["networks"], "it is only for preparation"
    for folder in folders_of(first):
        assert json.loads((folder / "args.json").read_text()) == json.loads(json.dumps(saved["args"]))
        lines = lines_of(folder)
        assert [line.pop("steps") for line in lines] == [32, 64, 96]
        assert all(line.keys() == lines[0].keys() for line in lines)
        events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
        for name in lines[0]:
            values = {step: line[name] for step, line in zip((32, 64, 96), lines, strict=True)}
            finite = {step: value for step, value in values.items() if value is not None}
            drawn = events.Scalars(name) if finite else []
            assert {x.step: x.value for x in drawn} == pytest.approx(finite, rel=1e-5), name
        flags = events.Tensors("hyperparameters/text_summary")[0].tensor_proto.string_val[0].decode()
        assert f"|method|{method}|" in flags and "|height|3|" in flags
    one, other = (lines_of(folder)[2]["losses/value_loss"] for folder in folders_of(first))
    assert one != other, "each seed's own"


def test_histograms_are_of_the_samples_that_count(trained):
    for folder in folders_of(trained("hopplus", total_timesteps=90)):
        events = EventAccumulator(str(folder), {"histograms": 0}).Reload()
        rows = {line["steps"]: line for line in lines_of(folder)}
        for kind, quantity in itertools.product(("real", "imagined"), ("reward", "returns", "value")):
            found = events.Histograms(f"{kind}/{quantity}")
            assert len(found) > 0
            for event in found:
                of_each_learner = rows[event.step][f"{kind}/samples"]
                assert event.histogram_value.num == pytest.approx(3 * of_each_learner)
        assert min(row["real/samples"] for row in rows.values()) < 32, "somebody has left"


VARIANTS = {  # that no golden run is
    "no stag, nothing to read": {"config": dataclasses.replace(TINY_CONFIG, num_stags=0), "subgoals": "none"},
    "no hare, one number": {"config": dataclasses.replace(TINY_CONFIG, num_hares=0), "goal_dim": 1, "num_steps": 5},
    "not trained": {"wm_updates": 0, "subgoal_updates": 0, "offline_ratio": 0.0},
    "ppo that remembers": {"method": "ppo", "subgoals": "inferred", "memory_discount": 0.9},
    "all returns are equal": {"method": "ppo", "config": dataclasses.replace(TINY_CONFIG, final_time=1)},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_variants_run_and_stay_finite(changes, tmp_path):
    (folder,) = train_tiny(tmp_path, **{"total_timesteps": 60, "num_envs": 8, **changes})
    last = lines_of(folder)[-1]
    found = {name: x for name, x in last.items() if name.startswith(("losses/", "real/", "omg/", "imagined/"))}
    assert len(found) > 10
    equal_returns = changes.get("config", TINY_CONFIG).final_time == 1
    undefined = ["losses/explained_variance"] if equal_returns else []
    assert [name for name, x in found.items() if x is None] == undefined


# ---- What goes wrong


@pytest.mark.parametrize(("part", "quantity"), [("policy", "losses/policy_loss"), ("world", "losses/world_model")])
def test_not_a_number_stops_the_run(part, quantity, tmp_path, monkeypatch, capsys):
    train_iteration, calls = hop.train_iteration, []

    def poisoned(state):
        calls.append(part)
        if len(calls) == 2:
            for weight in state.networks[part].params.values():
                weight.data[1].fill_(math.nan)
        return train_iteration(state)

    monkeypatch.setattr(hop, "train_iteration", poisoned)
    line = refused(capsys, train_tiny, tmp_path, total_timesteps=4 * 32, save_seconds=0.0)
    assert line == f"error: {quantity} of learners [1] is no number since the last row"
    (folder,) = tmp_path.iterdir()
    good = load(folder)  # the one before is not overwritten
    assert all(bool(x.isfinite().all()) for x in tree_leaves(good["states"][0]["networks"]))
    assert good["iteration"] == len(lines_of(folder)) == 1 and len(calls) == 2


def test_a_reward_that_is_no_payoff_stops_the_run(tmp_path, monkeypatch, capsys):
    advance = StagHuntEnv.advance

    def with_bonus(env, actions):
        late = env.state.time == 3
        reward, present_before, done = advance(env, actions)
        return reward + 0.3 * late[:, None], present_before, done

    monkeypatch.setattr(StagHuntEnv, "advance", with_bonus)
    line = refused(capsys, train_tiny, tmp_path)
    assert line == "error: a payoff is none of the game's: a bonus belongs into shape_reward"
    (folder,) = train_tiny(tmp_path / "ppo", "ppo")  # without a world model nobody minds
    assert lines_of(folder)[-1]["real/reward_mean"] > 0.02


# ---- Going on


RESUMED = [
    ("ppo", {}),
    ("ppo-omg", {"log_every": 2}),  # from a checkpoint between two rows
    ("hopplus", {"seats": "learner,mixed,learner", "redraw": "0.5", "replay_rollouts": 3}),
]


@pytest.mark.parametrize(("method", "changes"), RESUMED)
def test_a_resumed_run_is_the_same_bit_for_bit(method, changes, tmp_path, monkeypatch):
    """Also in another place, and with what was logged after the checkpoint, the last row cut, logged again"""
    changes = {**changes, "total_timesteps": 5 * 32, "num_seeds": 2, "save_seconds": 0.0}
    whole, second = train_tiny(tmp_path / "whole", method, **changes)
    each = 32 * changes.get("log_every", 1)
    steps = [*range(each, 5 * 32, each), 5 * 32]
    save, calls = hop.save_checkpoint, []

    def killed_at_the_fourth(*given):
        calls.append(given)
        if len(calls) == 4:  # its lines are already in metrics.jsonl, its checkpoint is not
            raise KeyboardInterrupt
        save(*given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(hop, "save_checkpoint", killed_at_the_fourth)
        train_tiny(tmp_path / "killed", method, **changes)
    shutil.copytree(tmp_path / "killed", tmp_path / "moved")
    killed, _ = sorted((tmp_path / "killed").iterdir())
    moved, moved_second = sorted((tmp_path / "moved").iterdir())
    before = [line["steps"] for line in lines_of(moved)]
    assert before == [step for step in steps if step <= 4 * 32] and load(moved)["iteration"] == 3
    # TensorBoard reads files by name: "....99" and "....100" of one second and process in the wrong order
    (events,) = moved.glob("events*")
    events.rename(events.with_name("events.out.tfevents.0"))
    with open(moved / "metrics.jsonl", "a") as file:
        file.write('{"steps": 256, "charts/ret')
    resume(hop, moved)
    assert [line["steps"] for line in lines_of(killed)] == before
    one, other = (load(path)["states"][0] for path in (whole, moved))
    assert load(moved)["iteration"] == 5 and one.keys() == other.keys()
    for key, value in one.items():
        assert same_tree(value, other[key]), key
    assert {"games", "watched", "networks", "optimizers", "horizon", "sums", "random"} <= one.keys()
    assert {"env", "kinds", "replay", "pushed", "last_joint", "history"} == one["games"].keys()
    assert (one["watched"] == {}) == (method == "ppo")
    for ours, theirs in ((whole, moved), (second, moved_second)):
        lines = without_times(lines_of(theirs))
        assert lines == without_times(lines_of(ours)) and [line["steps"] for line in lines] == steps
    events = EventAccumulator(str(moved), {"scalars": 0}).Reload()
    assert [x.step for x in events.Scalars("charts/episodic_return")] == steps
    resume(hop, moved)  # it is over
    assert len(lines_of(moved)) == len(steps)


def test_a_run_is_extended_by_the_script_or_a_copy_of_it(trained, tmp_path, capsys):
    """Beside --resume only the length may be given"""
    first = trained("ppo", total_timesteps=96, learning_rate=0.01)
    runs = Path(shutil.copytree(first.parent, tmp_path / "runs"))
    folder, second = sorted(runs.iterdir())
    for words in (("--learning-rate", "0.001"), ("--method", "ppo"), ("--nonsense",)):
        line = refused(capsys, start_script, hop, "--resume", folder, *words)
        assert line == f"error: beside --resume only --total-timesteps, not {' '.join(words)}"
    line = refused(capsys, start_script, hopplus_mcts, "--resume", folder)
    assert f"is a checkpoint of {hop.FORMAT}, not of {hopplus_mcts.FORMAT}" in line
    start_script(hop, "--resume", folder, "--total-timesteps", "160")
    same = load_script(Path(shutil.copy(hop.__file__, tmp_path / "same.py")))
    start_script(same, f"--resume={folder / 'checkpoint.pt'}", "--total-timesteps=192")
    for each in (folder, second):
        assert [line["steps"] for line in lines_of(each)] == [32, 64, 96, 128, 160, 192]
        assert json.loads((each / "args.json").read_text())["total_timesteps"] == 192
        decays = [1 - 0.9 * x for x in (0, 1 / 3, 2 / 3, 3 / 5, 4 / 5, 5 / 6)]
        rates = [line["charts/learning_rate"] for line in lines_of(each)]
        assert rates == pytest.approx([0.01 * x for x in decays]), "stretched over the new length"
    assert load(folder)["iteration"] == 6 and load(folder)["script"] == "same.py"


# ---- Games and seeds


def test_watched_and_preparation_games_are_other_games(tmp_path, monkeypatch):
    deals, init = [], hop.Games.__init__

    def watched(games, *given, **named):
        init(games, *given, **named)
        state = games.env.state
        deals.append((state.position[:2].tolist(), state.prey_position[:2].tolist()))

    monkeypatch.setattr(hop.Games, "__init__", watched)
    train_tiny(tmp_path, total_timesteps=32)
    assert len(deals) == 3 and all(one != other for one, other in itertools.combinations(deals, 2))


def test_what_is_fused_is_what_the_script_calls(monkeypatch):
    """Compiled functions take the place of those that the script calls by name"""
    made, called = [], set()

    def compiled(function, dynamic):
        made.append(function.__name__)
        monkeypatch.setitem(vars(hop), function.__name__, function)  # to be put back after the test
        return lambda *given: called.add(function.__name__) or function(*given)

    monkeypatch.setattr(torch, "compile", compiled)
    state = hop.TrainState(tiny_args(offline_ratio=0.0), 0, torch.device("cpu"))
    state.args.compile = True
    hop.make_stages(state)["train"]()
    assert {"perceive", "ppo_loss"} < set(made) == called
