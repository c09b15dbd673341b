"""Whole runs of hopplus_ppo.py: what they leave behind, how they stop and go on, and which flags are refused."""

import contextlib
import copy
import dataclasses
import importlib.util
import inspect
import itertools
import json
import math
import re
import shutil
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
from helpers import TINY_CONFIG, TINY_FLAGS, NoNonFiniteCasts, lines_of, same_tree, without_times, write_checkpoint
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._pytree import tree_leaves


def make_args(method="hopplus", **changes):
    return hop.make_args(method, "cpu", **{**TINY_FLAGS, **changes})


def run(run_dir, method="hopplus", **changes):
    return hop.main(make_args(method, run_dir=str(run_dir), **changes))


def load(path):
    return game.load_checkpoint(path, hop.FORMAT)


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

PPO_KEYS = {"charts/SPS", "charts/stag_share", "losses/explained_variance", "per_agent/value_loss_real/learner_2"}
OMG_KEYS = {"moa/nll", "moa/ceiling/top1", "omg/kl", "losses/moa", "per_agent/moa_nll/learner_2"}
HOPPLUS_KEYS = {"wm/exact_match/4", "wm/payoff_match/1", "imagined/value_mean", "losses/world_model"}
KEYS = {"ppo": PPO_KEYS, "ppo-omg": PPO_KEYS | OMG_KEYS, "hopplus": PPO_KEYS | OMG_KEYS | HOPPLUS_KEYS}  # a few


@pytest.mark.parametrize("method", hop.METHODS)
def test_what_a_run_leaves_behind(method, runs):
    folder, final = runs[method]
    first, second = folders = folders_of(folder)
    assert re.fullmatch(rf"hopplus_ppo__3x4_3h1s_3hares_{method}__1__\d+", first.name) and "__2__" in second.name
    files = sorted(path.name for path in first.iterdir() if "tfevents" not in path.name)
    assert files == ["args.json", "checkpoint.pt", "metrics.jsonl"]
    args = make_args(method, run_dir=str(folder), num_seeds=2, total_timesteps=90)
    saved = torch.load(first / "checkpoint.pt", weights_only=True)
    assert final["checkpoint"] == str(first / "checkpoint.pt")
    assert saved["format"] == hop.FORMAT and saved["iteration"] == 3 and saved["device"] == "cpu"
    assert saved["script"]["name"] == "hopplus_ppo.py" and saved["folders"] == [f.name for f in folders]
    assert hop.Args(**saved["args"] | {"config": TINY_CONFIG}) == args
    assert "moa_prior" not in saved["states"][0]["networks"], "it is only for pretraining"
    for folder in folders:
        flags = json.loads((folder / "args.json").read_text())
        assert (folder / flags.pop("checkpoint")).resolve() == (first / "checkpoint.pt").resolve()
        assert flags == json.loads(json.dumps(saved["args"]))
        lines = lines_of(folder)
        assert [line.pop("steps") for line in lines] == [32, 64, 96]
        assert KEYS[method] <= lines[2].keys() and all(line.keys() == lines[0].keys() for line in lines)
        events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
        for name in lines[0]:
            values = {step: line[name] for step, line in zip((32, 64, 96), lines, strict=True)}
            finite = {step: value for step, value in values.items() if value is not None}
            drawn = events.Scalars(name) if finite else []
            assert {x.step: x.value for x in drawn} == pytest.approx(finite, rel=1e-5), name
        flags = events.Tensors("hyperparameters/text_summary")[0].tensor_proto.string_val[0].decode()
        assert "|method|" in flags and "|height|3|" in flags
        assert ("imagined/value" in events.Tags()["histograms"]) == (method == "hopplus")
        if method != "ppo":
            parts = [line["losses/moa"] + line["omg/recon"] + args.kl_coef * line["omg/kl"] for line in lines]
            assert [line["losses/opponent_models"] for line in lines] == pytest.approx(parts, rel=1e-4)
    both = [lines_of(folder)[2] for folder in folders]
    for name in ("losses/value_loss", "charts/episodic_return"):
        assert final[name] == pytest.approx((both[0][name] + both[1][name]) / 2)
    assert both[0]["losses/value_loss"] != both[1]["losses/value_loss"], "each seed's own"
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


def test_the_same_seed_gives_the_same_run_and_another_seed_another(runs, tmp_path):
    run(tmp_path / "again", num_seeds=2, total_timesteps=90)
    run(tmp_path / "other", seed=2, total_timesteps=90)
    first, again, other = (
        without_times(lines_of(folders_of(f)[0])) for f in (runs["hopplus"][0], tmp_path / "again", tmp_path / "other")
    )
    assert first == again != other


VARIANTS = {  # that no golden run is
    "no stag": {"config": dataclasses.replace(TINY_CONFIG, num_stags=0)},
    "no hare": {"config": dataclasses.replace(TINY_CONFIG, num_hares=0)},
    "nothing to read": {"subgoals": "none"},
    "not trained": {"wm_updates": 0, "subgoal_updates": 0, "offline_ratio": 0.0},
    "one number": {"goal_dim": 1, "num_steps": 5, "imagination_horizon": 5, "subgoal_selection": "optimistic"},
    "ppo that remembers": {"method": "ppo", "subgoals": "inferred", "memory_discount": 0.9},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_variants_run_and_stay_finite(changes, tmp_path):
    final = run(tmp_path, **{"total_timesteps": 60, "num_envs": 8, **changes})
    found = {name: x for name, x in final.items() if name.startswith(("losses/", "real/", "omg/", "imagined/"))}
    assert len(found) > 10 and all(math.isfinite(x) for x in found.values())


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


def test_bfloat16_stays_inside(tmp_path, monkeypatch):
    """What acts and imagines in it hands on the same types as without."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(hop, "inference_dtype", lambda args, device, dtype=dtype: dtype)
        final = run(tmp_path / str(dtype), total_timesteps=32)
        found.append((final["real/value_mean"], load(final["checkpoint"])["states"]))
    assert [x.dtype for x in tree_leaves(found[0][1])] == [x.dtype for x in tree_leaves(found[1][1])]
    assert found[0][0] == pytest.approx(found[1][0], rel=0.05) and found[0][0] != found[1][0]


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong


def test_no_cast_depends_on_the_machine(tmp_path):
    with NoNonFiniteCasts() as seen:
        run(tmp_path, total_timesteps=32, goal_kind="discrete", seats="learner,mixed,learner")
    assert seen.casts > 0


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
    final = run(tmp_path, "ppo", config=config, learning_rate=0.05)
    assert math.isfinite(final["losses/value_loss"]) and math.isfinite(final["charts/episodic_return"])
    if config.final_time == 1:
        assert math.isnan(final["losses/explained_variance"]), "there is nothing to explain"
    else:
        assert final["losses/value_loss"] > 1e6


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
    ("ppo-omg", {"log_every": 2}),  # from a checkpoint between two rows
    ("hopplus", {"seats": "learner,mixed,learner", "redraw": "0.5", "replay_rollouts": 3}),
]


@pytest.mark.parametrize(("method", "changes"), RESUMED)
def test_a_resumed_run_is_the_same_bit_for_bit(method, changes, tmp_path, monkeypatch):
    """Also in another place, and with what was logged after the checkpoint logged again"""
    changes = {**changes, "total_timesteps": 6 * 32, "num_seeds": 2, "save_seconds": 0.0}
    whole = run(tmp_path / "whole", method, **changes)
    each = 32 * changes.get("log_every", 1)
    steps = list(range(each, 6 * 32 + 1, each))
    before = list(range(each, 4 * 32 + 1, each))
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
    assert [line["steps"] for line in lines_of(checkpoint.parent)] == before
    assert torch.load(checkpoint, weights_only=True)["iteration"] == 3
    # TensorBoard reads files by name: "....99" and "....100" of one second and process in the wrong order
    (events,) = checkpoint.parent.glob("events*")
    events.rename(events.with_name("events.out.tfevents.0"))
    resumed = hop.main(hop.make_args(device="cpu", resume=str(checkpoint)))
    assert resumed.pop("checkpoint") == str(checkpoint)
    assert [line["steps"] for line in lines_of(folders_of(tmp_path / "killed")[0])] == before
    first, second = (torch.load(path, weights_only=True) for path in (whole.pop("checkpoint"), checkpoint))
    assert second["iteration"] == 6 and first["states"][0].keys() == second["states"][0].keys()
    for key, value in first["states"][0].items():
        assert same_tree(value, second["states"][0][key]), key
    parts = {"games", "cpu_random", "networks", "optimizers", "eps", "horizon", "metrics"}
    assert parts <= first["states"][0].keys()
    assert {"env", "seats", "replay", "last_joint", "history"} == first["states"][0]["games"].keys()
    assert ("watched" in first["states"][0]) == (method != "ppo")
    assert resumed == pytest.approx(whole, rel=0, abs=0, nan_ok=True)
    lines = [[without_times(lines_of(f)) for f in folders_of(tmp_path / d)] for d in ("whole", "moved")]
    assert lines[0] == lines[1] and [line["steps"] for line in lines[1][0]] == steps
    events = EventAccumulator(str(checkpoint.parent), {"scalars": 0}).Reload()
    assert [x.step for x in events.Scalars("charts/episodic_return")] == steps
    again = hop.main(hop.make_args("ppo", "cpu", resume=str(checkpoint)))  # it is over
    assert again["checkpoint"] == str(checkpoint) and len(lines_of(checkpoint.parent)) == len(steps)


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
        write_checkpoint(tmp_path / f"{name}.pt", content)
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


def test_flags_change_the_defaults_of_method_device_and_board():
    cpu = hop.make_args("hopplus", "cpu")
    assert hop.make_args() == dataclasses.replace(cpu, device="auto")
    assert hop.parse_args(["--method", "ppo", "--device=cpu"]) == hop.make_args("ppo", "cpu")
    words = "--device cpu --height 8 --no-anneal-lr --seats learner,mixed,mixed,random --seed 5"
    expected = {"anneal_lr": False, "seats": "learner,mixed,mixed,random", "seed": 5, "total_timesteps": 350_000}
    expected["config"] = dataclasses.replace(hop.StagHuntConfig(), height=8)
    assert hop.parse_args(words.split()) == dataclasses.replace(cpu, **expected)


def test_every_flag_is_explained():
    grouped = {field.name: group for group in hop.GROUPS.values() for field in dataclasses.fields(group)}
    own = {field.name for field in dataclasses.fields(hop.Args)} - {"config"}
    assert own == grouped.keys() - {field.name for field in dataclasses.fields(hop.StagHuntConfig)}
    sources = {group: inspect.getsource(group) for group in hop.GROUPS.values()}
    for name, group in grouped.items():
        line, after = sources[group].split(f"    {name}: ", 1)[1].split("\n", 2)[:2]
        assert "  # " in line or (after.startswith('    """') and len(after) > 12), name


BAD_FLAGS = [  # one for each kind of check
    ("--nonsense 3", "--nonsense"),
    ("--num-envs three", "three"),
    ("--method dqn", "--method must be one of ppo, ppo-omg, hopplus, not dqn"),
    ("--goal-kind cubic", "cubic"),
    ("--num-envs 0", "--num-envs must be >= 1, not 0"),
    ("--learning-rate nan", "--learning-rate must be > 0, not nan"),
    ("--ppo-real-ratio 0 --critic-data real", "--ppo-real-ratio 0 needs --critic-data mixed"),
    ("--num-minibatches 9999", "--num-minibatches exceeds"),
    ("--imagination-horizon 33", "--imagination-horizon is measured on --num-steps 32"),
    ("--seats random,random,random,random", "nobody learns"),
    ("--redraw sometimes", "--redraw must be game, never or a probability"),
    ("--goal-kind discrete --goal-dim 1", "--goal-kind discrete needs --goal-dim 2"),
    ("--subgoal-batch-size 1", "--offline-ratio needs --subgoal-batch-size 2 or more"),
    ("--height 2 --width 2", "--height 2 --width 2: too little room"),
    ("--height 16 --width 16", "255"),
    ("--final-time 300", "255"),
    ("--method ppo --vae-checkpoint vae.pt", "--vae-checkpoint needs"),
    ("--method ppo-omg --world-model-checkpoint wm.pt", "--world-model-checkpoint needs --imagination"),
    ("--exp-name ../evil", "--exp-name must be a name"),
    ("--seed 9999999999999", "--seed must be below 2**40"),
    ("--run-dir setup.py", "could not write to setup.py"),
    ("--resume nowhere.pt", "there is no checkpoint 'nowhere.pt'"),
    ("--vae-checkpoint nowhere.pt", "--vae-checkpoint nowhere.pt: there is no checkpoint"),
    ("--world-model-checkpoint setup.py", "setup.py (0 bytes) is damaged"),
]


@pytest.mark.parametrize(("words", "said"), BAD_FLAGS, ids=[words for words, _ in BAD_FLAGS])
def test_wrong_flags_end_with_one_line_and_nothing_on_disk(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "setup.py").touch()
    monkeypatch.setattr(sys, "argv", ["hopplus_ppo.py", "--device", "cpu", *words.split()])
    with pytest.raises(SystemExit) as stop:
        command_line(hop.parse_args, hop.main)
    printed = capsys.readouterr()
    (line,) = printed.err.strip().splitlines()
    assert stop.value.code == 2 and line.startswith("error: ") and said in line
    assert [path.name for path in tmp_path.iterdir()] == ["setup.py"]


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


def test_a_mistake_in_an_edited_copy_keeps_its_traceback(tmp_path, monkeypatch):
    line = "    steps_each = args.num_envs * args.num_steps\n"
    mistake = "    first, second = (1, 2, 3)\n"
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
    ("--method hopplus", "--method hopplus: the resumed run has ppo"),
    ("--height 4", "--height 4: the resumed run has 3"),
    ("--total-timesteps 33", "--total-timesteps 33: the run has 96 already"),
]


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """Two seeds; not with the default learning rate"""
    return run(tmp_path_factory.mktemp("short"), "ppo", total_timesteps=96, num_seeds=2, learning_rate=0.01)


@pytest.mark.parametrize(("words", "said"), CHANGED)
def test_flags_that_differ_from_the_resumed_run_are_refused_by_name(words, said, short_run):
    before = Path(short_run["checkpoint"]).read_bytes()
    with pytest.raises(UserError) as error:
        hop.main(words_of(short_run["checkpoint"], *words.split()))
    assert str(error.value).startswith(said) and Path(short_run["checkpoint"]).read_bytes() == before


def test_a_run_is_extended_from_the_folder_of_any_seed(short_run, tmp_path):
    """As if it had been longer from the start, but for the learning rate"""
    first, second = folders_of(shutil.copytree(Path(short_run["checkpoint"]).parents[1], tmp_path / "runs"))
    same = ("--learning-rate", "0.01", "--num-envs", "4")  # said again, but no change
    for words in (("--total-timesteps", "160", "--log-every", "2"), ("--total-timesteps", "192", *same)):
        hop.main(words_of(second, *words))
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


def test_what_is_fused_is_what_the_script_calls(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: (function, dynamic))
    plain = {function.__name__: function for function in hop.FUSED}
    assert plain == {name: getattr(hop, name) for name in plain}
    try:
        hop.fuse(True)
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
