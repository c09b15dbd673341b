"""Whole runs of hopplus_ppo.py: what they leave behind, how they stop and go on, and which flags are refused."""

import contextlib
import copy
import dataclasses
import errno
import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import pickle
import re
import shlex
import shutil
import signal
import sys
import traceback
from pathlib import Path

import hopplus_mcts
import hopplus_ppo as hop
import pretrain_vae
import pretrain_world_model
import stag_hunt_env as game
from stag_hunt_env import Run, StagHuntEnv, UserError, command_line

import pytest
import torch
from helpers import TINY_CONFIG, TINY_FLAGS, NoNonFiniteCasts, lines_of, same_tree, save_as_run, without_times
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._pytree import tree_leaves
from torch.utils.tensorboard import SummaryWriter


def make_args(method="hopplus", **changes):
    return hop.make_args(method, "cpu", **{**TINY_FLAGS, **changes})


def run(run_dir, method="hopplus", **changes):
    return hop.main(make_args(method, run_dir=str(run_dir), **changes))


def load(path):
    return game.load_checkpoint(path, hop.FORMAT, hop.KEYS)


def folders_of(run_dir):
    return sorted(Path(run_dir).iterdir())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """method -> where it ran, what main returned"""
    folder, found = tmp_path_factory.mktemp("runs"), {}
    for method in hop.METHODS:
        found[method] = folder / method, run(folder / method, method, num_seeds=2, total_timesteps=90)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# What a run leaves behind

CHARTS = ["charts/SPS", "charts/learning_rate", "charts/episodic_return", "charts/stag_share", "losses/value_loss"]
PPO_KEYS = ["losses/explained_variance", "real/value_mean", "per_agent/value_loss_real/learner_2"]
OMG_KEYS = ["moa/nll", "moa/ceiling/top1", "omg/kl", "losses/moa", "per_agent/moa_nll/learner_2"]
HOPPLUS_KEYS = ["wm/exact_match/4", "wm/payoff_match/1", "imagined/value_mean", "losses/world_model"]
KEYS = {  # a few of each method, and how many there are at least
    "ppo": (PPO_KEYS, 25),
    "ppo-omg": (PPO_KEYS + OMG_KEYS, 35),
    "hopplus": (PPO_KEYS + OMG_KEYS + HOPPLUS_KEYS, 45),
}


def assert_flags_as_in_help(events):
    text = events.Tensors("hyperparameters/text_summary")[0].tensor_proto.string_val[0].decode()
    shown = [line.split("|")[1] for line in text.splitlines()[2:]]
    in_help = [field.name for group in hop.GROUPS.values() for field in dataclasses.fields(group)]
    assert sorted(shown) == sorted([*in_help, "checkpoint"])
    assert "|height|3|" in text and "|learning_rate|" in text


@pytest.mark.parametrize("method", hop.METHODS)
def test_what_a_run_leaves_behind(method, runs):
    folder, final = runs[method]
    first, second = folders = folders_of(folder)
    assert re.fullmatch(rf"hopplus_ppo__3x4_3h1s_3hares_{method}__1__\d+", first.name) and "__2__" in second.name
    assert sorted(path.name for path in first.iterdir() if "tfevents" not in path.name) == [
        "args.json",
        "checkpoint.pt",
        "metrics.jsonl",
    ]
    args = make_args(method, run_dir=str(folder), num_seeds=2, total_timesteps=90)
    saved = torch.load(first / "checkpoint.pt", weights_only=True)
    assert final["checkpoint"] == str(first / "checkpoint.pt")
    assert saved["format"] == hop.FORMAT and saved["iteration"] == 3 and saved["device"] == "cpu"
    assert saved["script"]["name"] == "hopplus_ppo.py" and saved["folders"] == [f.name for f in folders]
    assert hop.Args(**saved["args"] | {"config": TINY_CONFIG}) == args
    assert "moa_prior" not in saved["states"][0]["networks"], "it is only for pretraining"
    keys, fewest = KEYS[method]
    drawn = []
    for folder in folders:
        flags = json.loads((folder / "args.json").read_text())
        assert (folder / flags.pop("checkpoint")).resolve() == (first / "checkpoint.pt").resolve()
        assert flags == json.loads(json.dumps(saved["args"]))
        lines = lines_of(folder)
        assert [line.pop("steps") for line in lines] == [32, 64, 96]
        assert set(CHARTS + keys) <= lines[2].keys() and all(line.keys() == lines[0].keys() for line in lines)
        kinds = {re.sub(r"\d+$", "i", name) for name in lines[2]}  # a number at the end: of a player, of a step
        assert fewest <= len(kinds) <= 60
        events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
        assert set(events.Tags()["scalars"]) == {name for line in lines for name in line if line[name] is not None}
        for name in events.Tags()["scalars"]:
            scalar = {x.step: x.value for x in events.Scalars(name)}
            values = dict(zip([32, 64, 96], [line[name] for line in lines], strict=True))
            finite = {step: value for step, value in values.items() if value is not None}
            assert scalar == pytest.approx(finite, rel=1e-5), name
        assert set(events.Tags()["histograms"]) >= {"real/reward", "real/returns", "real/value"}
        assert_flags_as_in_help(events)
        assert ("imagined/value" in events.Tags()["histograms"]) == (method == "hopplus")
        if method != "ppo":
            parts = [line["losses/moa"] + line["omg/recon"] + args.kl_coef * line["omg/kl"] for line in lines]
            assert [line["losses/opponent_models"] for line in lines] == pytest.approx(parts, rel=1e-4)
        drawn.append(events.Histograms("real/returns")[0].histogram_value)
    assert drawn[0] != drawn[1], "each seed's own"
    assert lines_of(first)[2]["losses/value_loss"] != lines_of(second)[2]["losses/value_loss"]
    for name in ("losses/value_loss", "charts/episodic_return"):
        both = [lines_of(f)[2][name] for f in folders]
        assert final[name] == pytest.approx(sum(both) / 2)
    rates = [line["charts/learning_rate"] for line in lines_of(first)]
    assert rates == pytest.approx([x * args.learning_rate for x in (1, 0.7, 0.4)])


def test_histograms_are_of_the_samples_that_count(runs):
    for folder in folders_of(runs["hopplus"][0]):
        events = EventAccumulator(str(folder), {"histograms": 0}).Reload()
        rows = {line["steps"]: line for line in lines_of(folder)}
        for kind, quantity in itertools.product(("real", "imagined"), ("reward", "returns", "value")):
            for event in events.Histograms(f"{kind}/{quantity}"):
                of_each_learner = rows[event.step][f"{kind}/samples"]
                assert event.histogram_value.num == pytest.approx(3 * of_each_learner)
        assert min(row["real/samples"] for row in rows.values()) < 32, "somebody has left"


def test_every_metric_is_logged_under_its_name(tmp_path, monkeypatch):
    """Those of the finished games as charts"""
    measured, add = set(), hop.MetricSums.add
    monkeypatch.setattr(hop.MetricSums, "add", lambda sums, metrics: (measured.update(metrics), add(sums, metrics)))
    run(tmp_path, total_timesteps=64)
    names = {name for name in measured if not name.startswith("games/")}
    assert len(names) > 40
    for line in lines_of(folders_of(tmp_path)[0]):
        assert names <= line.keys()
        others = {name for name in line.keys() - names if not name.startswith(("charts/", "time/", "per_agent/"))}
        assert others == {"steps"}


def test_the_seconds_before_training_add_up(runs, monkeypatch):
    times = iter([10.0, 11.0, 14.0])
    monkeypatch.setattr(game.time, "perf_counter", lambda: next(times))
    start = game.Stopwatch()
    start.record("networks")
    start.record("graphs")
    assert start.stages == {"imports": game.IMPORT_SECONDS, "networks": 1.0, "graphs": 3.0}
    for line in lines_of(folders_of(runs["hopplus"][0])[0]):
        stages = [x for name, x in line.items() if name.startswith("time/start/")]
        assert len(stages) == 4 and sum(stages) == pytest.approx(line["time/ready"])


def test_the_same_seed_gives_the_same_run_and_another_seed_another(runs, tmp_path):
    run(tmp_path / "again", num_seeds=2, total_timesteps=90)
    run(tmp_path / "other", seed=2, total_timesteps=90)
    first, again, other = (
        without_times(lines_of(folders_of(f)[0])) for f in (runs["hopplus"][0], tmp_path / "again", tmp_path / "other")
    )
    assert first == again != other


VARIANTS = {
    "shared": {"share_parameters": True},
    "oracle": {"subgoals": "oracle", "seats": "learner,mixed,nearest_stag"},
    "posterior": {"subgoals": "posterior", "seats": "learner,mixed,nearest_stag", "redraw": "never"},
    "discrete": {"goal_kind": "discrete", "seats": "learner,mixed,learner"},
    "memory": {"seats": "learner,mixed,mixed", "redraw": "never"},
    "walls": {"config": dataclasses.replace(TINY_CONFIG, height=5, width=4, max_wall_pieces=2)},
    "strengths": {"config": dataclasses.replace(TINY_CONFIG, strengths=(1.0, 2.0, 3.0))},
    "no stag": {"config": dataclasses.replace(TINY_CONFIG, num_stags=0)},
    "no hare": {"config": dataclasses.replace(TINY_CONFIG, num_hares=0)},
    "limit": {"config": dataclasses.replace(TINY_CONFIG, steps_after_first_hunt=1, permute_ids=True)},
    "nothing to read": {"subgoals": "none"},
    "imagined only": {"ppo_real_ratio": 0.0, "critic_data": "mixed"},
    "not trained": {"wm_updates": 0, "subgoal_updates": 0, "offline_ratio": 0.0},
    "one number": {"goal_dim": 1, "num_steps": 5, "imagination_horizon": 5, "subgoal_selection": "optimistic"},
    "ppo that remembers": {"method": "ppo", "subgoals": "inferred", "memory_discount": 0.9},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_variants_run_and_stay_finite(changes, tmp_path, capsys):
    final = run(tmp_path, **{"total_timesteps": 60, "num_envs": 8, **changes})
    found = {name: x for name, x in final.items() if name.startswith(("losses/", "real/", "omg/", "imagined/"))}
    assert len(found) > 10 and all(math.isfinite(x) for x in found.values())
    assert "could not" not in capsys.readouterr().out
    if changes.get("wm_updates", 1) and "method" not in changes:
        assert final["imagined/samples"] > 0 and final["losses/moa"] > 0 and final["losses/world_model"] > 0


def captured_in_place(function, env, use):
    """As a CUDA graph: each call writes over what the first one returned"""
    kept = []

    def call():
        result = function()
        kept[:] = kept or [result]
        for old, new in zip(tree_leaves(kept[0]), tree_leaves(result), strict=True):
            if isinstance(new, torch.Tensor):
                old.copy_(new)
        return kept[0]

    return call


def test_pretraining_keeps_what_a_captured_graph_writes_over(tmp_path, monkeypatch):
    found = []
    for capture in (hop.capture, captured_in_place):
        monkeypatch.setattr(hop, "capture", capture)
        final = run(tmp_path / capture.__name__, num_seeds=2, total_timesteps=32, pretraining_updates=20)
        found.append(torch.load(final["checkpoint"], weights_only=True)["states"])
    assert same_tree(*found)


@pytest.mark.parametrize("changes", [{}, {"goal_kind": "discrete"}])
def test_bfloat16_stays_inside(changes, tmp_path, monkeypatch):
    """What acts and imagines in it hands on the same types as without."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(hop, "inference_dtype", lambda args, device, dtype=dtype: dtype)
        final = run(tmp_path / str(dtype), total_timesteps=32, **changes)
        found.append((final["real/value_mean"], torch.load(final["checkpoint"], weights_only=True)["states"]))
    assert [x.dtype for x in tree_leaves(found[0][1])] == [x.dtype for x in tree_leaves(found[1][1])]
    assert found[0][0] == pytest.approx(found[1][0], rel=0.05) and found[0][0] != found[1][0]


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong


@pytest.fixture(scope="module")
def well(tmp_path_factory):
    """A run in which nothing fails"""
    return run(tmp_path_factory.mktemp("well"), total_timesteps=96)


@pytest.mark.parametrize(
    ("name", "times"),
    [("add_scalar", 3), ("add_histogram", 3), ("add_text", 1), ("close", 1)],
)
def test_tensorboard_that_fails_costs_nothing(name, times, well, tmp_path, monkeypatch, capsys):
    """Each time a line says so"""

    def fails(*_, **__):
        raise RuntimeError("singular")

    monkeypatch.setattr(SummaryWriter, name, fails)
    capsys.readouterr()
    final = run(tmp_path / "failing", total_timesteps=96)
    printed = capsys.readouterr()
    line = "could not write to TensorBoard: RuntimeError: singular; the run goes on"
    assert (printed.out + printed.err).count(line) == times
    first, second = (torch.load(x["checkpoint"], weights_only=True) for x in (well, final))
    assert second["iteration"] == 3 and same_tree(first["states"], second["states"])
    numbers = [{name: x for name, x in found.items() if name != "checkpoint"} for found in (final, well)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0, abs=0, nan_ok=True)


def test_charts_of_games_when_none_has_ended(tmp_path):
    """null in metrics.jsonl, no point in TensorBoard"""
    run = Run(make_args("ppo", run_dir=str(tmp_path)), "any", None, 0)
    for step, mean_return in ((32, math.nan), (64, 1.5)):
        run.log(step, [{"charts/episodic_return": mean_return, "losses/value_loss": 0.25, "moa/nll": math.nan}])
    run.close()
    folder = run.folders[0]
    assert [line["charts/episodic_return"] for line in lines_of(folder)] == [None, 1.5]
    events = EventAccumulator(str(folder)).Reload()
    assert [(x.step, x.value) for x in events.Scalars("charts/episodic_return")] == [(64, 1.5)]
    assert [x.step for x in events.Scalars("losses/value_loss")] == [32, 64]
    assert "moa/nll" not in events.Tags()["scalars"]


def test_checkpoints_are_saved_before_anything_is_drawn(tmp_path, monkeypatch):
    done, save = [], Run.save
    monkeypatch.setattr(hop, "PICTURES", 2)
    monkeypatch.setattr(Run, "save", lambda run, content: (done.append("save"), save(run, content)))
    monkeypatch.setattr(hop, "add_histograms", lambda *_: done.append("draw"))
    run(tmp_path, "ppo", save_seconds=0.0, total_timesteps=4 * 32)
    assert done == ["save", "save", "draw", "save", "save", "draw"]


def test_a_folder_that_cannot_be_written_ends_in_one_line_before_pretraining(tmp_path, monkeypatch, capsys):
    """There when the flags were read, but full now"""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(hop, "pretrain", None)
    monkeypatch.setattr(sys, "argv", ["hopplus_ppo.py"])
    args = make_args(run_dir=str(tmp_path))
    with pytest.raises(SystemExit) as stop:
        command_line(lambda words: args, hop.main)
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert line.startswith(f"error: could not write to {tmp_path}/hopplus_ppo__") and line.endswith(
        "No space left on device"
    )


@pytest.mark.parametrize("changes", [{}, {"goal_kind": "discrete", "seats": "learner,mixed,learner"}])
def test_no_cast_depends_on_the_machine(changes, tmp_path):
    with NoNonFiniteCasts() as seen:
        run(tmp_path, total_timesteps=32, **changes)
    assert seen.casts > 0


def test_casts_that_depend_on_the_machine_are_noticed():
    with NoNonFiniteCasts() as seen:
        assert torch.tensor([-0.9, 255.9]).to(torch.uint8).tolist() == [0, 255] and seen.casts == 1
        torch.tensor([math.nan]).double()
        for value, dtype in (
            (math.nan, torch.int64),
            (math.inf, torch.int32),
            (256.0, torch.uint8),
            (-1.0, torch.uint8),
        ):
            with pytest.raises(AssertionError, match="no torch"):
                torch.tensor([value]).to(dtype)
            with pytest.raises(AssertionError, match="no torch"):
                torch.zeros(1, dtype=dtype)[:] = torch.tensor([value])


POISONED = [("policy", "losses/policy_loss"), ("world", "losses/world_model"), ("moa", "losses/moa")]


@pytest.mark.parametrize(("part", "quantity"), POISONED)
def test_not_a_number_stops_the_run(part, quantity, tmp_path, monkeypatch, capsys):
    train_iteration, calls = hop.train_iteration, []
    casts = NoNonFiniteCasts()

    def poisoned(state):
        calls.append(part)
        if len(calls) == 2:
            held.enter_context(casts)
            for weight in getattr(state.networks, part).parameters():
                weight.data[1].fill_(math.nan)
        return train_iteration(state)

    monkeypatch.setattr(hop, "train_iteration", poisoned)
    monkeypatch.setattr(sys, "argv", ["hopplus_ppo.py"])
    args = make_args(run_dir=str(tmp_path), total_timesteps=4 * 32, save_seconds=0.0)
    with pytest.raises(SystemExit) as stop, contextlib.ExitStack() as held:
        command_line(lambda words: args, hop.main)
    assert stop.value.code == 1 and casts.casts > 0
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {quantity} is nan (seed 1, iteration 2)"
    (checkpoint,) = tmp_path.glob("*/checkpoint.pt")
    good = load(checkpoint)  # the one before is not overwritten
    assert all(bool(x.isfinite().all()) for x in tree_leaves(good["states"][0]["networks"]))
    rows = lines_of(checkpoint.parent)
    assert good["iteration"] == 1 and len(calls) == len(rows) == 2 and rows[0][quantity] is not None
    assert rows[1][quantity] is None, "the bad row is in the log"


HEALTHY = [{"final_time": 1}, {"hare_reward": 50_000.0}]  # all returns are equal; value losses are above 1e6


@pytest.mark.parametrize("fields", HEALTHY)
def test_a_healthy_run_is_not_stopped(fields, tmp_path):
    config = dataclasses.replace(TINY_CONFIG, **fields)
    for seed in range(4):
        final = run(tmp_path, "ppo", config=config, seed=seed, learning_rate=0.05)
        assert math.isfinite(final["losses/value_loss"]) and math.isfinite(final["charts/episodic_return"])
        if config.final_time == 1:
            assert math.isnan(final["losses/explained_variance"]), "there is nothing to explain"
        else:
            assert final["losses/value_loss"] > 1e6
    hop.main(hop.make_args(device="cpu", resume=final["checkpoint"], total_timesteps=128))


@pytest.mark.parametrize("late", [False, True])
def test_a_reward_that_is_no_payoff_stops_the_run(late, tmp_path, monkeypatch):
    advance = StagHuntEnv.advance

    def with_bonus(env, actions):
        before = env.state.time.clone()
        reward, present_before, done = advance(env, actions)
        return reward + 0.3 * (before == 3)[:, None] if late else reward + 0.3, present_before, done

    monkeypatch.setattr(StagHuntEnv, "advance", with_bonus)
    with pytest.raises(FloatingPointError, match="no payoff of the game: add a bonus in shape_reward"):
        run(tmp_path)
    final = run(tmp_path, "ppo")  # without a world model nobody minds
    assert final["real/reward_mean"] > 0.02


# ---------------------------------------------------------------------------------------------------------------------
# Going on

RESUMED = [
    ("ppo", {}),
    ("hopplus", {"seats": "learner,mixed,learner", "redraw": "0.5", "replay_rollouts": 3}),
]


@pytest.mark.parametrize(("method", "changes"), RESUMED)
def test_a_resumed_run_is_the_same_bit_for_bit(method, changes, tmp_path, monkeypatch):
    """Also in another place, and with what was logged after the checkpoint logged again"""
    changes = {**changes, "total_timesteps": 6 * 32, "num_seeds": 2, "save_seconds": 0.0}
    whole = run(tmp_path / "whole", method, **changes)
    save, calls = Run.save, []

    def killed_at_the_fourth(run, content):
        calls.append(run)
        if len(calls) == 4:  # its lines are already in metrics.jsonl, its checkpoint is not
            raise KeyboardInterrupt
        save(run, content)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Run, "save", killed_at_the_fourth)
        run(tmp_path / "killed", method, **changes)
    shutil.copytree(tmp_path / "killed", tmp_path / "moved")
    (checkpoint,) = (tmp_path / "moved").glob("*/checkpoint.pt")
    assert len(lines_of(checkpoint.parent)) == 4 and torch.load(checkpoint, weights_only=True)["iteration"] == 3
    resumed = hop.main(hop.make_args(device="cpu", resume=str(checkpoint)))
    assert resumed.pop("checkpoint") == str(checkpoint) and len(lines_of(folders_of(tmp_path / "killed")[0])) == 4
    first, second = (torch.load(path, weights_only=True) for path in (whole.pop("checkpoint"), checkpoint))
    assert second["iteration"] == 6 and first["states"][0].keys() == second["states"][0].keys()
    for key, value in first["states"][0].items():
        assert same_tree(value, second["states"][0][key]), key
    assert {"games", "cpu_random", "networks", "optimizers", "eps", "horizon"} <= first["states"][0].keys()
    assert {"env", "seats", "replay", "last_joint", "history"} == first["states"][0]["games"].keys()
    assert ("watched" in first["states"][0]) == (method == "hopplus")
    assert resumed == pytest.approx(whole, rel=0, abs=0, nan_ok=True)
    lines = [[without_times(lines_of(f)) for f in folders_of(tmp_path / d)] for d in ("whole", "moved")]
    assert lines[0] == lines[1] and [line["steps"] for line in lines[1][0]] == [32, 64, 96, 128, 160, 192]
    events = EventAccumulator(str(checkpoint.parent), {"scalars": 0}).Reload()
    assert [x.step for x in events.Scalars("charts/episodic_return")] == [32, 64, 96, 128, 160, 192]
    again = hop.main(hop.make_args("ppo", "cpu", resume=str(checkpoint)))  # it is over
    assert again["checkpoint"] == str(checkpoint) and len(lines_of(checkpoint.parent)) == 6


def test_what_was_trained_on_is_part_of_the_checkpoint(runs):
    saved = torch.load(runs["hopplus"][1]["checkpoint"], weights_only=True)["states"][0]
    replay, watched = saved["games"]["replay"], saved["watched"]["replay"]
    assert replay["pushed"] == 3 and watched["pushed"] == 2 + 2
    assert replay["data"]["board"].shape == (2, 6, 8, 4, 3 + 4) and replay["data"]["board"].dtype == torch.uint8
    assert watched["data"]["board"].shape == (2, 6, 8, 2, 3 + 4)
    assert saved["optimizers"]["policy"][0]["step"] == 3 * 2 * 2
    assert saved["networks"]["world"]["trunk.0.weight"].shape[0] == 6


@pytest.fixture(scope="module")
def files(runs, tmp_path_factory):
    """Checkpoints that are not what they seem"""
    folder, checkpoint = tmp_path_factory.mktemp("files"), Path(runs["hopplus"][1]["checkpoint"])
    saved = torch.load(checkpoint, weights_only=True)
    found = {"checkpoint": checkpoint, "missing": folder / "missing.pt", "folder": folder}
    contents = {
        "abacus": saved | {"device": "abacus"},
        "two ranks": saved | {"states": saved["states"] * 2},
        "other format": saved | {"format": "hopplus-0"},
        "list": [1, 2],
        "no number": saved | {"iteration": "x"},
        "negative": saved | {"iteration": -1},
        "nowhere": saved | {"folders": []},
        "no state": saved | {"states": None},
        "unfit": {"format": pretrain_vae.FORMAT, "must_match": None, "networks": {}},
        "empty": {"format": pretrain_vae.FORMAT, "must_match": {}, "networks": None},
        "no MOA": {"format": pretrain_vae.FORMAT, "must_match": {}, "networks": {"prior": {}, "inference": {}}},
    }
    for name, content in contents.items():
        found[name] = folder / f"{name}.pt"
        save_as_run(found[name], content)
    found["cut"], found["text"] = folder / "cut.pt", folder / "text.pt"
    found["cut"].write_bytes(checkpoint.read_bytes()[:-5000])
    found["text"].write_text("not a checkpoint")
    forged = pickle.dumps(Forged(folder / "executed"))
    found["forged"] = folder / "forged.pt"
    found["forged"].write_bytes(forged + hashlib.sha256(forged).digest())
    return found


class Forged:
    """Whoever loads it with pickle makes a file"""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


REFUSED_FILES = [
    ({"resume": "missing"}, "there is no checkpoint"),
    ({"resume": "folder"}, "is no run folder: it has no args.json"),
    ({"resume": "forged"}, "forged.pt is no checkpoint: "),
    ({"resume": "no number"}, "is no whole checkpoint: its iteration is missing or wrong"),
    ({"resume": "negative"}, "its iteration is missing or wrong"),
    ({"resume": "nowhere"}, "its folders is missing or wrong"),
    ({"resume": "no state"}, "its states is missing or wrong"),
    ({"vae_checkpoint": "unfit"}, "its must_match is missing or wrong"),
    ({"vae_checkpoint": "empty"}, "its networks is missing or wrong"),
    ({"vae_checkpoint": "no MOA"}, "no MOA.pt does not fit: prior is missing"),
    ({"vae_checkpoint": "forged"}, "forged.pt is no checkpoint: "),
    ({"resume": "cut"}, "cut short or no checkpoint: its checksum is wrong"),
    ({"resume": "text"}, "its checksum is wrong"),
    ({"resume": "other format"}, "no checkpoint of this script: it is 'hopplus-0', not 'hopplus_ppo.py 1"),
    ({"resume": "list"}, "it is 'list'"),
    ({"resume": "abacus"}, "goes on on 1 rank(s) on abacus only"),
    ({"resume": "two ranks"}, "goes on on 2 rank(s) on cpu only"),
    ({"vae_checkpoint": "missing"}, "missing.pt: there is no checkpoint"),
    ({"vae_checkpoint": "checkpoint"}, f"not '{pretrain_vae.FORMAT}'"),
    ({"world_model_checkpoint": "cut"}, "cut short"),
    ({"world_model_checkpoint": "checkpoint"}, f"not '{pretrain_world_model.FORMAT}'"),
]


@pytest.mark.parametrize(("flags", "words"), REFUSED_FILES)
def test_files_that_do_not_fit_are_refused_before_anything_is_written(flags, words, files, tmp_path, monkeypatch):
    before = sorted(files["checkpoint"].parents[1].rglob("*"))
    for name in ("rollout", "pretrain"):  # nothing is prepared in vain
        monkeypatch.setattr(hop, name, None)
    flags = {name: str(files[value]) for name, value in flags.items()}
    with pytest.raises(UserError) as error:
        hop.main(hop.make_args(device="cpu", **flags)) if "resume" in flags else run(tmp_path / "runs", **flags)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists() and sorted(files["checkpoint"].parents[1].rglob("*")) == before
    assert not (files["folder"] / "executed").exists()


def test_learners_start_from_pretrained_weights(runs, tmp_path, monkeypatch):
    """Seed s takes the checkpoint's seed s, again from the first where there are fewer"""
    saved = torch.load(runs["hopplus"][1]["checkpoint"], weights_only=True)
    weights = saved["states"][0]["networks"]
    pick = {name: {key: x[[0, 3]] for key, x in network.items()} for name, network in weights.items()}
    vae = {name: pick[name] for name in ("prior", "inference", "moa")}
    for name, form, networks in (
        ("vae", pretrain_vae.FORMAT, vae),
        ("world", pretrain_world_model.FORMAT, {"world": pick["world"]}),
    ):
        content = {"format": form, "must_match": {"hare_reward": 1.0, "subgoal_hidden": 8}, "networks": networks}
        save_as_run(tmp_path / f"{name}.pt", content)
    started, train_iteration = [], hop.train_iteration

    def watched(state):
        started.append(copy.deepcopy(state.state_dict()["networks"]))
        return train_iteration(state)

    monkeypatch.setattr(hop, "train_iteration", watched)
    files = {"vae_checkpoint": str(tmp_path / "vae.pt"), "world_model_checkpoint": str(tmp_path / "world.pt")}
    run(tmp_path / "runs", num_seeds=3, total_timesteps=32, **files)
    for name, network in (vae | {"world": pick["world"]}).items():
        for key, x in network.items():
            assert torch.equal(started[0][name][key], x[[0, 0, 0, 1, 1, 1, 0, 0, 0]]), (name, key)
    other = dataclasses.replace(TINY_CONFIG, hare_reward=2.0)
    with pytest.raises(ValueError, match=r"hare_reward 1\.0, here 2\.0"):
        run(tmp_path / "refused", config=other, world_model_checkpoint=files["world_model_checkpoint"])
    with pytest.raises(ValueError, match="subgoal_hidden"):
        run(tmp_path / "refused", subgoal_hidden=9, vae_checkpoint=files["vae_checkpoint"])
    assert not (tmp_path / "refused").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Flags


def test_defaults_follow_method_and_device(monkeypatch):
    monkeypatch.setattr(hop.game, "resolve_device", lambda device: torch.device("cpu" if device == "auto" else device))
    gpu, cpu, ppo = hop.make_args("hopplus", "cuda"), hop.make_args("hopplus", "cpu"), hop.make_args("ppo", "cpu")
    assert gpu == hop.Args(device="cuda") and hop.make_args() == dataclasses.replace(cpu, device="auto")
    assert (gpu.num_envs, cpu.num_envs, ppo.num_envs) == (256, 64, 256) and cpu.log_every == 1
    assert (ppo.subgoals, ppo.imagination, ppo.memory_discount) == ("none", False, 0)
    omg = hop.make_args("ppo-omg", "cpu")
    assert (omg.subgoals, omg.imagination, omg.memory_discount) == ("inferred", False, 0.9)
    assert (cpu.subgoal_updates, gpu.subgoal_updates) == (1, 4)
    assert hop.make_args("ppo", "cpu", num_envs=3).num_envs == 3
    assert hop.parse_args(["--method", "ppo", "--device=cpu"]) == ppo
    words = "--device cpu --height 8 --no-anneal-lr --seats learner,mixed,mixed,random --strengths 1 2 3 4 --seed 5"
    expected = {"anneal_lr": False, "seats": "learner,mixed,mixed,random", "seed": 5, "total_timesteps": 350_000}
    expected["config"] = dataclasses.replace(hop.StagHuntConfig(), height=8, strengths=(1.0, 2.0, 3.0, 4.0))
    assert hop.parse_args(words.split()) == dataclasses.replace(cpu, **expected)
    with pytest.raises(ValueError, match="--method must be one of ppo, ppo-omg, hopplus, not dqn"):
        hop.make_args("dqn")


@pytest.mark.parametrize("method", ["ppo", "ppo-omg", "hopplus"])
def test_a_large_board_takes_more_steps_on_a_cpu(method):
    small = hop.parse_args(["--method", method, "--device", "cpu", "--height", "2", "--width", "8"])
    large = hop.parse_args(["--method", method, "--device", "cpu", "--height", "5", "--width", "4"])
    assert small.total_timesteps == hop.make_args(method, "cpu").total_timesteps
    assert large.total_timesteps == hop.LARGE_BOARD[method, "cpu"]["total_timesteps"] > 2 * small.total_timesteps
    words = ["--method", method, "--device", "cpu", "--height", "8", "--width", "8", "--total-timesteps", "7"]
    assert hop.parse_args(words).total_timesteps == 7
    with pytest.raises(SystemExit):  # as any other flag
        hop.parse_args(["--height", "many"])


def test_the_table_of_defaults_is_whole_and_says_nothing_twice():
    methods, devices = ("ppo", "ppo-omg", "hopplus"), ("cpu", "cuda")
    assert set(hop.DEFAULTS) == set(itertools.product(methods, devices)) and methods == hop.METHODS
    usual = hop.Args()
    for (method, device), changes in hop.DEFAULTS.items():
        for name, value in changes.items():
            assert value != getattr(usual, name), f"{method} on {device}: {name} is {value} anyway"


def test_help_shows_groups_and_true_defaults(capsys):
    with pytest.raises(SystemExit) as stop:
        hop.parse_args(["--help", "--method", "ppo", "--device", "cpu"])
    text = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    assert not stop.value.code
    places = [text.index(f"{name.replace('_', '-')} options") for name in hop.GROUPS]
    assert places == sorted(places) and len(places) == 8
    for part in (
        "E, games per seed (default: 256)",
        "env steps per seed (default: 350000)",
        "--anneal-lr, --no-anneal-lr",
    ):
        assert part in text, part
    for name, group in hop.GROUPS.items():
        for field in dataclasses.fields(group):
            assert f"--{field.name.replace('_', '-')}" in text, (name, field.name)


def test_every_flag_is_explained():
    grouped = {field.name: group for group in hop.GROUPS.values() for field in dataclasses.fields(group)}
    own = {field.name for field in dataclasses.fields(hop.Args)} - {"config"}
    assert own == grouped.keys() - {field.name for field in dataclasses.fields(hop.StagHuntConfig)}
    sources = {group: inspect.getsource(group) for group in hop.GROUPS.values()}
    for name, group in grouped.items():
        line, after = sources[group].split(f"    {name}: ", 1)[1].split("\n", 2)[:2]
        assert "  # " in line or (after.startswith('    """') and len(after) > 12), name


BAD_FLAGS = [
    ("--nonsense 3", "--nonsense"),
    ("--num-envs three", "three"),
    ("--num-envs", "--num-envs"),
    ("--method dqn", "--method must be one of ppo, ppo-omg, hopplus, not dqn"),
    ("--subgoals bayes", "bayes"),
    ("--goal-kind cubic", "cubic"),
    ("--device tpu", "tpu"),
    ("--num-envs 0", "--num-envs must be >= 1, not 0"),
    ("--num-steps -1", "--num-steps must be >= 1, not -1"),
    ("--num-seeds 0", "--num-seeds must be >= 1"),
    ("--seed -1", "--seed must be >= 0"),
    ("--total-timesteps 0", "--total-timesteps must be >= 1"),
    ("--log-every 0", "--log-every must be >= 1"),
    ("--save-seconds -1", "--save-seconds must be >= 0"),
    ("--learning-rate -0.001", "--learning-rate must be > 0"),
    ("--learning-rate nan", "--learning-rate must be > 0, not nan"),
    ("--gamma 1.5", "--gamma must be 0 to 1"),
    ("--gae-lambda nan", "--gae-lambda must be 0 to 1"),
    ("--clip-coef 0", "--clip-coef must be > 0"),
    ("--ent-coef -1", "--ent-coef must be >= 0"),
    ("--max-grad-norm inf", "--max-grad-norm must be > 0, not inf"),
    ("--kl-coef -1", "--kl-coef must be >= 0"),
    ("--history-reset-prob 1.5", "--history-reset-prob must be 0 to 1"),
    ("--subgoal-updates -1", "--subgoal-updates must be >= 0"),
    ("--ppo-real-ratio 2", "--ppo-real-ratio must be 0 to 1"),
    ("--ppo-real-ratio 0 --critic-data real", "--ppo-real-ratio 0 needs --critic-data mixed"),
    ("--num-minibatches 9999", "--num-minibatches exceeds"),
    ("--imagination-horizon 33", "--imagination-horizon is measured on --num-steps 32"),
    ("--seats random,random,random,random", "nobody learns"),
    ("--seats learner,learner", "--seats names 2, but the game has --num-players 4"),
    ("--seats learner,me,learner,learner", "--seats: unknown player 'me'"),
    ("--population random,me", "--population: unknown player 'me'"),
    ("--population random,random", "--population names a player twice"),
    ("--redraw sometimes", "--redraw must be game, never or a probability"),
    ("--unsteady 1.5", "--unsteady must be"),
    ("--subgoals oracle --goal-dim 3", "--subgoals oracle needs --goal-dim > 3"),
    ("--goal-kind discrete --goal-dim 1", "--goal-kind discrete needs --goal-dim 2"),
    ("--strengths 1 2", "--strengths must be 4 numbers"),
    ("--strengths", "--strengths must be 4 numbers"),
    ("--stag-reward 1e39", "--stag-reward must be -1e6 to 1e6"),
    ("--num-envs 10000000000000000", "--num-envs must be at most 1e+15"),
    ("--subgoal-batch-size 1", "--offline-ratio needs --subgoal-batch-size 2 or more"),
    ("--height 2 --width 2", "--height 2 --width 2: too little room"),
    ("--height 16 --width 16", "255"),
    ("--final-time 300", "255"),
    ("--num-players 9", "--num-players must be 2 to 8"),
    ("--method ppo --vae-checkpoint vae.pt", "--vae-checkpoint needs"),
    ("--method ppo-omg --world-model-checkpoint wm.pt", "--world-model-checkpoint needs --imagination"),
    ("--resume nowhere.pt", "there is no checkpoint 'nowhere.pt'"),
    ("--run-dir setup.py", "could not write to setup.py"),
    ("--vae-checkpoint nowhere.pt", "--vae-checkpoint nowhere.pt: there is no checkpoint"),
    ("--world-model-checkpoint setup.py", "setup.py (0 bytes) is damaged"),
]


@pytest.mark.parametrize(("words", "said"), BAD_FLAGS, ids=[words for words, _ in BAD_FLAGS])
def test_wrong_flags_end_with_one_line_and_nothing_on_disk(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "setup.py").touch()
    device = [] if "--device" in words else ["--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["hopplus_ppo.py", *device, *words.split()])
    with pytest.raises(SystemExit) as stop:
        command_line(hop.parse_args, hop.main)
    printed = capsys.readouterr()
    (line,) = printed.err.strip().splitlines()
    assert stop.value.code == 2 and line.startswith("error: ") and said in line
    assert not printed.out or said.startswith("could not write"), "which is tried last"
    assert [path.name for path in tmp_path.iterdir()] == ["setup.py"]


# Python's own error, and one that a library raises by a line of its own
MISTAKES = ["    first, second = (1, 2, 3)\n", "    torch.optim.Adam([torch.zeros(1)], lr=-1)\n"]


def load_copy(path, monkeypatch, edit=str):
    """edit: text -> text"""
    path.write_text(edit(Path(hop.__file__).read_text()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


def test_a_copy_runs_under_its_own_name(tmp_path, monkeypatch):
    module = load_copy(tmp_path / "my_copy.py", monkeypatch)
    args = module.make_args("ppo", "cpu", **{**TINY_FLAGS, "run_dir": str(tmp_path / "runs"), "total_timesteps": 32})
    checkpoint = Path(module.main(args)["checkpoint"])
    assert checkpoint.parent.name.startswith("my_copy__3x4_3h1s_3hares_ppo__1__")
    saved = torch.load(checkpoint, weights_only=True)
    assert saved["script"]["name"] == "my_copy.py" and saved["args"]["exp_name"] == "my_copy"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_an_edited_copy_keeps_its_traceback(mistake, tmp_path, monkeypatch):
    line = "    steps_each = args.num_envs * args.num_steps\n"
    assert Path(hop.__file__).read_text().count(line) == 1
    module = load_copy(tmp_path / "edited.py", monkeypatch, lambda text: text.replace(line, line + mistake))
    words = ["--method", "ppo", "--num-envs", "2", "--device", "cpu", "--run-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["edited.py", *words])
    with pytest.raises(ValueError) as error:
        command_line(module.parse_args, module.main)
    assert mistake in "".join(traceback.format_exception(error.value))


# ---------------------------------------------------------------------------------------------------------------------
# Going on with a run


def words_of(path, *words):
    return hop.parse_args(["--device", "cpu", "--resume", str(path), *words])


CHANGED = [
    ("--learning-rate 0.001", "--learning-rate 0.001: the resumed run has 0.01; only --total-timesteps, --log-every"),
    ("--num-envs 5", "--num-envs 5: the resumed run has 4"),
    ("--method hopplus", "--method hopplus: the resumed run has ppo"),
    ("--height 4", "--height 4: the resumed run has 3"),
    ("--seed 3", "--seed 3: the resumed run has 1"),
    ("--total-timesteps 33", "--total-timesteps 33: the run has 96 already"),
    ("--run-dir elsewhere", "--run-dir elsewhere: the resumed run has"),
]


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """Two seeds; not with the default learning rate"""
    return run(tmp_path_factory.mktemp("short"), "ppo", total_timesteps=96, num_seeds=2, learning_rate=0.01)


@pytest.mark.parametrize(("words", "said"), CHANGED)
def test_flags_that_differ_from_the_resumed_run_are_refused_by_name(words, said, short_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "setup.py").touch()
    before = Path(short_run["checkpoint"]).read_bytes()
    with pytest.raises(UserError) as error:
        hop.main(words_of(short_run["checkpoint"], *words.split()))
    assert str(error.value).startswith(said) and Path(short_run["checkpoint"]).read_bytes() == before


def test_a_run_is_extended_from_the_folder_of_any_seed(short_run, tmp_path, monkeypatch):
    """As if it had been longer from the start, but for the learning rate; the bar counts the new steps alone"""
    bars, tqdm = [], hop.tqdm
    first, second = folders_of(shutil.copytree(Path(short_run["checkpoint"]).parents[1], tmp_path / "runs"))
    monkeypatch.setattr(hop, "tqdm", lambda *given, **named: (bars.append(named), tqdm(*given, **named))[1])
    hop.tqdm.write = tqdm.write
    same = ("--learning-rate", "0.01", "--num-envs", "4")  # said again, but no change
    for words in (("--total-timesteps", "160", "--log-every", "2"), ("--total-timesteps", "192", *same)):
        hop.main(words_of(second, *words))
    assert [(bar["initial"], bar["total"]) for bar in bars] == [(96, 160), (160, 192)]
    for folder in (first, second):
        assert [line["steps"] for line in lines_of(folder)] == [32, 64, 96, 128, 160, 192]
        assert json.loads((folder / "args.json").read_text())["total_timesteps"] == 192
    saved = load(second)
    assert saved["iteration"] == 6 and saved["args"]["log_every"] == 2


def test_another_script_s_run_is_refused_and_a_copy_goes_on(short_run, tmp_path, capsys, monkeypatch):
    with pytest.raises(UserError, match=r"it is 'hopplus_ppo\.py \d+', not 'hopplus_mcts\.py \d+'"):
        hopplus_mcts.parse_args(["--resume", short_run["checkpoint"]])
    runs = shutil.copytree(Path(short_run["checkpoint"]).parents[1], tmp_path / "runs")
    copied = load_copy(tmp_path / "my_copy.py", monkeypatch)
    words = ["--device", "cpu", "--resume", str(folders_of(runs)[0]), "--total-timesteps", "128"]
    copied.main(copied.parse_args(words))
    assert capsys.readouterr().out.count("was made by another text than this script: hopplus_ppo.py") == 1
    assert load(folders_of(runs)[0])["iteration"] == 4


def test_the_way_to_go_on_can_be_pasted(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "my runs; touch here"
    train_iteration = hop.train_iteration
    stop = lambda state: (os.kill(os.getpid(), signal.SIGINT), train_iteration(state))[1]  # noqa: E731
    monkeypatch.setattr(hop, "train_iteration", stop)
    with pytest.raises(SystemExit):
        run(folder, "ppo")
    (checkpoint,) = folder.glob("*/checkpoint.pt")
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("stopped; go on with: ")
    assert shlex.split(command) == ["python", sys.argv[0], "--resume", str(checkpoint)]


# ---------------------------------------------------------------------------------------------------------------------
# Games and seeds


def test_watched_and_pretraining_games_are_other_games(tmp_path, monkeypatch):
    deals, init = [], hop.Games.__init__

    def watched(games, *given, **named):
        init(games, *given, **named)
        state = games.env.state
        deals.append((state.position[:2].tolist(), state.prey_position[:2].tolist()))

    monkeypatch.setattr(hop.Games, "__init__", watched)
    run(tmp_path, total_timesteps=32)
    assert len(deals) == 3 and all(one != other for one, other in itertools.combinations(deals, 2))


def test_a_rank_draws_games_of_both_kinds():
    args = make_args(num_envs=64, subgoal_batch_size=8, wm_batch_size=1024)
    share = hop.rank_share(args, 8)
    assert (share.num_envs, share.subgoal_batch_size, share.wm_batch_size) == (8, 2, 128)
    assert hop.rank_share(args, 1) == args


def test_only_a_gpu_fuses(tmp_path, monkeypatch):
    """--compile on a CPU: neither the script's functions nor the game's"""

    def forbidden(*_, **__):
        raise AssertionError("torch.compile was called")

    monkeypatch.setattr(torch, "compile", forbidden)
    plain = {function.__name__: function for function in hop.FUSED}
    run(tmp_path, compile=True, total_timesteps=32)
    assert {name: getattr(hop, name) for name in plain} == plain


def test_what_is_fused_is_what_the_script_calls(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compiled.append(function) or (function, dynamic))
    plain = {function.__name__: function for function in hop.FUSED}
    for name, function in plain.items():
        assert getattr(hop, name) is function, f"{name} is not the function of this name"
    try:
        hop.fuse(True)
        assert compiled == list(hop.FUSED)
        assert {name: getattr(hop, name) for name in plain} == {name: (f, False) for name, f in plain.items()}
    finally:
        hop.fuse(False)
    assert {name: getattr(hop, name) for name in plain} == plain


def test_few_imagined_games_are_of_both_kinds_too(tmp_path, monkeypatch):
    drawn, sample_replays = [], hop.sample_replays

    def watched(replay, offline, ratio, count, window):
        drawn.append((ratio, count, window))
        return sample_replays(replay, offline, ratio, count, window)

    monkeypatch.setattr(hop, "sample_replays", watched)
    run(tmp_path, watched_starts=0.5, ppo_real_ratio=0.95, total_timesteps=32)
    assert (0.5, 2, 1) in drawn


SETTINGS = {  # games, steps, learning rate, epochs, minibatches, width, share of watched starts
    ("ppo", "cuda", 4): (1024, 4_000_000, 2e-4, 4, 4, 128, 0.5),
    ("ppo", "cuda", 8): (1024, 4_000_000, 2e-4, 4, 4, 128, 0.5),
    ("ppo", "cpu", 4): (256, 350_000, 1e-3, 3, 4, 64, 0.5),
    ("ppo", "cpu", 8): (1024, 3_500_000, 2e-4, 4, 4, 64, 0.5),
    ("hopplus", "cuda", 4): (256, 2_000_000, 1e-3, 4, 4, 128, 0.5),
    ("hopplus", "cuda", 8): (256, 4_000_000, 1e-3, 4, 4, 128, 0.5),
    ("hopplus", "cpu", 4): (64, 120_000, 2e-3, 4, 16, 64, 0.85),
    ("hopplus", "cpu", 8): (64, 350_000, 2e-3, 4, 16, 64, 0.85),
}


@pytest.mark.parametrize("script", [hop, hopplus_mcts])
@pytest.mark.parametrize(("method", "device", "size"), SETTINGS)
def test_settings_by_method_device_and_board(script, method, device, size, monkeypatch):
    monkeypatch.setattr(hop.game, "resolve_device", torch.device)
    config = hop.StagHuntConfig(height=size, width=size)
    args = script.make_args(method, device, config=config)
    found = args.num_envs, args.total_timesteps, args.learning_rate, args.update_epochs
    found += args.num_minibatches, args.policy_hidden, args.watched_starts
    assert found == SETTINGS[method, device, size]
    assert (args.critic_data, args.imagined_weight, args.trust_exact_match, args.unsteady) == ("mixed", 1, 0.99, 0.5)
    assert args.kl_coef == 1e-3, "with 0.01 subgoals collapse, as --help says"
    models = args.subgoal_updates, args.subgoal_batch_size, args.wm_updates, args.wm_batch_size
    models += args.pretraining_updates, args.pretraining_games
    assert models == ((1, 8, 2, 256, 200, 64) if device == "cpu" else (4, 64, 4, 1024, 800, 1024))
    if method == "ppo":  # with subgoals: the same but for these
        with_subgoals = {"method": "ppo-omg", "subgoals": "inferred", "memory_discount": 0.9}
        assert script.make_args("ppo-omg", device, config=config) == dataclasses.replace(args, **with_subgoals)
    of_both = vars(args).keys() & vars(hop.make_args(method, device)).keys() - {"exp_name"}
    other = hop.make_args(method, device, config=config)
    assert all(getattr(args, name) == getattr(other, name) for name in of_both), "in both scripts"
