"""The benchmarks measure what they say, and the experiments' tables and figures come from the runs."""

import contextlib
import csv
import dataclasses
import functools
import itertools
import json
import math
import re
import shutil
import sys
import threading
import types
from pathlib import Path

import hopplus_mcts
import hopplus_ppo
import pretrain_vae
import pretrain_world_model
import stag_hunt_env
from benchmarks import figures, patches, results, sections, worst_case
from benchmarks.baselines import ppo_gru
from evaluation import adapt, evaluate, moa, partners, subgoals
from evaluation import runs as evaluation_runs
from stag_hunt_env import StagHuntConfig

import numpy as np
import pytest
import torch
from helpers import TINY_RUN
from matplotlib.figure import Figure
from PIL import Image

sys.path.insert(0, str(Path(hopplus_ppo.__file__).resolve().parent / "benchmarks"))

import dashboard
import decisions
import experiments
import peers
import search
import speed

ROOT = Path(hopplus_ppo.__file__).resolve().parent
SCRIPTS = {
    "hopplus_ppo.py": hopplus_ppo,
    "hopplus_mcts.py": hopplus_mcts,
    "pretrain_vae.py": pretrain_vae,
    "pretrain_world_model.py": pretrain_world_model,
    "evaluation/adapt.py": adapt,
    "evaluation/evaluate.py": evaluate,
    "evaluation/partners.py": partners,
    "evaluation/subgoals.py": subgoals,
    sections.GRU: ppo_gru,
}
MEASURED = ("agent_steps_per_s", "iteration_ms", "rollout_ms", "ready_s")
MEASURED += ("game_and_policy_env_steps_per_s", "game_only_env_steps_per_s")
SMALL = "--num-envs 4 --num-steps 8 --imagination-horizon 4 --pretraining-games 4 --wm-hidden 16 --subgoal-hidden 8"
SMALL += " --policy-hidden 16 --replay-rollouts 2"
TINY = {
    **TINY_RUN,
    "config": StagHuntConfig(height=3, width=4, num_players=3, num_hares=3, final_time=6),
}


@pytest.mark.parametrize(("script", "flags"), [("ppo", "--method ppo"), ("mcts", "--num-simulations 2 --num-trees 2")])
def test_speed(script, flags, tmp_path):
    args = speed.Args(flags=f"{flags} {SMALL}", script=script, repeats=1, device="cpu", folder=str(tmp_path))
    (row,) = speed.main(args)
    stages = [row[f"{name}_ms"] for name in ("rollout", "measure", "models", "imagine", "ppo")]
    assert row["env_steps_per_s"] == pytest.approx(32 / row["iteration_ms"] * 1000) and min(stages) >= 0
    assert row["agent_steps_per_s"] == pytest.approx(4 * row["env_steps_per_s"])
    assert row["game_only_env_steps_per_s"] > 0
    (line,) = csv.DictReader((tmp_path / "own.csv").open())
    assert float(line["iteration_ms"]) == row["iteration_ms"] and line["flags"] == args.flags


def test_commands(tmp_path, monkeypatch):
    flags = f"--method ppo --final-time 6 --total-timesteps 512 {SMALL}"
    monkeypatch.setattr(speed, "COMMANDS", {"small": ("ppo", flags, 1, False)})
    (row,) = speed.main(speed.Args(cases="commands", device="cpu", folder=str(tmp_path)))
    assert row["seconds"] > row["ready_s"] + row["training_s"] > 0 and -1 <= row["return_last_fifth"] <= 5
    (line,) = csv.DictReader((tmp_path / "commands.csv").open())
    assert line["case"] == "small" and float(line["seconds"]) == row["seconds"]


MEET = """
import pathlib, sys, time
own, other, seconds = sys.argv[1:]
pathlib.Path(own).touch()
end = time.monotonic() + 60
while not pathlib.Path(other).exists():
    assert time.monotonic() < end
    time.sleep(0.01)
time.sleep(float(seconds))
"""


def test_commands_run_side_by_side_beside_a_busy_program(tmp_path, monkeypatch):
    """Each waits for the other; the slowest counts; nothing goes on afterwards"""
    begun = []
    begin = speed.subprocess.Popen

    def noted(*words, **options):
        begun.append(begin(*words, **options))
        return begun[-1]

    monkeypatch.setattr(speed.subprocess, "Popen", noted)
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    meet = [sys.executable, "-c", MEET]
    seconds = speed.run_commands([[*meet, first, second, "0"], [*meet, second, first, "0.5"]], busy=True)
    assert seconds > 0.5 and len(begun) == 3 and "while True" in begun[0].args[-1]
    assert all(process.poll() is not None for process in begun)
    with pytest.raises(stag_hunt_env.UserError, match="this command fails"):
        speed.run_commands([[sys.executable, "-c", "raise SystemExit(3)"]], busy=False)


@pytest.mark.parametrize(("only", "series"), [("", 6), ("seeds", 1)])
def test_growth(only, series, tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "measure", lambda hop, flags, *_: dict.fromkeys(MEASURED, float(flags.split()[-1])))
    rows = speed.main(speed.Args(cases="growth", only=only, device="cpu", folder=str(tmp_path)))
    assert len(rows) == 3 * series and (tmp_path / "growth.png").exists()
    lines = list(csv.DictReader((tmp_path / "growth.csv").open()))
    assert [line["case"] for line in lines][:2] == (["seeds 1", "seeds 2"] if only else ["games 32", "games 128"])
    assert all(float(line["iteration_ms"]) == float(line["case"].split()[-1]) for line in lines)


def test_a_part_of_a_series_is_not_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "measure", lambda *_: dict.fromkeys(MEASURED, 1.0))
    (row,) = speed.main(speed.Args(cases="growth", only="seeds 4", device="cpu", folder=str(tmp_path)))
    assert row["case"] == "seeds 4" and not (tmp_path / "growth.png").exists()


def test_a_case_that_does_not_exist(tmp_path):
    with pytest.raises(ValueError, match=r"--only POP: no case begins so; there are PPO, defaults, HOP\+, defaults"):
        speed.main(speed.Args(only="POP", device="cpu", folder=str(tmp_path)))


@pytest.mark.parametrize(
    ("program", "changes", "words"),
    [
        (speed, {"repeats": 0}, "--repeats must be >= 1, not 0"),
        (search, {"trees": (8, 0)}, "--trees must be >= 1, not 0"),
        (search, {"simulations": -1}, "--simulations must be >= 1, not -1"),
        (decisions, {"repeats": 0}, "--repeats must be >= 1, not 0"),
        (decisions, {"games": (8, 0)}, "--games must be >= 1, not 0"),
        (decisions, {"only": ("HOP", "POP")}, "--only POP: the methods are PPO, PPO \\+ subgoals, Direct-OM"),
    ],
)
def test_wrong_numbers(program, changes, words):
    with pytest.raises(ValueError, match=words):
        program.main(program.Args(device="cpu", **changes))


def test_search_speed():
    rates = search.main(search.Args(trees=(4, 8), simulations=4, width=8, repeats=1, device="cpu"))
    assert list(rates) == ["puct/4", "puct/8", "gumbel/4", "gumbel/8"] and min(rates.values()) > 0


SMALL_MODELS = "--pretraining-games 4 --wm-hidden 16 --subgoal-hidden 8 --policy-hidden 16"


def test_decisions(tmp_path, monkeypatch, capsys):
    """Every method plays its steps in so many games; the time of a decision is their share of the median"""
    played = []

    def median_seconds(function, repeats, device):
        transitions, outputs, _ = function()
        played.append((tuple(transitions.reward.shape), "q" in outputs))
        assert (repeats, device.type) == (4, "cpu")
        return 0.012

    monkeypatch.setattr(decisions, "median_seconds", median_seconds)
    path = tmp_path / "decisions.csv"
    changes = {"flags": SMALL_MODELS, "repeats": 4, "device": "cpu", "csv": str(path)}
    decisions.main(decisions.Args(games=(2,), steps=1, **changes))
    assert played == [((4, 1, 2), searches) for searches in [False] * 4 + [True] * 6]
    lines = list(csv.DictReader(path.open()))
    assert [line["run"] for line in lines] == list(sections.TIMED)
    assert (lines[-1]["script"], lines[-1]["flags"]) == ("hopplus_mcts.py", "--method hop")
    assert {line["milliseconds"] for line in lines} == {"12.0"}
    played.clear()
    rows = decisions.main(decisions.Args(only=("PPO",), steps=3, **changes))
    assert played == [((4, 3, 1), False), ((4, 3, 64), False)]
    assert [(row["run"], row["games"], row["milliseconds"]) for row in rows] == [("PPO", 1, 4.0), ("PPO", 64, 4.0)]
    assert "PPO                             64 game(s)      4.000" in capsys.readouterr().out


def test_all_flags_of_all_cases_are_understood(monkeypatch):
    for module in (evaluation_runs, adapt):
        monkeypatch.setattr(module, "load_run", lambda args, words, needs: None)  # there is no run
    found = {(f"hopplus_{script}.py", flags) for cases in speed.CASES.values() for script, flags in cases.values()}
    for script, flags, values in speed.GROWTH.values():
        found |= {(f"hopplus_{script}.py", f"{flags} {max(values[device])}") for device in values}
    for name, section in sections.SECTIONS.items():
        for run in section.runs.values():
            commands = run.then if name in sections.TASKS else (f"{run.script} {run.flags}", *run.then)
            found |= {tuple(words.split(" ", 1)) for words in commands}
            found |= {(script, flags) for script, flags, _ in run.before}
            assert set(run.patch) <= patches.PATCHES.keys()
    assert len(found) > 50
    for script, flags in found:  # what trains in the ladder: tests/test_ladder.py
        SCRIPTS[script].parse_args(flags.split())


@pytest.mark.parametrize("board", sections.BOARDS)
def test_learned_co_players_are_understood(board, monkeypatch):
    monkeypatch.setattr(adapt, "load_run", lambda args, words, needs: None)  # there is no run
    *_, learned = sections.meetings("PPO", board)
    words = learned.replace(f"OTHERS_{board}", "PPO=a.pt HOP+=b.pt").split()
    args = adapt.parse_args(words[1:])
    assert (args.sets, len(args.others), args.modes) == ("learned", 2, ("frozen", "learning"))


def test_partners_of_a_new_kind_are_understood():
    _, *commands = sections.SECTIONS["stays-4x4"].runs["HOP+"].then
    seen = [partners.parse_args(command.split()[1:]) for command in commands]
    assert [args.population for args in seen] == ["nearest_stag", "left_stag"]


EITHER = pytest.mark.parametrize("script", [hopplus_ppo, hopplus_mcts], ids=["ppo", "mcts"])


@functools.cache
def patched(script, *names):
    """The script with mistakes"""
    edits = {name: patches.PATCHES[name] for name in names}
    return patches.patched_script(Path(script.__file__).name, edits)


def make_state(hop, method="hopplus", **changes):
    args = hop.make_args(method, "cpu", **{**TINY, "imagination_horizon": 2, **changes})
    return hop.make_train_state(args, [["learner"] * 3] * 2, [1, 2], torch.device("cpu"))


def play(hop, state):
    return hop.rollout(state.args, state.games, state.networks, 8)


def predict(hop, state, transitions):
    """[M, n, K, 7] what MOA expects"""
    args, env, networks = state.args, state.games.env, state.networks
    steps = hop.Transitions(*(x.flatten(1, 2) for x in transitions))
    views, clock = hop.entity_views(env, steps.board, steps.walls), steps.time / 6
    belief = hop.infer_opponents(args, env, networks, views, clock, steps.history, steps.oracle_id)
    noise = torch.zeros(*belief.params.shape[:2], 5)
    return hop.predict_actions(args, networks, belief, clock, noise).exp()


def opponent_losses(hop, state, transitions):
    torch.manual_seed(1)
    return hop.opponent_model_losses(state.args, state.games.env, state.networks, transitions, 0.0)


def patched_runs():
    """One run for each way to patch a script"""
    runs = (run for section in sections.SECTIONS.values() for run in section.runs.values() if run.patch)
    for (script, patch), run in {(run.script, run.patch): run for run in runs}.items():
        yield pytest.param(run, id="-".join((Path(script).stem, *patch)))


@pytest.mark.cuda
@pytest.mark.parametrize("run", list(patched_runs()))
def test_patched_iterations_can_be_captured(run, tmp_path):
    script = patched(SCRIPTS[run.script], *run.patch)
    args = script.parse_args(run.flags.split())
    sizes = {**TINY_RUN, "goal_dim": args.goal_dim, "num_seeds": 1}
    final = script.main(dataclasses.replace(args, **sizes, run_dir=str(tmp_path)))
    assert math.isfinite(final["losses/value_loss"])


@EITHER
def test_one_player(script):
    state = make_state(script, num_seeds=2)
    transitions, outputs, _ = play(script, state)
    samples = script.real_samples(state.args, state.args.config, transitions, outputs)
    right = {real: script.make_ppo_batch(state.args, samples, real) for real in (True, False)}
    other = patched(script, "one_player")
    wrong = {real: other.make_ppo_batch(state.args, samples, real) for real in (True, False)}
    for name, x in right[True].items():
        assert all(torch.equal(wrong[True][name][m], x[m // 3 * 3]) for m in range(6)), name
        assert torch.equal(wrong[False][name], right[False][name]), "imagined samples are everybody's own"


@EITHER
def test_zero_subgoals(script):
    state = make_state(script)
    start = script.Transitions(*(x[:, 0] for x in play(script, state)[0]))
    given = state.args, state.games.env, state.networks, start, torch.ones_like(start.done)
    horizon = torch.full_like(state.horizon, 2)
    size = 2 * state.args.goal_dim  # of two co-players
    assert (script.imagine(*given, horizon)["inputs"][..., -size:] != 0).any()
    other = patched(script, "zero_subgoals")
    inputs = other.imagine(*given, horizon)["inputs"]
    assert (inputs[..., -size:] == 0).all() and (inputs[..., :-size] != 0).any()
    assert (play(other, state)[1]["goals"] != 0).any(), "real games still read subgoals"


def test_unclipped():
    pixel, unclipped = patched(hopplus_ppo, "pixel"), patched(hopplus_ppo, "pixel", "unclipped")
    state = make_state(pixel)
    steps = pixel.Transitions(*(x[:, 0] for x in play(pixel, state)[0]))
    given = state.args.config, state.networks.world, steps.board, steps.walls, steps.joint, steps.seat
    with torch.no_grad():
        clipped, raw = (hop.predict_step(*given)[1] for hop in (pixel, unclipped))
    payoffs = state.args.config.payoffs()
    assert torch.equal(clipped, raw.clamp(min(payoffs), max(payoffs))) and not torch.equal(clipped, raw)


def test_pixel_world_models(tmp_path, monkeypatch):
    """learn as in pretraining, which they may start from; the script's own world model may not"""
    monkeypatch.setattr(pretrain_world_model, "draw_pictures", lambda *_: None)
    weights = (2, 2, 2, 1, 1, 1)
    changes = {"wm_head": "pixel", "wm_channel_weights": weights, "wm_hidden": 16, "config": TINY["config"]}
    small = {"num_updates": 2, "num_transitions": 100, "held_out_games": 4, "device": "cpu"}
    args = pretrain_world_model.make_args(**changes, **small, run_dir=str(tmp_path / "before"))
    checkpoint = pretrain_world_model.main(args)["checkpoint"]
    flags = {**TINY, "imagination_horizon": 2, "run_dir": str(tmp_path / "runs"), "world_model_checkpoint": checkpoint}
    args = hopplus_ppo.make_args("hopplus", "cpu", **flags)
    with pytest.raises(ValueError, match="world_model PixelWorldModel, here WorldModel"):
        hopplus_ppo.main(args)
    edit = {patches.AFTER_WORLD_MODEL: patches.pixel_world_model(weights)}
    final = patches.patched_script("hopplus_ppo.py", {"pixel": edit}).main(args)
    assert math.isfinite(final["losses/world_model"]) and final["imagined/samples"] > 0
    world, before = (torch.load(path, weights_only=True) for path in (final["checkpoint"], checkpoint))
    assert world["states"][0]["networks"]["world"].keys() == before["networks"]["world"].keys()


@EITHER
def test_which_steps_moa_learns_from(script):
    """Those after a co-player left; only those of games in which it took prey; illegal actions too"""
    state = make_state(script, num_envs=16)
    for _ in range(3):
        transitions = play(script, state)[0]
    with torch.no_grad():
        assert (predict(script, state, transitions) == 0).any()
        unmasked = make_state(patched(script, "unmasked"), num_envs=16)
        assert (predict(script, unmasked, transitions) > 0).all(), "MOA expects what is not legal"
        changed = {name: patched(script, name) for name in ("all_steps", "rewarded")}
        right, of_all, of_rewarded = (
            opponent_losses(hop, state, transitions)["moa"] for hop in (script, *changed.values())
        )
        assert not torch.allclose(of_all, right) and of_all.isfinite().all()
        assert not torch.allclose(of_rewarded, right) and of_rewarded.isfinite().all()
        no_end = transitions._replace(done=torch.zeros_like(transitions.done))  # one game, in which some leave
        never = no_end._replace(next_board=no_end.board)
        assert torch.equal(opponent_losses(changed["rewarded"], state, never)["moa"], torch.zeros(6)), "nobody leaves"
        assert (opponent_losses(script, state, never)["moa"] > 0).all()
    assert script.masked_mean(torch.ones(1, 2), torch.tensor([[1.0, 0.0]])) == 1


@pytest.mark.parametrize(("script", "method"), [
    (hopplus_ppo, "hopplus"), (hopplus_mcts, "hopplus"), (hopplus_mcts, "hop"),
])  # fmt: skip
def test_moa_of_player_1(script, method):
    changes = {"goal_dim": 2, "num_simulations": 2, "subgoal_batch_size": 32} if method == "hop" else {}
    state = make_state(script, method, num_seeds=2, num_envs=32, **changes)
    networks = script.make_networks(state.args, [100, 101, 102, 200, 201, 202], torch.device("cpu"), pretraining=True)
    for _ in range(3):
        state.games.replay.push(play(script, state)[0])

    def changed(hop, pretraining=False):
        """bool [M]: whose MOA changes in an update, and whose q_phi"""
        pair, found = (networks.moa, networks.inference), []
        before = [{name: p.clone() for name, p in stacked.state_dict().items()} for stacked in pair]
        optimizer = hop.Adam(networks.inference.parameters() + networks.moa.parameters(), 1e-3)
        given = state.args, state.games.env, networks, optimizer, state.games.replay, None, 0.5, 2
        losses = hop.train_opponent_models(*given, pretraining)
        for stacked, old in zip(pair, before, strict=True):
            moved = [(p != old[name]).flatten(1).any(1) for name, p in stacked.state_dict().items()]
            found.append(torch.stack(moved).any(0).tolist())
        assert losses["losses/moa"].shape == (6,) and losses["losses/moa"].min() > 0
        return found

    learns = [[True] * 6, [method == "hopplus"] * 6]  # HOP has no q_phi
    assert changed(script) == learns
    other = patched(script, "moa_of_player_1")
    first = [True, False, False] * 2
    assert changed(other) == [first, [a and b for a, b in zip(first, learns[1], strict=True)]]
    assert changed(other, pretraining=True) == learns


@EITHER
def test_permuted_actions(script):
    state = make_state(script)
    for _ in range(2):
        transitions = play(script, state)[0]
    number = [1, 2, 3, 4, 0, 6, 5]  # under which up, down, left, right, stay, hunt stag, hunt hare are learned
    head = {name: p for name, p in state.networks.moa.params.items() if name.startswith("head.4.")}
    assert {(len(p), p.shape[-1]) for p in head.values()} == {(6, 7)}
    for p in head.values():
        p.data.normal_(generator=torch.Generator().manual_seed(1))
    other, both = patched(script, "permuted_actions"), patched(script, "unmasked", "permuted_actions")
    unmasked = make_state(both)
    with torch.no_grad():
        loss, predicted = opponent_losses(script, state, transitions)["moa"], predict(script, state, transitions)
        assert torch.equal(predict(other, state, transitions), predicted), "what is read is as it was"
        assert not torch.allclose(opponent_losses(other, state, transitions)["moa"], loss)
        for p in head.values():  # a MOA whose outputs stand in the other order has learned the same
            p.data[..., number] = p.data.clone()
        torch.testing.assert_close(opponent_losses(other, state, transitions)["moa"], loss)
        assert not torch.allclose(predict(other, state, transitions), predicted)
        assert (predict(both, unmasked, transitions) > 0).all()
        assert opponent_losses(both, unmasked, transitions)["moa"].isfinite().all()


@EITHER
def test_reward_of_player_1(script):
    """Also if player 1 does not learn; in seat 1 it is the learner's own"""
    other = patched(script, "reward_of_player_1")
    state = make_state(script, num_seeds=2, num_envs=16)
    transitions, outputs, _ = play(other, state)
    own = script.real_samples(state.args, state.args.config, transitions, outputs)["reward"]
    read = other.real_samples(state.args, state.args.config, transitions, outputs)["reward"]
    assert torch.equal(own, transitions.reward) and own[1:].any()
    assert all(torch.equal(read[m], own[m // 3 * 3]) for m in range(6)) and not torch.equal(read, own)

    def one_learner(*table):
        """What the only learner reads, what it gets, what player 1 gets"""
        args = script.make_args("ppo", "cpu", **{**TINY, "num_envs": 16, "seats": ",".join(table)})
        state = script.make_train_state(args, [list(table)], [1], torch.device("cpu"))
        advance, paid = state.games.env.advance, []

        def recorded(actions):
            result = advance(actions)
            paid.append(result[0].clone())
            return result

        state.games.env.advance = recorded
        transitions, outputs, _ = play(other, state)
        samples = other.real_samples(args, args.config, transitions, outputs)
        return samples["reward"][0], transitions.reward[0], torch.stack(paid)[..., 0]

    read, own, of_player_1 = one_learner("nearest_hare", "nearest_hare", "learner")
    assert torch.equal(read, of_player_1) and not torch.equal(read, own) and read.any()
    read, own, of_player_1 = one_learner("learner", "nearest_hare", "nearest_hare")
    assert torch.equal(read, own) and torch.equal(read, of_player_1)


@EITHER
def test_stored_rows(script):
    """Everybody's own, of the last 16 batches"""
    other = patched(script, "replayed")
    state = make_state(other, "ppo")
    learner = torch.arange(6.0)[:, None].expand(6, 500)
    row = torch.arange(500.0).expand(6, 500)
    for number in range(40):
        new = {"weight": torch.ones(6, 500), "value": learner + 100 * number, "row": row}
        drawn = other.stored_rows(state, new)
        assert torch.equal(drawn["value"] % 100, learner)
        first = max(0, number - 15)
        assert set((drawn["value"] // 100).flatten().tolist()) == set(range(first, number + 1))
        assert len(set(drawn["row"][0].tolist())) > 200


@pytest.mark.parametrize("method", ["ppo", "hopplus"])
@EITHER
def test_replayed(script, method, monkeypatch):
    """PPO learns from real samples of all iterations, with the log-probabilities and returns of that time"""
    other = patched(script, "replayed")
    state, trained, stored = make_state(other, method), [], []
    ppo_update = other.ppo_update

    def recorded(args, policy, optimizer, batch):
        trained.append(batch)
        return ppo_update(args, policy, optimizer, batch)

    monkeypatch.setattr(other, "ppo_update", recorded)
    if method == "hopplus":
        other.watch_rule_based(state)
    for _ in range(3):
        stored.append(other.train_iteration(state)["real"])
    batch = trained[-1]
    rows = stored[-1]["weight"].shape[1]
    assert (batch["real"][:, :rows] == 1).all() and (batch["real"][:, rows:] == 0).all()
    assert (batch["real"].shape[1] > rows) == (method == "hopplus"), "imagined samples are as ever"
    seen = set()
    for m in range(6):
        known = {}
        for number, old in enumerate(stored):
            marks = zip(old["log_prob"][m].tolist(), old["returns"][m].tolist(), strict=True)
            known |= dict.fromkeys(marks, number)
        drawn = zip(batch["log_prob"][m, :rows].tolist(), batch["returns"][m, :rows].tolist(), strict=True)
        seen |= {known[mark] for mark in drawn}
    assert seen == {0, 1, 2}


def imagined_from(hop, state, **changes):
    """Two imagined steps from the first of a rollout"""
    start = hop.Transitions(*(x[:, 0] for x in play(hop, state)[0]))._replace(**changes)
    horizon = torch.full_like(state.horizon, 2)
    return hop.imagine(state.args, state.games.env, state.networks, start, torch.ones_like(start.done), horizon)


@EITHER
def test_no_ends(script):
    state = make_state(script)
    late = torch.full((6, 4), 5, dtype=torch.uint8)  # the last step but one is 5 of 6
    right = imagined_from(script, state, time=late)
    assert right["ended"][:, 0].all() and right["mask"][:, 0].all() and not right["mask"][:, 1].any()
    wrong = imagined_from(patched(script, "no_ends"), state, time=late)
    assert not wrong["ended"].any() and wrong["mask"].all()


@EITHER
def test_all_legal(script, monkeypatch):
    other = patched(script, "all_legal")
    state = make_state(other, num_envs=64)
    policy = state.networks.policy
    predict_step, joints, legal = other.predict_step, [], []

    def recorded(config, world, board, walls, joint, seat):
        joints.append(joint)
        legal.append(other.entity_views(state.games.env, board, walls)[2])
        return predict_step(config, world, board, walls, joint, seat)

    monkeypatch.setattr(other, "predict_step", recorded)
    samples = imagined_from(other, state)
    assert samples["legal"].all()
    illegal = ~legal[0].gather(3, joints[0][..., None])[..., 0]  # [M, n, N]
    assert illegal.any(1).any(0).all(), "the learner and each co-player do what is not legal"
    with torch.no_grad():
        log_probs, _ = policy(samples["inputs"][:, 0], samples["legal"][:, 0])
    chosen = log_probs.gather(2, samples["action"][:, 0, :, None])[..., 0]
    torch.testing.assert_close(samples["log_prob"][:, 0], chosen)
    assert not imagined_from(script, state)["legal"].all() and not play(other, state)[1]["legal"].all()


@EITHER
def test_party_sizes(script):
    """Two seeds of three games, the last of which has not ended"""
    other = patched(script, "party_sizes")
    stag, hare = stag_hunt_env.HUNT_STAG, stag_hunt_env.HUNT_HARE
    prey = torch.tensor([
        [[stag] * 4, [stag, stag, hare, stag], [stag, hare, hare, stag]],
        [[stag, stag, hare, 0], [hare, hare, 0, 0], [stag, stag, 0, 0]],
    ]).flatten(0, 1)[None]  # fmt: skip
    episodes = {
        "prey": prey,
        "done": torch.ones(1, 6, dtype=torch.bool),
        "return": prey.float(),
        "length": prey[..., 0],
    }
    episodes["done"][0, 5] = False
    seats, args = types.SimpleNamespace(num_blocks=2), script.make_args("ppo", "cpu", num_seeds=2)
    metrics = {name: x.numpy() for name, x in other.episode_metrics(seats, episodes).items()}
    rows = [other.log_row(args, metrics, seed) for seed in range(2)]
    shares = [[row[f"charts/party_{size}"] for size in (2, 3, 4)] for row in rows]
    assert shares == [pytest.approx([1 / 3] * 3), [0.5, 0, 0]]
    plain = {name: x.numpy() for name, x in script.episode_metrics(seats, episodes).items()}
    for seed in range(2):
        as_ever = script.log_row(args, plain, seed)
        assert {name: x for name, x in rows[seed].items() if "party" not in name} == as_ever


@EITHER
def test_permuted_seats(script):
    """Each learner reads, does and earns what the seat has in which it sits; seats change with the game alone"""
    other = patched(script, "permuted_seats")
    state = make_state(other, "ppo", num_seeds=2, num_envs=8)
    env, seats = state.games.env, state.games.seats
    advance, change_seats, log = env.advance, seats.change_seats, []

    def recorded(actions):
        cells = env.cells(env.state).clone()
        reward, present, done = advance(actions)
        log.append([seats.seat_of.clone(), cells, actions.clone(), reward.clone(), done.clone()])
        return reward, present, done

    env.advance = recorded
    transitions, _, episodes = other.rollout(state.args, state.games, state.networks, 24)
    earned, met = torch.zeros(16, 3), set()
    for t, (seat_of, cells, actions, reward, done) in enumerate(log):
        assert torch.equal(seat_of.sort(1).values, torch.arange(3).expand(16, 3))
        for b, learner in [(b, learner) for b in range(16) for learner in range(3)]:
            m, e, seat = 3 * (b // 8) + learner, b % 8, int(seat_of[b, learner])
            assert torch.equal(transitions.board[m, t, e].long(), cells[b, seat].long())
            assert int(transitions.joint[m, t, e, 0]) == int(actions[b, seat])
            assert transitions.reward[m, t, e] == reward[b, seat]
            earned[b, learner] += reward[b, seat]
            met.add((m, seat))
        torch.testing.assert_close(episodes["return"][t][done], earned[done])
        earned[done] = 0
        if t + 1 < len(log):
            assert torch.equal(log[t + 1][0][~done], seat_of[~done])
    assert len(met) == 18 and episodes["done"].sum() > 30, "every learner has sat everywhere"
    x = torch.randn(6, 8, 7)
    assert torch.equal(seats.to_learners(seats.to_seats(x)), x)
    saved = {name: value.clone() for name, value in seats.state_dict().items()}
    change_seats(torch.ones(16, dtype=torch.bool))
    assert not torch.equal(seats.seat_of, saved["seat_of"])
    seats.load_state_dict(saved)
    assert torch.equal(seats.seat_of, saved["seat_of"])
    with pytest.raises(ValueError, match="who models the others would mistake them"):
        make_state(other)
    args = other.make_args("ppo", "cpu", **TINY)
    with pytest.raises(ValueError, match="all players must be learners"):
        other.make_train_state(args, [["learner", "random", "random"]], [1], torch.device("cpu"))


@pytest.mark.parametrize("names", [(), ("pixel",), ("pixel", "unclipped")])
def test_rewards_before_they_are_clipped(names):
    script = patched(hopplus_ppo, *names)
    state = make_state(script, num_envs=16)
    script.watch_rule_based(state)
    imagined = script.train_iteration(state)["imagined"]
    metrics = state.metrics.read()
    payoffs = state.args.config.payoffs()
    low, high, outside = min(payoffs), max(payoffs), 0
    for m in range(6):
        counts = imagined["weight"][m] > 0
        raw = imagined["raw_reward"][m][counts].numpy()
        assert len(raw) > 50
        assert metrics["imagined/raw_reward_mean"][m] == pytest.approx(raw.mean(), abs=1e-5)
        share = np.mean([x < low or x > high for x in raw.tolist()])
        assert metrics["imagined/raw_reward_outside"][m] == pytest.approx(share, abs=1e-6)
        expected = raw if "unclipped" in names else raw.clip(low, high)
        assert imagined["reward"][m][counts].numpy() == pytest.approx(expected)
        outside += share
    assert (outside > 0) == bool(names), "the script's own world model picks a payoff"


@EITHER
def test_every_patch_fits_the_script(script):
    for name in patches.PATCHES:
        assert patched(script, name).FORMAT == script.FORMAT
    wrong = {"mine": {"def rollout(": "def roll("}, "again": {"def rollout(": "def roll("}}
    with pytest.raises(ValueError, match=r"--patched again: hopplus_.* no longer has once:\ndef rollout"):
        patches.patched_script(Path(script.__file__).name, wrong)


def test_either_script_can_be_patched(monkeypatch):
    seen, given = [], []
    run = types.SimpleNamespace(main=seen.append)

    def patched_script(script, patches):
        given.append((script, list(patches)))
        run.parse_args = SCRIPTS[script].parse_args
        return run

    monkeypatch.setattr(experiments, "patched_script", patched_script)
    for name in ("hopplus_ppo.py", "hopplus_mcts.py"):
        words = ["--patched", "moa_of_player_1", "unmasked", "--script", name, "--", "--device", "cpu", "--seed", "7"]
        experiments.main(experiments.parse_args(words))
        assert (seen[-1].seed, seen[-1].exp_name) == (7, name[:-3])
        assert given[-1] == (name, ["moa_of_player_1", "unmasked"])
    with pytest.raises(ValueError, match="--patched nothing: the known ones are one_player"):
        experiments.main(experiments.parse_args(["--patched", "nothing"]))


def test_each_learners_moa_is_in_the_tables(tmp_path, capsys):
    args = experiments.Args(run_dir=str(tmp_path / "runs"), docs=str(tmp_path / "docs"), section=("5",))
    run = sections.SECTIONS["5"][1]["MCTS, only player 1's MOA learns"]
    folder = experiments.folder_of(args, run)
    for seed in range(2):
        (folder / f"x__{seed}").mkdir(parents=True)
        line = {"steps": 100, "charts/episodic_return": 2.0, "moa/nll": 1.1, "moa/ceiling/nll": 0.5, "moa/top1": 0.4}
        line |= {f"charts/episodic_return/player_{i}": 2.0 + i for i in range(4)}
        line |= {f"per_agent/moa_nll/learner_{i}": 0.6 + 0.3 * (i > 0) + 0.01 * seed for i in range(4)}
        (folder / f"x__{seed}" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "seconds").touch()
    (folder / "train.log").write_text("on cpu")
    experiments.collect(args, "5")
    figures.draw(Path(args.docs), "5")
    said = capsys.readouterr().out
    assert "MOA learns: moa_nll by seat 0.605, 0.905, 0.905, 0.905; all equal: p = " in said
    assert "MOA learns: player by seat 2.000, 3.000, 4.000, 5.000; all equal: p = " in said


def test_tables_and_figures_come_from_the_runs(tmp_path, capsys):
    args = experiments.Args(run_dir=str(tmp_path / "runs"), docs=str(tmp_path / "docs"), section=("2",))
    for number, run in enumerate(list(sections.SECTIONS["2"][1].values())[:2]):
        folder = experiments.folder_of(args, run)
        for seed in range(3):
            there = folder / f"x__{seed}"
            there.mkdir(parents=True)
            returns = [1.0, 2.0, 2.9, 2.85, 2.5 + 0.1 * seed + number]
            with open(there / "metrics.jsonl", "w") as file:
                for k, value in enumerate(returns):
                    seats = {f"charts/episodic_return/player_{i}": value + i for i in range(4)}
                    line = {
                        "steps": 100 * (k + 1),
                        "time/training": k,
                        "time/ready": 9,
                        "charts/episodic_return": value,
                    }
                    file.write(json.dumps(line | seats) + "\n")
        (folder / "seconds").touch()
        (folder / "train.log").write_text("4x4_4h1s, ppo, 32 learner(s), 256 games per seed, on cpu")
    experiments.collect(args, "2")
    rows = list(csv.DictReader((tmp_path / "docs/data/section_2.csv").open()))
    assert [(row["run"], row["seed"]) for row in rows[:4]] == [
        ("PPO", "0"),
        ("PPO", "1"),
        ("PPO", "2"),
        ("PPO, shared", "0"),
    ]
    assert rows[1]["steps_to_2.8"] == "300" and rows[1]["seconds_to_2.85"] == "2" and rows[1]["steps_to_4.5"] == ""
    assert float(rows[1]["return"]) == pytest.approx(2.6) and float(rows[1]["fall"]) == pytest.approx(0.3)
    assert float(rows[1]["player_3"]) == pytest.approx(5.6)
    assert len(list(csv.DictReader((tmp_path / "docs/data/section_2_curves.csv").open()))) == 2 * 3 * 5
    shutil.rmtree(experiments.folder_of(args, sections.SECTIONS["2"][1]["PPO"]))
    experiments.collect(args, "2")
    kept = list(csv.DictReader((tmp_path / "docs/data/section_2.csv").open()))
    assert kept == rows, "a run made elsewhere keeps its rows"
    met = tmp_path / "docs/data/section_2_adaptation.csv"
    met.write_text("run,sets,co_players\nPPO, shared,standard,3 NS\n".replace("PPO, shared", '"PPO, shared"'))
    experiments.collect(args, "2")
    assert "3 NS" in met.read_text(), "also those of what followed it, if that is not here"
    met.unlink()
    args.draw = True
    experiments.main(args)
    picture = tmp_path / "docs/results/section_2.png"
    assert "| PPO | 3 | 2.6 [2.352, 2.848] |" in capsys.readouterr().out and picture.stat().st_size > 5000
    picture.unlink()
    experiments.main(args)
    assert picture.exists(), "drawn again from the tables alone"


def test_what_pretraining_found_is_read_from_its_tables(tmp_path):
    for seed in (1, 2):
        there = tmp_path / f"vae/before_0/x__{seed}/evaluation"
        there.mkdir(parents=True)
        (there / "final.csv").write_text(
            f"metric,state only,with history\ntop1,0,0.{seed}\nprobe_accuracy,0,0.6\nece,0,1\n"
        )
    assert experiments.figures_before(tmp_path / "vae") == [{"probe_accuracy": 0.6, "top1": x} for x in (0.1, 0.2)]
    there = tmp_path / "world/before_1/x"
    there.mkdir(parents=True)
    (there / "evaluation.csv").write_text("metric,mean,half_width_95,seed_4,seed_5\nexact_match/20,9,9,0.25,0.5\n")
    assert experiments.figures_before(tmp_path / "world") == [{"exact_match/20": x} for x in (0.25, 0.5)]
    assert experiments.figures_before(tmp_path / "none") == []
    (tmp_path / "world/before_1").rename(tmp_path / "vae/before_1")
    both = [{"probe_accuracy": 0.6, "top1": x, "exact_match/20": y} for x, y in ((0.1, 0.25), (0.2, 0.5))]
    assert experiments.figures_before(tmp_path / "vae") == both


def test_every_published_table_draws_its_figure(tmp_path, capsys, monkeypatch):
    import matplotlib.pyplot  # noqa: F401, it must see Figure as it is

    def save_a_dot(_, path, **options):  # in a third of the time
        Image.new("RGB", (1, 1)).save(path)

    monkeypatch.setattr(Figure, "savefig", save_a_dot)
    monkeypatch.setattr(Figure, "tight_layout", lambda *_, **options: None)
    shutil.copytree(Path(experiments.ROOT) / "docs/data", tmp_path / "data")
    of_runs = [name for name, section in sections.SECTIONS.items() if section.runs]
    published = [name for name in of_runs if (tmp_path / f"data/section_{name}.csv").exists()]
    assert {*"12345678"} <= set(published)
    experiments.main(experiments.Args(docs=str(tmp_path), draw=True))
    said = capsys.readouterr().out
    assert all((f"section {name}: no data yet" in said) == (name not in published) for name in of_runs)
    assert "| HOP+, few steps | 5 |" in said
    drawn = {path.stem for path in (tmp_path / "results").glob("*.png")}
    assert drawn == {"worst_case"} | {f"section_{name}" for name in published}


def test_a_saved_figure_keeps_the_colours_of_small_marks(tmp_path):
    """Beside a map of a thousand blues with a thousand labels"""
    figure = Figure(figsize=(12, 10))
    heat, marks = figure.subplots(1, 2)
    heat.imshow(np.arange(1024).reshape(32, 32), cmap="Blues")
    for row, column in itertools.product(range(32), range(32)):
        heat.text(column, row, ".5", fontsize=5)
    colours = np.array([[0, 114, 178], [230, 159, 0], [0, 158, 115], [213, 94, 0]])
    for place, colour in enumerate(colours):
        marks.plot([place], [place], ".", color=colour / 255)
    results.save(tmp_path, figure, "picture")
    with Image.open(tmp_path / "results/picture.png") as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3).astype(int)
    assert all(abs(pixels - colour).sum(1).min() < 10 for colour in colours)


@pytest.mark.parametrize("name", [name for name, section in sections.SECTIONS.items() if section.runs])
def test_every_published_run_has_the_flags_of_its_experiment(name):
    """In any order"""
    runs = sections.SECTIONS[name].runs
    path = Path(experiments.ROOT) / f"docs/data/section_{name}.csv"
    flags = {row["run"]: sorted(row["flags"].split()) for row in csv.DictReader(path.open())}
    assert list(flags) == list(runs)
    assert flags == {label: sorted(f"{run.script} {run.flags}".split()) for label, run in runs.items()}


def test_learners_are_compared_seed_by_seed(tmp_path, capsys):
    """Two repetitions of each of two seeds: differences of 1 and 2, whatever the seeds themselves earn"""
    rows = []
    for run, seed, returns in (
        ("HOP+", 1, (4, 6)),
        ("HOP+", 2, (11, 13)),
        ("PPO, mixed", 1, (3, 5)),
        ("PPO, mixed", 2, (9, 11)),
    ):
        rows += [{"run": run, "co_players": "3 NS", "seed": seed, "learning": r, "frozen": ""} for r in returns]
    results.write(tmp_path / "data" / "section_7_adaptation_repetitions.csv", rows)
    figures.print_differences(tmp_path, "7")
    assert capsys.readouterr().out == "HOP+ learning minus PPO, mixed learning: 3 NS 1.500 ± 6.353\n"


def test_a_search_is_compared_with_its_own_policy(tmp_path, capsys):
    rows = []
    for seed in (1, 2):
        rows.append({"run": "HOP+ MCTS", "co_players": "3 NH", "seed": seed, "frozen": seed, "search": seed + 1.0})
    results.write(tmp_path / "data" / "section_7_adaptation_repetitions.csv", rows)
    figures.print_differences(tmp_path, "7")
    assert capsys.readouterr().out == "HOP+ MCTS search minus HOP+ MCTS frozen: 3 NH 1.000 ± 0.000\n"


def test_what_is_timed_has_a_line_after_equal_steps():
    """in docs/data too, which keeps up to 40 lines of a run"""
    for section, timing in sections.TIMINGS.items():
        for name, run in sections.SECTIONS[section].runs.items():
            args = SCRIPTS[run.script].parse_args([*run.flags.split(), "--device", "cpu"])
            steps_between = args.num_envs * args.num_steps * args.log_every
            assert timing.same_steps % steps_between == 0, name
            assert timing.same_steps <= args.total_timesteps <= 40 * steps_between, name
            assert (args.seed, args.config) == (11, StagHuntConfig()) and args.num_seeds >= 3, name


def write_timed(folder, decided=True):
    """PPO ends after 9 s, the search has its steps after 40 s, HOP is then not yet ready"""
    lines = {
        "PPO": [(122_880, 3, 1.0), (500_000, 9, 2.5)],
        "search": [(61_440, 30, 2.0), (122_880, 40, 2.75)],
        "HOP": [(61_440, 50, 1.5), (122_880, 60, 2.25)],
    }
    curve = []
    for run, points in lines.items():
        for seed in (0, 1):
            for steps, seconds, value in points:
                curve.append(
                    {"run": run, "seed": seed, "steps": steps, "all_seconds": seconds, "return": value + 0.5 * seed}
                )
    results.write(folder / "data/section_time_curves.csv", curve)
    summary = [{"run": run, "seed": 0, "return": 2.0, "all_seconds_to_2.8": ""} for run in lines]
    summary.append({"run": "PPO", "seed": 1, "return": 3, "all_seconds_to_2.8": 5})
    results.write(folder / "data/section_time.csv", summary)
    if decided:
        measured = [("PPO", 1, 0.25), ("PPO", 4096, 1.5), ("search", 1, 16.0)]
        rows = [{"run": run, "games": games, "milliseconds": ms} for run, games, ms in measured]
        results.write(folder / "data/decisions_gpu.csv", rows)


def test_return_after_equal_steps_and_equal_time(tmp_path, capsys):
    write_timed(tmp_path)
    experiments.main(experiments.Args(docs=str(tmp_path), section=("time",), draw=True))
    said = capsys.readouterr().out
    header = "| run | return after 122880 steps | after 40 s | seconds of the whole run |"
    assert f"{header} ms a decision, 1 game(s) | ms a decision, 4096 game(s) |" in said
    assert "| PPO | 1.250 ± 3.177 | 2.750 ± 3.177, ended | 9 | 0.25 | 1.5 |" in said
    assert "| search | 3.000 ± 3.177 | 3.000 ± 3.177 | 40 | 16 |  |" in said
    assert "| HOP | 2.500 ± 3.177 | not ready | 60 |  |  |" in said
    assert "| search | 1 | 2 [nan, nan] | never |" in said, "no seed reached 2.8, whatever it is measured in"
    assert (tmp_path / "results/section_time.png").stat().st_size > 5000
    (tmp_path / "data/decisions_gpu.csv").unlink()
    experiments.main(experiments.Args(docs=str(tmp_path), section=("time",), draw=True))
    assert f"\n{header}\n" in capsys.readouterr().out, "without the other program's table"


def test_times_on_a_cpu_have_its_own_steps_and_decisions(tmp_path, capsys):
    curve = []
    for steps, seconds, value in ((40_960, 10, 1.5), (122_880, 30, 2.5)):
        curve.append({"run": "search", "seed": 0, "steps": steps, "all_seconds": seconds, "return": value})
    results.write(tmp_path / "data/section_time-cpu_curves.csv", curve)
    for device, ms in (("gpu", 1.0), ("cpu", 56.0)):
        row = {"run": "search", "games": 1, "milliseconds": ms}
        results.write(tmp_path / f"data/decisions_{device}.csv", [row])
    figures.print_time(tmp_path, "time-cpu")
    said = capsys.readouterr().out
    assert "| run | return after 40960 steps | after 30 s |" in said and "| search | 1.500 | 2.500 | 30 | 56 |" in said


def test_curves_over_time(tmp_path):
    write_timed(tmp_path)
    rows = results.read(tmp_path, "time", "_curves")
    assert figures.mean_curve(rows, "PPO", "return", "all_seconds").tolist() == [[3, 1.25], [9, 2.75]]
    assert figures.mean_curve(rows, "PPO", "return", "steps").tolist() == [[122_880, 1.25], [500_000, 2.75]]
    line = {"steps": 7, "all_seconds": 22.0, "charts/episodic_return": 2.0}
    row = {"steps": 7, "all_seconds": 22.0, "return": 2.0, "value_real": ""}
    assert experiments.curve_of([line], ["return", "value_real"]) == [row]


def authors_args(board):
    run = sections.SECTIONS["hop"].runs[sections.label_of("HOP, authors' values", board)]
    return hopplus_mcts.parse_args([*run.flags.split(), "--device", "cpu"])


def test_hop_is_run_with_both_sets_of_values():
    """Seeds and --method aside, the runs of a board differ in the authors' values alone"""
    runs = sections.SECTIONS["hop"].runs
    for board in sections.HOP_BOARDS:
        hop, authors, hopplus = (runs[sections.label_of(name, board)].flags.split() for name in sections.HOP_ARMS)
        values = sections.AUTHORS_VALUES.split()
        assert set(authors) - set(hop) - {"3"} == set(values) - {"5"} and set(hop) - set(hopplus) == {"--method", "hop"}
        args = authors_args(board)
        assert args.total_timesteps >= 1_000_000 and args.num_seeds == 3
        assert (args.num_simulations, args.num_trees, args.search_prior) == (200, 5, 0)
        assert (args.gamma, args.memory_discount) == (0.95, 0.995)
    small, large = (authors_args(board).config for board in sections.HOP_BOARDS)
    assert small == StagHuntConfig() and large == StagHuntConfig(height=8, width=8, max_wall_pieces=5)


def test_the_authors_values_in_our_units(monkeypatch):
    """They play exp(2 Q), select by Q + sqrt(N) P / (1 + N), and count stags and hares from 100 on"""
    authors = authors_args("8x8")
    names = ("q_temperature", "puct", "gamma", "memory_discount")
    values = {name: getattr(authors, name) for name in names}
    state = make_state(hopplus_mcts, "hop", num_simulations=8, num_trees=2, goal_dim=2, **values)
    assert state.args.config.payoffs().keys() >= {5.0, 1.0} and max(authors.config.payoffs()) == 5.0
    scales = []
    plain = hopplus_mcts.root_policy

    def root_policy(args, scale, tree, gumbel, num_trees):
        scales.append(scale)
        log_probs, played, visits, q = plain(args, scale, tree, gumbel, num_trees)
        legal = tree.log_policy[::num_trees, 0] > -1e8
        searched = ~tree.ended[::num_trees, 0]
        expected = (2 * q).masked_fill(~legal, -math.inf).softmax(1)
        torch.testing.assert_close(log_probs.exp()[searched], expected[searched])
        assert searched.any() and q[searched].std() > 0
        return log_probs, played, visits, q

    monkeypatch.setattr(hopplus_mcts, "root_policy", root_policy)
    play(hopplus_mcts, state)
    assert set(scales) == {5.0}
    generator = torch.Generator().manual_seed(1)
    visits = torch.randint(1, 9, (500, 7), generator=generator).float()
    q = 2 * torch.rand(500, 7, generator=generator)
    log_policy = torch.randn(500, 7, generator=generator).log_softmax(1)
    chosen = hopplus_mcts.select_action(authors, 5.0, visits, q * visits, log_policy, torch.zeros(500))
    score = q + visits.sum(1, keepdim=True).sqrt() * log_policy.exp() / (1 + visits)
    assert torch.equal(chosen, score.argmax(1))
    takes_stag = torch.rand(50, generator=generator) < 0.8
    history = torch.zeros(2, 4)
    has_exited = torch.tensor([False, True, False])
    stags = hares = 100.0
    for stag in takes_stag.tolist():
        action = stag_hunt_env.HUNT_STAG if stag else stag_hunt_env.HUNT_HARE
        joint = torch.tensor([stag_hunt_env.STAY, action, stag_hunt_env.STAY])
        history = hopplus_mcts.count_hunts(authors, joint, has_exited, history)
        stags = 0.995 * stags + stag
        hares = 0.995 * hares + (not stag)
    belief = 0.5 + history[:, 2:]
    assert belief[0].tolist() == pytest.approx([stags / (stags + hares), hares / (stags + hares)], rel=1e-5)
    assert belief[1].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    "log, device",
    [
        ("4x4_4h1s, ppo, 32 learner(s), on 1 x cuda", "cuda"),
        ("4x4_4h1s, mixed, 5 seed(s), on cuda:0; run folder runs/x", "cuda"),
        ("4x4_4h1s, ppo, 4 learner(s), on 1 x cpu\nready after 1 s; run folder runs/cuda", "cpu"),
    ],
)
def test_tables_say_where_a_run_was_made(log, device):
    assert experiments.device_of(log) == device


def test_what_follows_a_run_is_read_from_its_tables(tmp_path):
    args = experiments.Args(run_dir=str(tmp_path / "runs"), docs=str(tmp_path / "docs"), section=("8",))
    folder = experiments.folder_of(args, sections.SECTIONS["8"][1]["PPO"])
    there = folder / "x__1"
    there.mkdir(parents=True)
    (folder / "seconds").touch()
    (folder / "train.log").write_text("on cpu")
    line = {"steps": 9, "time/training": 1.0, "charts/episodic_return": 2.0}
    (there / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (there / "adaptation_strangers.csv").write_text("co_players,frozen mean\n3 waiting,0.5\n")
    (there / "adaptation_standard.csv").write_text("co_players,frozen mean\n3 NH,0.5\n")  # is section 7's
    (there / "adaptation_strangers_curve.csv").write_text("co_players,learner,steps,return\n3 waiting,frozen,100,1.5\n")
    (there / "adaptation_strangers_repetitions.csv").write_text(
        "co_players,repetition,seed,frozen\n3 waiting,3,2,0.5\n"
    )
    experiments.collect(args, "8")
    names = ("_adaptation", "_adaptation_curves")
    tables = {name: results.read(Path(args.docs), "8", name) for name in names}
    met = {"run": "PPO", "sets": "strangers", "co_players": "3 waiting", "frozen mean": "0.5"}
    point = {"run": "PPO", "sets": "strangers", "co_players": "3 waiting", "learner": "frozen", "steps": "100"}
    repetition = {"run": "PPO", "sets": "strangers", "co_players": "3 waiting", "repetition": "3", "seed": "2"}
    assert results.read(Path(args.docs), "8", "_adaptation_repetitions") == [repetition | {"frozen": "0.5"}]
    assert tables["_adaptation"] == [met] and tables["_adaptation_curves"] == [point | {"return": "1.5"}]


def test_a_run_and_what_follows_it(tmp_path):
    """The whole of it once, with the true scripts: train, evaluate, tables"""
    args = experiments.Args(run_dir=str(tmp_path / "runs"), docs=str(tmp_path / "docs"))
    args.extra = "--device cpu --total-timesteps 64 --num-envs 4 --num-steps 8 --height 3 --final-time 4"
    args.extra_then = "--device cpu --games 8"
    run = sections.Run("--method ppo --num-seeds 2 --log-every 1", then=(sections.EVALUATE,), patch=("one_player",))
    experiments.make(args, run, threading.Semaphore(1))
    folder = experiments.folder_of(args, run)
    assert (folder / "finished").exists() and len(list(folder.glob("*/evaluation_*.gif"))) == 1
    lines = [json.loads(line) for line in next(folder.glob("*/metrics.jsonl")).read_text().splitlines()]
    assert math.isfinite(lines[-1]["losses/value_loss_real"])


def call_here(words, stdout, **_):
    """As subprocess.run, without the seconds that a Python takes to start"""
    module = SCRIPTS[words[1]]
    with contextlib.redirect_stdout(stdout):
        module.main(module.parse_args(list(words[2:])))


def rule_based_steps(monkeypatch, script):
    """[(games, env steps of a seed)] of the rollouts that are only watched, as they are played"""
    played = []
    rollout = script.rollout

    def counted(args, games, networks, num_steps, **others):
        if games.seats.watch:
            played.append((games, num_steps * games.env.num_envs // games.seats.num_blocks))
        return rollout(args, games, networks, num_steps, **others)

    monkeypatch.setattr(script, "rollout", counted)
    return played


@pytest.mark.parametrize(
    ("script", "method", "changes"),
    [
        (hopplus_ppo, "ppo", {}),
        (hopplus_ppo, "ppo-omg", {"pretraining_updates": 0}),
        (hopplus_ppo, "ppo-omg", {"pretraining_updates": 0, "offline_ratio": 0.0}),
        (hopplus_ppo, "ppo-omg", {"pretraining_updates": 85, "num_envs": 5, "replay_rollouts": 3}),
        (hopplus_mcts, "hopplus-mcts", {"num_simulations": 2, "pretraining_updates": 25, "subgoals": "none"}),
    ],
)
def test_the_games_that_models_learn_from_are_counted(script, method, changes, tmp_path, monkeypatch):
    """As many as are played, but for those that preparation only measures on"""
    played = rule_based_steps(monkeypatch, script)
    monkeypatch.setattr(script, "train_opponent_models", lambda *_, **__: {})
    monkeypatch.setattr(script, "train_world_model", lambda *_, **__: {})
    flags = {**TINY, "total_timesteps": 160, "num_seeds": 2, "update_epochs": 1, **changes}
    args = script.make_args(method, "cpu", **flags, run_dir=str(tmp_path))
    final = script.main(args)
    saved = json.loads((Path(final["checkpoint"]).parent / "args.json").read_text())
    steps = [count for _, count in played]
    if played:
        preparing = played[0][0]
        only_measured = [count for games, count in played if games is preparing][-1:]
        if args.pretraining_updates == 0:  # then nothing is learned from the one before either
            only_measured *= 2
        steps = [sum(steps) - sum(only_measured)]
    lines = experiments.read_lines(Path(final["checkpoint"]).parent / "metrics.jsonl")
    iterations = lines[-1]["steps"] // (args.num_envs * args.num_steps)
    assert experiments.watched_steps(saved, iterations) == sum(steps)
    has_models = script.needs_models(args)
    assert (sum(steps) > 0) == (has_models and args.offline_ratio + args.pretraining_updates > 0)


def test_what_is_loaded_is_not_watched_again():
    flags = {**vars(hopplus_ppo.make_args("hopplus", "cpu")), "offline_ratio": 0.0}
    whole = experiments.watched_steps(flags, 10)
    assert whole == 8 * flags["pretraining_games"] * flags["num_steps"]
    assert experiments.watched_steps(flags | {"vae_checkpoint": "x"}, 10) == whole, "its world model still learns"
    both = {"vae_checkpoint": "x", "world_model_checkpoint": "y"}
    assert experiments.watched_steps(flags | both, 10) == 0
    no_world_model = {"imagination": False, "vae_checkpoint": "x"}
    assert experiments.watched_steps(flags | no_world_model, 10) == 0


def test_two_scripts_before_a_run(tmp_path, monkeypatch, capsys):
    """The true scripts: two checkpoints, steps and seconds from the very start, tables and a figure"""
    monkeypatch.setattr(experiments.subprocess, "run", call_here)
    for script in (pretrain_vae, pretrain_world_model):
        monkeypatch.setattr(script, "draw_pictures", lambda *_: None)
    monkeypatch.setattr(evaluate, "film", lambda *_: None)
    monkeypatch.setattr(moa, "draw", lambda *_: None)
    before = (
        sections.vae("--num-samples 300 --epochs 1 --goal-dim 4 --subgoal-hidden 8"),
        sections.world("--num-transitions 300 --num-updates 2 --wm-hidden 16"),
    )
    flags = f"--total-timesteps 64 --goal-dim 4 {SMALL} {sections.UNPREPARED} --num-seeds 2 --log-every 1"
    run = sections.Run(flags, then=(sections.EVALUATE, sections.PROBE), before=before)
    plain = sections.Run(flags)
    panels = [
        ("curves over all steps", "return"),
        ("curves over all seconds", "moa_gap"),
        ("bars", "after/exact/1"),
        ("moa", "NLL"),
        ("moa actions", "recall"),
        ("moa confusion", "two"),
    ]
    monkeypatch.setitem(sections.SECTIONS, "pretraining", sections.Section("?", {"two": run, "none": plain}, panels))
    args = experiments.Args(run_dir=str(tmp_path / "runs"), docs=str(tmp_path / "docs"), section=("pretraining",))
    game_flags = "--device cpu --height 3 --final-time 6"
    args.extra = game_flags
    args.extra_before = f"{game_flags} --held-out-games 8 --num-seeds 2"
    args.extra_then = "--device cpu --games 4"
    args.parallel = 1
    experiments.main(args)
    said = capsys.readouterr().out
    assert "FAILED" not in said, said
    folder = experiments.folder_of(args, run)
    saved = json.loads(next(folder.glob("hopplus*/args.json")).read_text())
    assert Path(saved["vae_checkpoint"]).parent.parent == folder / "before_0"
    assert Path(saved["world_model_checkpoint"]).parent.parent == folder / "before_1"
    docs = Path(args.docs)
    curve = {run: [row for row in rows if row["seed"] == "0"] for run, rows in by_label(docs, "_curves").items()}
    logs = [(folder / f"before_{number}.log").read_text() for number in (0, 1)]
    watched = [int(re.search(r"in each seed: (\d+) env steps", log)[1]) for log in logs]
    assert all(75 <= steps <= 256 * 6 for steps in watched), watched
    beside = (2 + 1) * 2 * 8  # two rollouts of two games fill the replay, one comes with each second iteration
    assert int(curve["none"][0]["steps"]) == 32 and int(curve["none"][0]["all_steps"]) == 32 + beside
    assert int(curve["two"][0]["all_steps"]) == 32 + beside + sum(watched)
    seconds = float((folder / "seconds_before").read_text())
    line = experiments.read_lines(next(folder.glob("hopplus*__1__*/metrics.jsonl")))[0]
    expected = seconds + line["time/ready"] + line["time/training"]
    assert float(curve["two"][0]["all_seconds"]) == pytest.approx(expected, rel=1e-3) and seconds > 0
    rows = by_label(docs)["two"]
    probes = results.read_csv(next(folder.glob("*/subgoals_*_seeds.csv")))
    assert [float(row["after/probe"]) for row in rows] == pytest.approx([float(p["probe"]) for p in probes], rel=1e-4)
    assert all(0 <= float(row["after/exact/1"]) <= 1 and "after/exact_own/1" in row for row in rows)
    assert all(0 < float(row["before/top1"]) < 1 and 0 <= float(row["before/exact_match/1"]) <= 1 for row in rows)
    assert [(row["kind"], row["seed"]) for row in by_label(docs, "_moa")["two"]] == [("learner", "1"), ("learner", "2")]
    assert all(len(row["NLL"]) < 8 for row in by_label(docs, "_moa")["two"])
    assert "| learner | two | 2 |" in said and "| learner | two | up |" in said
    assert "| run | seeds | return | after/exact/1 | after/exact_own/1 |" in said
    assert (docs / "results/section_pretraining.png").stat().st_size > 5000


def by_label(docs, name=""):
    rows = {}
    for row in results.read(docs, "pretraining", name):
        rows.setdefault(row["run"], []).append(row)
    return rows


def test_seconds_and_steps_from_the_start_to_a_return():
    lines = []
    for steps, value in ((100, 1.0), (200, 2.9), (300, 2.9)):
        own = {"steps": steps, "time/training": 1.0, "charts/episodic_return": value}
        lines.append(own | {"all_steps": 1000 + steps, "all_seconds": 50.0 + steps})
    row = experiments.summary_of(lines)
    assert (row["steps_to_2.8"], row["all_steps_to_2.8"], row["all_seconds_to_2.8"]) == (200, 1200, 250.0)
    assert row["all_steps_to_4.5"] == "" and "all_steps_to_2.8" not in experiments.summary_of([own])


def moa_row(run, kind, seed, nll):
    scores = {"NLL": nll, "NLL ceiling": 0.5, "NLL Bayes": 0.6}
    return {"run": run, "kind": kind, "seed": seed, **scores, "top-1": 0.7, "top-1 ceiling": 0.9, "top-1 Bayes": 0.8}


def test_moa_is_drawn_and_printed_a_row_for_each_kind(tmp_path, capsys):
    results.write(tmp_path / "data/section_moa_moa.csv", [
        moa_row("mixed", "random", 11, 1.0),
        moa_row("mixed", "random", 12, 2.0),
        moa_row("mixed", "nearest_hare", 11, 0.75),
        moa_row("self-play", "learner", 11, 0.55),
    ])  # fmt: skip
    figures.print_moa(tmp_path, "moa")
    said = capsys.readouterr().out
    columns = "0.500 | 0.600 | 0.700 | 0.900 | 0.800"
    assert f"| nearest_hare | mixed | 1 | 0.750 | {columns} | 0.250 |" in said
    assert "| random | mixed | 2 | 1.500 ± 6.353 | 0.500 ± 0.000 |" in said and "| 1.000 ± 6.353 |" in said
    assert f"| learner | self-play | 1 | 0.550 | {columns} | 0.050 |" in said and "| learner | mixed" not in said
    order = ["mixed", "self-play"]
    rows = [row | {"number": order.index(row["run"])} for row in results.read(tmp_path, "moa", "_moa")]
    axis = Figure().subplots()
    figures.moa(axis, rows, "NLL")
    assert [text.get_text() for text in axis.get_yticklabels()] == ["random", "nearest_hare", "learner"]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("NLL", "co-player")
    upright = [line for line in axis.lines if line.get_color() in ("black", "grey") and len(line.get_xdata())]
    known = {(line.get_color(), float(line.get_xdata()[0])) for line in upright}
    assert known == {("black", 0.5), ("grey", 0.6)}, "what can be known"
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert labels == ["mixed", "self-play", "Bayes", "ceiling"]


def test_recall_and_confusion_are_drawn_from_the_table():
    done = {"up": (4, 0.75, 1.0, 3, 1), "down": (0, math.nan, math.nan, 0, 0)}
    rows = []
    for action, (times, recall, ceiling, up, down) in done.items():
        row = {"run": "mixed", "kind": "random", "action": action, "times": str(times), "number": 0}
        rows.append(row | {"recall": recall, "recall ceiling": ceiling, "guessed up": up, "guessed down": down})
    axis = Figure().subplots()
    figures.moa_actions(axis, rows, "recall")
    assert [text.get_text() for text in axis.get_yticklabels()] == ["random: mixed", "random: mixed, ceiling"]
    assert [text.get_text() for text in axis.texts] == [".75", "1.0"] and axis.get_xlabel() == "action"
    axis = Figure().subplots()
    figures.moa_confusion(axis, [*rows, rows[0] | {"run": "other", "kind": "learner"}], "mixed")
    assert [text.get_text() for text in axis.get_yticklabels()] == ["random: up"], "what was never done has no row"
    assert [text.get_text() for text in axis.texts] == [".75", ".25"]


def test_a_section_may_have_references_of_its_own(tmp_path):
    """Walls: not those of the board without"""
    for number, best in (("7", 3), ("walls", 9)):
        row = {"run": "PPO", "sets": "standard", "co_players": "3 NS", "random mean": 1, "best response mean": best}
        results.write(tmp_path / f"data/section_{number}_adaptation.csv", [row])
    assert results.references(tmp_path) == {("4x4", "3 NS"): (1, 3)}
    section = sections.SECTIONS["walls"]
    assert results.references(tmp_path, section.references) == {("4x4", "3 NS"): (1, 9)}
    assert sections.SECTIONS["3"].references == ("7", "8")
    commands = [command for run in section.runs.values() for command in run.then]
    assert sum("--best-response-steps" in command for command in commands) == 1, "they are measured once"


def test_what_was_cut_off_goes_on_where_it_was(tmp_path, monkeypatch):
    args = experiments.Args(run_dir=str(tmp_path), extra_then="--device cpu")
    run = sections.Run("--method ppo", then=("one.py RUN", "two.py RUN --modes a -- --planner mcts"))
    checkpoint, calls = experiments.folder_of(args, run) / "x__1" / "checkpoint.pt", []

    def call(words, **_):
        calls.append(words[1:])
        if words[1] == "hopplus_ppo.py":
            checkpoint.parent.mkdir()
            checkpoint.touch()
        if words[1] == "two.py" and [words[0] for words in calls].count("two.py") == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(experiments.subprocess, "run", call)
    with pytest.raises(KeyboardInterrupt):
        experiments.make(args, run, threading.Semaphore(1))
    experiments.make(args, run, threading.Semaphore(1))
    assert sorted(words[0] for words in calls) == ["hopplus_ppo.py", "one.py", "two.py", "two.py"]
    assert ["one.py", str(checkpoint), "--device", "cpu"] in calls
    assert calls[3] == ["two.py", str(checkpoint), "--modes", "a", "--device", "cpu", "--", "--planner", "mcts"]
    assert not checkpoint.exists() and (checkpoint.parent.parent / "finished").exists()


@pytest.mark.parametrize("places", [1, 4])
def test_no_more_commands_at_once_than_allowed(places, tmp_path, monkeypatch):
    """What follows a run goes side by side, too"""
    args = experiments.Args(run_dir=str(tmp_path), parallel=places)
    runs = [sections.Run(f"--method ppo --seed {k}", then=("one.py RUN", "two.py RUN")) for k in range(2)]
    lock, now, most = threading.Lock(), [0], [0]
    all_places_taken = threading.Barrier(places)

    def call(words, **_):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        if words[1] == "hopplus_ppo.py":
            checkpoint = Path(words[words.index("--run-dir") + 1]) / "x__1" / "checkpoint.pt"
            checkpoint.parent.mkdir()
            checkpoint.touch()
        else:
            all_places_taken.wait(60)
        with lock:
            now[0] -= 1

    monkeypatch.setattr(experiments.subprocess, "run", call)
    experiments.make_all(args, runs)
    assert most[0] == places
    for run in runs:
        assert (experiments.folder_of(args, run) / "finished").exists()


def finished_others(args, board="4x4", but=()):
    """As if the runs of section `others` were made. -> name: checkpoint"""
    paths = {}
    for name, run in sections.other_runs(board).items():
        paths[name] = experiments.folder_of(args, run) / "x__31" / "checkpoint.pt"
        paths[name].parent.mkdir(parents=True)
        paths[name].touch()
        if name not in but:
            (paths[name].parent.parent / "finished").touch()
    return paths


def test_commands_name_the_learners_of_other_runs(tmp_path):
    args = experiments.Args(run_dir=str(tmp_path / "with space"), extra_then="--steps 100")
    command = "adapt.py RUN --sets learned --others OTHERS_4x4 -- --planner mcts"
    paths = finished_others(args)
    assert list(paths) == ["PPO", "HOP+", "hares", "early", "GRU"]
    words = experiments.resolve(args, command, ["a.pt", "b c.pt"])
    others = [f"{name}={path}" for name, path in paths.items()]
    named = ["adapt.py", "a.pt", "b c.pt", "--sets", "learned", "--others", *others]
    assert words == [*named, "--steps", "100", "--", "--planner", "mcts"]
    with pytest.raises(ValueError, match=r"PPO, 8x8 of --section others is not finished or has no checkpoint"):
        experiments.resolve(args, command.replace("4x4", "8x8"), [])
    paths["hares"].unlink()
    with pytest.raises(ValueError, match=r"hares of --section others is not finished or has no checkpoint"):
        experiments.resolve(args, command, [])


def test_learners_that_others_meet_are_made_first(tmp_path, monkeypatch, capsys):
    """With --only, too; their checkpoints stay. What names them fails if one of them does, and says why."""
    args = experiments.Args(run_dir=str(tmp_path / "runs"), docs=str(tmp_path), section=("8",), only=("HOP+",))
    args.parallel = 1
    broken = []
    scripts = []

    def call(words, **_):
        scripts.append(words[1])
        if "--run-dir" in words:
            if broken == [words[words.index("--total-timesteps") + 1]]:
                raise KeyError
            there = Path(words[words.index("--run-dir") + 1]) / "x__1"
            there.mkdir()
            (there / "checkpoint.pt").touch()
            (there / "metrics.jsonl").touch()
            (there.parent / "train.log").touch()

    monkeypatch.setattr(experiments.subprocess, "run", call)
    broken.append(str(sections.OTHERS["4x4"]["early"].steps))
    experiments.main(args)
    said = capsys.readouterr().out
    assert said.count("FAILED, see its logs") == 1 and "FAILED, " + str(tmp_path) in said
    assert "early of --section others is not finished or has no checkpoint: hopplus_ppo_py___seed_11" in said
    broken.clear()
    experiments.main(args)
    assert scripts[:5].count(sections.GRU) == 1 and "evaluation/adapt.py" not in scripts[:6]
    assert scripts[-2:] == ["hopplus_ppo.py", "evaluation/adapt.py"], "the broken one, and what waited for it"
    assert scripts.count("evaluation/adapt.py") == 3
    kept = {path.parent.parent for path in tmp_path.glob("runs/*/*/checkpoint.pt")}
    assert kept == {experiments.folder_of(args, run) for run in sections.other_runs("4x4").values()}
    args.only = ("nobody",)
    with pytest.raises(ValueError, match="--only nobody: the runs of these sections are PPO, PPO, mixed"):
        experiments.main(args)


def met(run, players, seed, repetition=0, sets="standard", **returns):
    return {"run": run, "sets": sets, "co_players": players, "repetition": repetition, "seed": seed, **returns}


def write_meetings(folder):
    """Two sets with random players of 1 and best responses of 3 and 5; learner A in two seeds"""
    random_and_best = {"random mean": 1, "best response mean": 3}
    results.write(folder / "data/section_7_adaptation.csv", [
        {"run": "PPO", "sets": "standard", "co_players": "3 NS", **random_and_best},
    ])  # fmt: skip
    results.write(folder / "data/section_8_adaptation.csv", [
        {"run": "PPO", "sets": "strangers", "co_players": "3 waiting", **random_and_best, "best response mean": 5},
    ])  # fmt: skip
    scripted = "Bayes hunter"
    results.write(folder / "data/section_7_adaptation_repetitions.csv", [
        met("HOP+", "3 NS", 11, **{"learning": 2, "learning first game": 1, "learning test steps": 100}),
        met("HOP+", "3 NS", 11, **{"learning": 3, "learning first game": 1, "learning test steps": 300}),
        met("HOP+", "3 NS", 12, **{"learning": 3, "learning first game": 2, "learning test steps": 200}),
        met("PPO", "3 NS", 11, 0, learning=0, **{scripted: 3}),
        met("PPO", "3 NS", 11, 1, learning=0, **{scripted: 2}),
        met("few", "3 NS", 11, learning=3),
    ])  # fmt: skip
    results.write(folder / "data/section_8_adaptation_repetitions.csv", [
        met("HOP+", "3 waiting", 11, sets="strangers", **{"learning": 4, "learning first game": 5}),
        met("HOP+", "3 waiting", 12, sets="strangers", **{"learning": 5, "learning first game": 5}),
        met("PPO", "3 waiting", 11, 0, "strangers", learning=3, **{scripted: 2}),
        met("PPO", "3 waiting", 11, 1, "strangers", learning=3, **{scripted: 4}),
    ])  # fmt: skip


def test_the_worst_case(tmp_path, capsys):
    """HOP+: 3 NS 0.75 and 1, 3 waiting 0.75 and 1 in its two seeds; regrets 0.5 and 0, 1 and 0"""
    write_meetings(tmp_path)
    args = experiments.Args(docs=str(tmp_path), section=("worst",), draw=True)
    references = results.references(Path(args.docs))
    assert references == {("4x4", "3 NS"): (1, 3), ("4x4", "3 waiting"): (1, 5)}
    meetings = {(m.method, m.period): m for m in worst_case.read_meetings(Path(args.docs))}
    hopplus = worst_case.worst_case(meetings["HOP+", "last quarter"], references)
    spread = 0.125 * 12.7062  # of two values around their mean: Student's t with 1 degree of freedom
    assert hopplus.worst_score == pytest.approx((0.875, 0.875 - spread, 0.875 + spread), rel=1e-4)
    assert hopplus.mean_score == pytest.approx(hopplus.worst_score) and hopplus.num_sets == 2
    assert (hopplus.regret_set, hopplus.worst_regret[0]) == ("3 waiting", 0.5)
    first = worst_case.worst_case(meetings["HOP+", "first game"], references)
    assert (first.worst_set, first.worst_score[0]) == ("3 NS", 0.25)
    assert first.mean_score == pytest.approx((0.625, 0.625 - spread, 0.625 + spread), rel=1e-4)
    scripted = worst_case.worst_case(meetings["Bayes hunter", "last quarter"], references)
    assert (scripted.worst_set, scripted.worst_score[0]) == ("3 waiting", 0.5), "repetitions are its seeds"
    assert scripted.worst_score[1] == pytest.approx(0.5 - 2 * spread, rel=1e-4)
    assert (scripted.mean_score[0], scripted.worst_regret[0]) == (0.625, 2)
    experiments.main(args)
    said = capsys.readouterr().out
    assert "| HOP+, learning | 0.88 ± 1.59 | 3 NS | 0.88 ± 1.59 | 0.50 ± 6.35 | 3 waiting | 200 |" in said
    assert "| PPO, learning | -0.50 | 3 NS | 0.00 | 3.00 | 3 NS |  |" in said
    without = said.partition("without 3 waiting")[2]
    assert "| PPO, learning | -0.50 | 3 NS | -0.50 |" in without
    assert re.search(r"\| Bayes hunter \| 0.75[^|]*\| 3 NS \| 0.75", without)
    assert "few, learning (1 of 2)" in said and "| few" not in said
    rows = results.read_csv(tmp_path / "data/worst_case.csv")
    names = [(row["method"], row["period"]) for row in rows]
    assert names == [("Bayes hunter", "last quarter"), ("PPO", "last quarter"), ("HOP+", "last quarter"),
                     ("HOP+", "first game")]  # fmt: skip
    assert (rows[2]["board"], rows[2]["mode"], rows[2]["test steps"]) == ("4x4", "learning", "200")
    assert float(rows[3]["worst score"]) == 0.25 and rows[3]["worst set"] == "3 NS"
    assert (tmp_path / "results/worst_case.png").stat().st_size > 5000


def test_the_worst_is_of_means_not_of_single_seeds():
    """Each of two sets is bad in another seed: the lowest score of all is 0, in b; but the worst set is a, 0.4"""
    returns = {"a": {"1": 0.1, "2": 0.7}, "b": {"1": 1.0, "2": 0.0}}
    meeting = worst_case.Meeting("4x4", "x", "learning", "last quarter", returns, None)
    worst = worst_case.worst_case(meeting, dict.fromkeys([("4x4", "a"), ("4x4", "b")], (0.0, 1.0)))
    assert (worst.worst_set, worst.regret_set) == ("a", "a")
    assert worst.worst_score[0] == pytest.approx(0.4) and worst.mean_score[0] == pytest.approx(0.45)


def test_a_partner_of_a_new_kind(tmp_path, capsys):
    """From partners.py's table to the printed one"""
    args = experiments.Args(run_dir=str(tmp_path / "runs"), docs=str(tmp_path), section=("stays-4x4",))
    folder = experiments.folder_of(args, sections.SECTIONS["stays-4x4"].runs["HOP+"])
    (folder / "x__11").mkdir(parents=True)
    (folder / "seconds").touch()
    (folder / "train.log").write_text("on cpu")
    (folder / "x__11/metrics.jsonl").touch()
    lines = [
        "seed,game,return,shuffled",
        "0,1,1.0,0.5",
        "0,2,1.0,0.5",
        "0,3,2.0,0.5",
        "1,1,2.0,",
    ]
    (folder / "x__11/partners_left_stag.csv").write_text("\n".join(lines) + "\n")
    (folder / "x__11/partners.csv").write_text("seed,game,return\n0,1,9.0\n")
    experiments.collect(args, "stays-4x4")
    figures.print_together(Path(args.docs), "stays-4x4")
    said = capsys.readouterr().out
    assert "| arm, frozen beside left_stag | game 1 | game 2 | games 2-20 | games 3-20 | games 11-20 |" in said
    assert "| HOP+ | 1.500 ± 6.353 | 1.000 | 1.500 | 2.000 |  |  |" in said
    assert re.search(r"arm, frozen \|.*\n.*\n\| HOP\+ \| 9.000 \|", said), "the partners of the training apart"


def test_games_together_are_printed_of_every_section_that_has_them(tmp_path, capsys):
    rows = [{"run": "GRU", "seed": 0, "flags": "", "return": 2.0}]
    games = [{"run": "GRU", "population": "", "seed": 0, "game": game, "return": game} for game in (1, 2)]
    for number in ("more-updates", "stays-4x4"):
        results.write(tmp_path / "data" / f"section_{number}_together.csv", games)
        figures.print_section(tmp_path, number, rows, [], {})
        assert "| GRU | 1.000 | 2.000 | 2.000 |" in capsys.readouterr().out


def test_the_dashboard_shows_what_a_run_logs(tmp_path, monkeypatch):
    args = hopplus_ppo.make_args("hopplus", "cpu", **TINY, run_dir=str(tmp_path))
    folder, out = Path(hopplus_ppo.main(args)["checkpoint"]).parent, tmp_path / "dashboard.png"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [tag for tag in dashboard.PANELS if tag not in lines[-1]] == []
    curve = dashboard.curve_of([{"steps": 1}, {"steps": 2, "moa/nll": None}, {"steps": 3, "moa/nll": 0.5}], "moa/nll")
    assert curve == ([3], [0.5]), "what was not logged is left out"
    assert [tag for tag in dashboard.DOTTED.values() if tag not in lines[-1]] == []
    drawn = []
    monkeypatch.setattr("matplotlib.pyplot.close", drawn.append)
    dashboard.main(dashboard.Args(runs=(str(folder),), out=str(out)))
    assert out.stat().st_size > 5000
    (figure,) = drawn
    assert [len(axis.lines) for axis in figure.axes] == [1 + (tag in dashboard.DOTTED) for tag in dashboard.PANELS]
    for runs, words in (((str(tmp_path),), "no folder of a run"), ((), "which runs")):
        with pytest.raises(ValueError, match=words):
            dashboard.main(dashboard.Args(runs=runs, out=str(out)))


def test_intervals():
    mean, low, high = results.interval(list(np.random.default_rng(1).normal(3.0, 1.0, 400)))
    assert abs(mean - 3) < 0.15 and high - low == pytest.approx(4 / np.sqrt(400), rel=0.15) and low < mean < high
    mean, low, high = results.interval([2.0])
    assert mean == 2 and math.isnan(low) and math.isnan(high), "one seed says nothing about the others"


def test_seats_that_differ_are_found():
    noise = np.random.default_rng(3).normal(0, 0.05, (8, 4))
    for lead, low, high in ((0.0, 0.05, 1.0), (0.3, 0.0, 0.001)):
        rows = [{"run": "x", **{f"player_{i}": 2 + noise[s, i] + lead * (i == 0) for i in range(4)}} for s in range(8)]
        means, p = figures.seat_test(rows, "x", 2000)
        assert low <= p <= high and means[0] == pytest.approx(2 + noise[:, 0].mean() + lead)


def seat_rows(table, key="player"):
    return [{"run": "x", **{f"{key}_{i}": str(value) for i, value in enumerate(row)}} for row in table]


def test_seats_in_order():
    """p of Page's L as counted over all orders of the seats in each seed"""
    falling = seat_rows([[4, 3, 2, 1]] * 8)
    assert figures.trend_test(falling, "x") == pytest.approx(24.0**-8)
    assert figures.trend_test(seat_rows([[1, 2, 3, 4]] * 8), "x") == pytest.approx(1)
    table = [[9.0, 8.5, 8.0, 8.2], [2.0, 2.5, 1.0, 0.5]]  # two neighbours exchanged in each
    orders = [np.array(order) for order in itertools.permutations(range(1, 5))]

    def page_l(first, second):
        return ((first + second) * np.array([4, 3, 2, 1])).sum()

    found = page_l(np.array([4, 3, 1, 2]), np.array([3, 4, 2, 1]))
    shares = [page_l(a, b) >= found for a in orders for b in orders]
    assert figures.trend_test(seat_rows(table), "x") == pytest.approx(np.mean(shares))
    last = seat_rows([[1, 1, 1, 2 + seed / 9] for seed in range(8)])  # differs, but does not fall
    assert figures.seat_test(last, "x", 2000)[1] < 0.001 and figures.trend_test(last, "x") > 0.9
    assert math.isnan(figures.trend_test(falling[:1], "x")), "one seed"
    incomplete = [*falling, {**falling[0], "player_2": ""}]
    assert figures.seat_table(incomplete, "x", "player").shape == (8, 4)


def write_runs(args, section, of_runs):
    """label -> lines of metrics.jsonl of each seed"""
    for label, seeds in of_runs.items():
        folder = experiments.folder_of(args, sections.SECTIONS[section].runs[label])
        for seed, lines in enumerate(seeds):
            (folder / f"x__{seed}").mkdir(parents=True)
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / f"x__{seed}" / "metrics.jsonl").write_text(text)
        (folder / "seconds").touch()
        (folder / "train.log").write_text("on cpu")


def collected(args, section, capsys):
    """What is printed, and the size of the figure"""
    experiments.collect(args, section)
    figures.draw(Path(args.docs), section)
    return capsys.readouterr().out, (Path(args.docs) / f"results/section_{section}.png").stat().st_size


def test_value_losses_by_seat(tmp_path, capsys):
    """The highest of the run, and each learner's own; a single learner has no row of seats"""
    args = experiments.Args(run_dir=str(tmp_path / "runs"), docs=str(tmp_path / "docs"))

    def lines(seed, learners):
        rows = []
        for step, loss in enumerate([1.0, 40.0 + seed, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0, 6.0, 8.0]):
            row = {"steps": step + 1, "charts/episodic_return": 2.0}
            row |= {"losses/value_loss": loss, "losses/value_loss_real": loss / 10}
            row |= {f"charts/episodic_return/player_{i}": 2.0 + i for i in range(4)}
            for i in range(learners):
                row[f"per_agent/value_loss_real/learner_{i}"] = 4.0 - i
                row[f"per_agent/explained_variance/learner_{i}"] = 0.25 * i if step else None
            rows.append(row)
        return rows

    labels = {"HOP+, no ends": 4, "HOP+, one learner, no ends": 1}
    of_runs = {label: [lines(seed, learners) for seed in range(2)] for label, learners in labels.items()}
    write_runs(args, "1", of_runs)
    said, size = collected(args, "1", capsys)
    assert "| run | seeds | return | value_real | value_real_peak |" in said and size > 5000
    peaks = "| 2 | 2 [2, 2] | 0.7 [0.7, 0.7] | 4.05 [3.415, 4.685] |"
    assert all(f"| {label} {peaks}" in said for label in labels)
    assert "HOP+, no ends: value_real by seat 4.000, 3.000, 2.000, 1.000; all equal: p = " in said
    assert re.search(r"ends: explained_variance by seat 0.000, 0.250, 0.500, 0.750; .* does not fall: p = 1\n", said)
    assert re.search(r"HOP\+, no ends: value_real .* does not fall: p = 0.0017\n", said), "1 in 576"
    assert "HOP+, no ends: player by seat" in said and "one learner, no ends: value_real by seat" not in said


def test_who_joins_when(tmp_path, capsys):
    args = experiments.Args(run_dir=str(tmp_path / "runs"), docs=str(tmp_path / "docs"))
    lines = []
    for number in range(1, 11):
        row = {"steps": 100 * number, "charts/episodic_return": 3.0 - 0.1 * number}
        row |= {"charts/party_2": 1 - 0.1 * number, "charts/party_3": 0.04 * number, "charts/party_4": 0.0}
        lines.append(row)
    write_runs(args, "parties", {"search": [lines, lines], "HOP": [lines[:2]]})
    said, size = collected(args, "parties", capsys)
    shares = "0.85 / 0.06 / 0.00 | 0.65 / 0.14 / 0.00 | 0.45 / 0.22 / 0.00 | 0.25 / 0.30 / 0.00 | 0.05 / 0.38 / 0.00"
    assert f"| search | {shares} |" in said and size > 5000
    assert (
        "| HOP | nan / nan / nan | nan / nan / nan | 0.90 / 0.04 / 0.00 | nan / nan / nan | 0.80 / 0.08 / 0.00 |"
        in said
    )
    assert "| search | 2 | 2.05 [2.05, 2.05] | 0.8 [0.8, 0.8] | 0.38 [0.38, 0.38] |" in said, "return, fall, party_3"


def test_doses(tmp_path, capsys):
    args = experiments.Args(run_dir=str(tmp_path / "runs"), docs=str(tmp_path / "docs"))

    def seeds(*returns):
        """The first line does not count: its games may be those that ended early"""
        return [
            [{"steps": 100 * k, "charts/episodic_return": value} for k, value in enumerate((2.9, 1.0, 2.8, last), 1)]
            for last in returns
        ]

    hares = [[{"steps": 200, "charts/episodic_return": 1.0, "real/samples": 40.0}]] * 2
    half = seeds(2.5, 2.7)
    for lines in half:
        lines[-1] |= {"real/samples": 30.0, "imagined/samples": 20.0, "imagined/raw_reward_outside": 0.25}
    write_runs(args, "dose", {"HOP+": seeds(2.9, 2.9), "ppo-real-ratio 0.5": half, "ppo-real-ratio 1, 8x8": hares})
    said, size = collected(args, "dose", capsys)
    columns = "return | steps to 2.8 | real samples | imagined samples | rewards outside"
    table = said.split(f"| --ppo-real-ratio | board | {columns} |\n")[1].split("\n\n")[0].splitlines()[1:]
    assert table == [
        "| 0.5 | 4x4 | 2.6 [1.329, 3.871] | 300 [300, 300] | 30 [30, 30] | 20 [20, 20] | 0.25 [0.25, 0.25] |",
        "| 0.2 | 4x4 | 2.9 [2.9, 2.9] | 300 [300, 300] |  |  |  |",
        "| 1 | 8x8 | 1 [1, 1] | never | 40 [40, 40] |  |  |",
    ]
    assert "| 16 | 4x4 | 2.9 [2.9, 2.9] |" in said and "| mixed | 4x4 | 2.9 [2.9, 2.9] |" in said and size > 5000


def test_doses_differ_from_hopplus_in_one_flag():
    defaults = hopplus_ppo.Args()
    for flag, value in sections.HOPPLUS_DOSE.items():
        assert value in sections.DOSES[flag]
        default = getattr(defaults, flag.replace("-", "_"))
        assert type(default)(value) == default
    runs = sections.SECTIONS["dose"].runs
    assert len(runs) == 20
    for label, run in runs.items():
        hopplus = runs[sections.label_of("HOP+", sections.board_of(label))]
        changed = run.flags.removeprefix(hopplus.flags).strip()
        assert run.flags.startswith(hopplus.flags) and f"--{sections.method_of(label)}" in (
            f"--{changed[2:]}",
            "--HOP+",
        )


def test_mistakes_of_the_value_loss():
    """Each alone, then all; HOP+ and PPO without one are those of other sections"""
    runs = sections.SECTIONS["1"].runs
    assert len(runs) == 25 and runs["HOP+"] == sections.SECTIONS["5"].runs["present (default)"]
    for place in ("", ", one learner"):
        alone = [run.patch for label, run in runs.items() if label.startswith(f"HOP+{place},") and len(run.patch) == 1]
        assert set(alone) >= {("reward_of_player_1",), ("replayed",), ("no_ends",), ("all_legal",)}
        assert set(runs[f"HOP+{place}, all four"].patch) == set(sections.VALUE_MISTAKES.values())
    for label, run in runs.items():
        assert ("--seats nearest_stag,nearest_stag,nearest_stag,learner" in run.flags) == ("one learner" in label)
        args = hopplus_ppo.parse_args([*run.flags.split(), "--device", "cpu"])
        hopplus_ppo.validate(args)


def test_scores_are_normalised_by_the_references_of_the_same_board():
    best = {
        "run": "PPO",
        "sets": "standard",
        "co_players": "3 NH",
        "random mean": "0.5",
        "best response mean": "1.5",
        "frozen mean": "1",
        "Bayes hunter mean": "1.75",
    }
    other = {"run": "HOP+", "sets": "standard", "co_players": "3 NH", "learning mean": "1.25", "frozen mean": "0.5"}
    large = {"run": "HOP+, 8x8", "sets": "standard", "co_players": "3 NH", "learning mean": "1.25"}
    references = results.reference_returns([best, other])
    found = figures.normalised([other, large], references, "standard")
    assert np.isnan(found.pop("HOP+, 8x8, learning")["3 NH"]), "this board has no references"
    assert found == {"HOP+, frozen": {"3 NH": 0.0}, "HOP+, learning": {"3 NH": 0.75}}
    both = [best, best | {"run": "PPO, 8x8"}]
    found = figures.normalised(both, results.reference_returns(both), "standard")
    assert found["Bayes hunter"] == found["Bayes hunter, 8x8"] == {"3 NH": 1.25} and len(found) == 4


@pytest.mark.parametrize("board", sections.BOARDS)
def test_every_method_meets_the_same_players(board):
    """Only PPO measures the references; the controls train with the players that the models of HOP+ watch"""
    methods = sections.METHODS[board]
    flags = {}
    for name, method in methods.items():
        words = sections.method_flags(method, board, sections.TEST_SEEDS).split()
        flags[name] = SCRIPTS[method.script].parse_args([*words, "--device", "cpu"])
    watched = flags["HOP+"].population
    control = flags["PPO, mixed"]
    redraw = {"PPO, mixed": "game", "GRU, mixed": "never", "+ subgoals, mixed": "never"}  # who remembers keeps them
    assert [name for name in methods if name.endswith("mixed")] == list(redraw)
    for name in redraw:
        args = flags[name]
        assert (args.seats, args.population) == ("learner,mixed,mixed,mixed", watched)
        assert (args.redraw, args.unsteady) == (redraw[name], 0.5)
        assert (args.num_envs, args.total_timesteps) == (control.num_envs, control.total_timesteps)
        assert (args.seed, args.num_seeds, args.config) == (11, 5, control.config)
    assert flags["+ subgoals, mixed"].learning_rate == control.learning_rate
    for name in methods:
        run = sections.SECTIONS["7"].runs[sections.label_of(name, board)]
        assert run == sections.SECTIONS["8"].runs[sections.label_of(name, board)]
        commands = [command for command in run.then if "adapt.py" in command]
        sets = [re.findall(r"--sets (\w+)|$", command)[0] for command in commands]
        assert sets == ["", "strangers", "learned"] and f"--others OTHERS_{board}" in commands[2]
        assert {"--no-references" in command for command in commands} == {name != "PPO"}
        assert all(re.search(r"--modes frozen learning( --|$)", command) for command in commands)


def test_hopplus_has_one_setting():
    """Board, game, seats, games at once, steps, seeds and device may differ"""
    may_differ = {"--seed", "--num-seeds", "--log-every", "--num-envs", "--total-timesteps"}
    may_differ |= {"--height", "--width", "--max-wall-pieces", "--num-stags", "--final-time"}
    may_differ |= {"--redraw", "--population", "--seats", "--device"}
    labels = ("HOP+", "HOP+, 8x8", "HOP+, few steps", "HOP+, 4h2s")
    seen = []
    for name, section in sections.SECTIONS.items():
        for label in labels:
            if label in section.runs:
                run = section.runs[label]
                flags = set(re.findall(r"--[\w-]+", run.flags))
                assert run.script == "hopplus_ppo.py" and flags <= may_differ, (name, label)
                seen.append(name)
    alone = {"2", "7", "8", "others", "1", "dose", "walls"}
    assert set(seen) == alone | {*sections.TIMINGS, *sections.HOPPLUS_TASKS}


def test_goals_are_few_and_discrete_or_continuous():
    labels = ("HOP+, few steps", "few, D = 8", "few, discrete goals", "few, 4 discrete goals")
    goals = []
    for label in labels:
        words = sections.SECTIONS["7"].runs[label].flags.split()
        args = hopplus_ppo.parse_args([*words, "--device", "cpu"])
        hopplus_ppo.validate(args)
        goals.append((args.goal_kind, args.goal_dim))
    assert goals == [("continuous", 16), ("continuous", 8), ("discrete", 8), ("discrete", 4)]


def test_arms_of_the_ladder_differ_in_what_they_know_alone():
    words = {arm: run.flags for arm, run in sections.arms("stays-4x4").items()}
    words.pop("HOP+")
    common = set.intersection(*(set(flags.split()) for flags in words.values()))
    assert set(sections.LADDER.split()) <= common and set(sections.TASKS["stays-4x4"].flags.split()) <= common
    other = {arm: " ".join(word for word in flags.split() if word not in common) for arm, flags in words.items()}
    assert other == {arm: flags for arm, (_, flags) in sections.ARMS.items()}


def test_more_updates_differ_from_the_ladder_in_games_at_once_alone():
    for board in sections.BOARDS:
        ladder = sections.arms(f"stays-{board}")
        hopplus = set(ladder["HOP+"].flags.split())
        for name in ("none", "inferred", "GRU", "posterior"):
            run = sections.SECTIONS["more-updates"].runs[sections.label_of(name, board)]
            assert run.script == ladder[name].script
            assert run.flags.split() == ladder[name].flags.replace("--num-envs 1024", "--num-envs 256").split()
            assert "--num-envs" not in hopplus and hopplus <= set(run.flags.split())
    assert hopplus_ppo.Args().num_envs == 256  # HOP+'s, on a GPU


def test_sections_and_runs_that_do_not_exist(capsys):
    with pytest.raises(ValueError, match="there is no section 9"):
        experiments.main(experiments.Args(section=("9",), draw=True))
    with pytest.raises(ValueError, match="the runs of these sections are PPO, PPO, shared"):
        experiments.main(experiments.Args(section=("2",), only=("POP",), draw=True))
    with pytest.raises(ValueError, match="--patched two_players: the known ones are one_player, zero_subgoals"):
        experiments.main(experiments.Args(patched=("two_players",)))
    experiments.main(experiments.Args(list=True))
    said = "\n" + capsys.readouterr().out
    assert all(f"\n{number}. {section.title}" in said for number, section in sections.SECTIONS.items())


# ---------------------------------------------------------------------------------------------------------------------
# peers.py


def test_without_jax_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jax", None)  # as if it were not there
    monkeypatch.setattr(sys, "argv", ["peers.py", "--trees", "4"])
    with pytest.raises(SystemExit) as stop:
        stag_hunt_env.command_line(peers.parse_args, peers.main)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1
    assert said.startswith("error: there is no jax here") and "pip install -r benchmarks/requirements-peers.txt" in said


def test_peers_are_printed_beside_our_figures(tmp_path, monkeypatch, capsys):
    device = types.SimpleNamespace(device_kind="some GPU")
    monkeypatch.setitem(sys.modules, "jax", types.SimpleNamespace(__version__="1", devices=lambda: [device]))
    monkeypatch.setitem(sys.modules, "mctx", types.SimpleNamespace(__version__="2"))
    monkeypatch.setattr(peers, "measure", lambda args, root, trees: 0.001)
    monkeypatch.setattr(search, "measure", lambda args, root, trees, device: 0.002)
    search.main(search.Args(trees=(4, 8), device="cpu", csv=str(tmp_path / "search.csv")))
    capsys.readouterr()
    rates = peers.main(peers.Args(trees=(8, 16), ours=str(tmp_path / "search.csv")))
    assert rates["puct/8"] == pytest.approx(8 * 32 / 0.001) and list(rates) == [
        f"{root}/{trees}" for root in ("puct", "gumbel") for trees in (8, 16)
    ]
    said = capsys.readouterr().out.splitlines()[1:]
    assert ["ours     0.128" in line for line in said] == [True, False, True, False]


def test_mctx_searches():
    pytest.importorskip("mctx")
    rates = peers.main(peers.Args(trees=(4,), simulations=4, width=8, repeats=1, device="cpu"))
    assert list(rates) == ["puct/4", "gumbel/4"] and min(rates.values()) > 0


def test_the_versions_of_peers_are_exact():
    lines = (ROOT / "benchmarks" / "requirements-peers.txt").read_text().splitlines()
    assert lines and all(re.fullmatch(r"[a-z]+==[\d.]+", line) for line in lines)


def test_the_worst_case_of_each_board_in_the_table_and_the_figure(tmp_path, monkeypatch):
    """Boards have references of their own; intervals stand from low to high; who learns is drawn, who is frozen not"""
    references = {("4x4", "3 NS"): (0.0, 1.0), ("8x8", "3 NS"): (1.0, 3.0)}
    returns = {"3 NS": {"11": 2.0, "12": 2.5}}
    frozen = worst_case.Meeting("8x8", "HOP+", "frozen", "last quarter", returns, None)
    meetings = [frozen, frozen._replace(mode="learning")]
    worst = worst_case.worst_case(meetings[1], references)
    row = worst_case.worst_row(meetings[1], worst)
    assert (row["worst score"], row["mean score"], row["worst regret"]) == pytest.approx((0.625, 0.625, 0.75))
    half = 12.7062 * 0.125
    for name, width in (("worst score", half), ("mean score", half), ("worst regret", 2 * half)):
        bounds = row[f"{name} low"], row[f"{name} high"]
        assert bounds == pytest.approx((row[name] - width, row[name] + width), rel=1e-4), name
    drawn = []
    monkeypatch.setattr(worst_case, "read_repetitions", lambda docs: [{"co_players": "3 NS", "sets": "standard"}])
    monkeypatch.setattr(worst_case, "draw_board", lambda axis, learners, *_: drawn.extend(learners))
    monkeypatch.setattr(worst_case, "save", lambda *_, **__: None)
    worst_case.draw_worst_figure(tmp_path, meetings, references)
    assert drawn == meetings[1:]


def test_panels_side_by_side_name_the_same_runs_once():
    axes = Figure().subplots(1, 4)
    for axis, runs in zip(axes, (["a", "b"], ["a", "b"], ["a", "b"], ["a", "c"]), strict=True):
        axis.set_yticks(range(2), runs)
        axis.invert_yaxis()
    figures.name_runs_once(axes)
    named = [axis.yaxis.get_tick_params()["labelleft"] for axis in axes]
    assert named == [True, False, False, True]


def test_panels_side_by_side_have_the_same_legend_once():
    axes = Figure().subplots(1, 4)
    for axis, runs in zip(axes, ("ab", "ab", "ac", ""), strict=True):
        for run in runs:
            axis.plot([0, 1], label=run)
        if runs:
            axis.legend()
    figures.name_runs_once(axes)
    assert [axis.get_legend() is not None for axis in axes] == [False, True, True, False]


def test_a_mean_is_over_seeds_that_met_all_sets():
    returns = {"a": {"1": 0.2, "2": 0.4, "3": 9.0}, "b": {"1": 0.6, "2": 1.0}}
    meeting = worst_case.Meeting("4x4", "x", "learning", "last quarter", returns, None)
    worst = worst_case.worst_case(meeting, dict.fromkeys([("4x4", "a"), ("4x4", "b")], (0.0, 1.0)))
    half = 12.7062 * 0.15
    assert worst.mean_score == pytest.approx((0.55, 0.55 - half, 0.55 + half), rel=1e-4)
