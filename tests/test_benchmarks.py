"""The benchmarks measure what they say, and the experiments' tables and figures come from the runs."""

import contextlib
import csv
import functools
import json
import math
import re
import shutil
import sys
import types
from pathlib import Path

import hopplus_mcts
import hopplus_ppo
import pretrain_vae
import pretrain_world_model
import stag_hunt_env
from benchmarks import figures, patches, results, sections, worst_case
from benchmarks.baselines import ppo_gru
from evaluation import adapt, cross_play, evaluate, moa, partners, subgoals
from evaluation import runs as evaluation_runs
from stag_hunt_env import StagHuntConfig

import numpy as np
import pytest
import torch
from helpers import TINY_RUN
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(hopplus_ppo.__file__).resolve().parent / "benchmarks"))

import dashboard
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
    "evaluation/cross_play.py": cross_play,
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
    assert 0.5 < sum(stages) / row["iteration_ms"] < 1.2 and row["game_only_env_steps_per_s"] > row["env_steps_per_s"]
    (line,) = csv.DictReader((tmp_path / "own.csv").open())
    assert float(line["iteration_ms"]) == row["iteration_ms"] and line["flags"] == args.flags


def test_commands(tmp_path, monkeypatch):
    """Two at once beside a busy program; the slowest counts"""
    flags = f"--method ppo --final-time 6 --total-timesteps 512 {SMALL}"
    monkeypatch.setattr(speed, "COMMANDS", {"small": ("ppo", flags, 2, True)})
    (row,) = speed.main(speed.Args(cases="commands", device="cpu", folder=str(tmp_path)))
    assert row["seconds"] > row["ready_s"] + row["training_s"] > 0 and -1 <= row["return_last_fifth"] <= 5
    (line,) = csv.DictReader((tmp_path / "commands.csv").open())
    assert line["case"] == "small" and float(line["seconds"]) == row["seconds"]


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
    ],
)
def test_wrong_numbers(program, changes, words):
    with pytest.raises(ValueError, match=words):
        program.main(program.Args(device="cpu", **changes))


def test_search_speed():
    rates = search.main(search.Args(trees=(4, 8), simulations=4, width=8, repeats=1, device="cpu"))
    assert list(rates) == ["puct/4", "puct/8", "gumbel/4", "gumbel/8"] and min(rates.values()) > 0


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
    *_, learned, _ = sections.meetings("PPO", board)
    words = learned.replace(f"OTHERS_{board}", "PPO=a.pt HOP+=b.pt").split()
    args = adapt.parse_args(words[1:])
    assert (args.sets, len(args.others), args.modes) == ("learned", 2, ("frozen", "learning"))


@pytest.mark.parametrize(("arm", "modes"), [("inferred", ("frozen",)), ("HOP+", ("frozen", "learning"))])
def test_partners_of_a_new_kind_are_understood(arm, modes):
    _, *commands = sections.SECTIONS["stays-4x4"].runs[arm].then
    seen = [partners.parse_args(command.split()[1:]) for command in commands]
    assert [(args.population, args.modes) for args in seen] == [("nearest_stag", modes), ("left_stag", modes)]


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

    def savefig(figure, path, **_):
        """In a third of the time"""
        figure.draw_without_rendering()
        path.touch()

    monkeypatch.setattr(Figure, "savefig", savefig)
    shutil.copytree(Path(experiments.ROOT) / "docs/data", tmp_path / "data")
    of_runs = [name for name, section in sections.SECTIONS.items() if section.runs]
    published = [name for name in of_runs if (tmp_path / f"data/section_{name}.csv").exists()]
    assert {*"12345678"} <= set(published)
    experiments.main(experiments.Args(docs=str(tmp_path), draw=True))
    said = capsys.readouterr().out
    assert all((f"section {name}: no data yet" in said) == (name not in published) for name in of_runs)
    assert "| HOP+, few steps | 5 |" in said
    drawn = {path.stem for path in (tmp_path / "results").glob("*.png")}
    assert drawn == {"worst_case", "new_partner"} | {f"section_{name}" for name in published}


# Their flags are new, their tables are old.
TO_BE_MEASURED = (*sections.TASKS, "1", "2", "3", "4", "7", "others", "8", "moa", "pretraining", "walls")


def sections_with_runs():
    to_be_measured = pytest.mark.xfail(reason="to be measured", strict=True)
    for name, section in sections.SECTIONS.items():
        if section.runs:
            yield pytest.param(name, marks=[to_be_measured] if name in TO_BE_MEASURED else [])


@pytest.mark.parametrize("name", list(sections_with_runs()))
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


def test_losses_are_compared_at_equal_returns():
    pairs = (0.9, 1), (1.0, 3), (1.2, 5), (2.9, 7), (0.1, 99)
    rows = [{"run": "x", "return": str(r), "value_real": str(v)} for r, v in pairs]
    values = figures.by_return([*rows, {"run": "x", "return": "", "value_real": "9"}], "value_real")["x"]
    assert values[:2] == [2.0, 5.0] and np.isnan(values[2:5]).all() and values[5] == 7.0


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
    (there / "cross_play.csv").write_text("learner of seed,among seed 1,among seed 2\n1,2.5,2.25\n2,2.0,2.75\n")
    experiments.collect(args, "8")
    names = ("_adaptation", "_adaptation_curves", "_cross_play")
    tables = {name: results.read(Path(args.docs), "8", name) for name in names}
    met = {"run": "PPO", "sets": "strangers", "co_players": "3 waiting", "frozen mean": "0.5"}
    point = {"run": "PPO", "sets": "strangers", "co_players": "3 waiting", "learner": "frozen", "steps": "100"}
    repetition = {"run": "PPO", "sets": "strangers", "co_players": "3 waiting", "repetition": "3", "seed": "2"}
    assert results.read(Path(args.docs), "8", "_adaptation_repetitions") == [repetition | {"frozen": "0.5"}]
    assert tables["_adaptation"] == [met] and tables["_adaptation_curves"] == [point | {"return": "1.5"}]
    assert [row["return"] for row in tables["_cross_play"]] == ["2.5", "2.25", "2.0", "2.75"]


def test_a_run_and_what_follows_it(tmp_path):
    """The whole of it once, with the true scripts: train, cross-play, tables"""
    args = experiments.Args(run_dir=str(tmp_path / "runs"), docs=str(tmp_path / "docs"))
    args.extra = "--device cpu --total-timesteps 64 --num-envs 4 --num-steps 8 --height 3 --final-time 4"
    args.extra_then = "--device cpu --games 8"
    run = sections.Run("--method ppo --num-seeds 2 --log-every 1", then=(sections.CROSS,), patch=("one_player",))
    experiments.make(args, run)
    folder = experiments.folder_of(args, run)
    assert (folder / "finished").exists() and len(list(folder.glob("*/cross_play.csv"))) == 1
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
    assert [text.get_text() for text in axis.texts] == ["0.75", "1.00"] and axis.get_xlabel() == "action"
    axis = Figure().subplots()
    figures.moa_confusion(axis, [*rows, rows[0] | {"run": "other", "kind": "learner"}], "mixed")
    assert [text.get_text() for text in axis.get_yticklabels()] == ["random: up"], "what was never done has no row"
    assert [text.get_text() for text in axis.texts] == ["0.75", "0.25"]


def test_a_section_may_have_references_of_its_own(tmp_path):
    """Walls: not those of the board without"""
    for number, best in (("7", 3), ("walls", 9)):
        row = {"run": "PPO", "sets": "standard", "co_players": "3 NS", "random mean": 1, "best response mean": best}
        results.write(tmp_path / f"data/section_{number}_adaptation.csv", [row])
    assert results.references(tmp_path) == {("4x4", "3 NS"): (1, 3)}
    section = sections.SECTIONS["walls"]
    assert results.references(tmp_path, section.references) == {("4x4", "3 NS"): (1, 9)}
    assert sections.SECTIONS["3"].references == ("7", "8")
    assert [run for run in section.runs if sections.BEST in section.runs[run].then] == ["PPO"]


def test_what_was_cut_off_goes_on_where_it_was(tmp_path, monkeypatch):
    args = experiments.Args(run_dir=str(tmp_path), extra_then="--device cpu")
    run = sections.Run("--method ppo", then=("one.py RUN", "two.py RUN --modes a -- --planner mcts"))
    checkpoint, calls = experiments.folder_of(args, run) / "x__1" / "checkpoint.pt", []

    def call(words, **_):
        calls.append(words[1:])
        if words[1] == "hopplus_ppo.py":
            checkpoint.parent.mkdir()
            checkpoint.touch()
        if words[1] == "two.py" and len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(experiments.subprocess, "run", call)
    with pytest.raises(KeyboardInterrupt):
        experiments.make(args, run)
    experiments.make(args, run)
    assert [words[0] for words in calls] == ["hopplus_ppo.py", "one.py", "two.py", "two.py"]
    assert calls[1] == ["one.py", str(checkpoint), "--device", "cpu"]
    assert calls[3] == ["two.py", str(checkpoint), "--modes", "a", "--device", "cpu", "--", "--planner", "mcts"]
    assert not checkpoint.exists() and (checkpoint.parent.parent / "finished").exists()


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
    assert scripts[-2:] == ["evaluation/adapt.py", "evaluation/cross_play.py"]
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
    args = experiments.Args(run_dir=str(tmp_path / "runs"), docs=str(tmp_path), section=("stays-4x4", "new-partner"))
    folder = experiments.folder_of(args, sections.SECTIONS["stays-4x4"].runs["HOP+"])
    (folder / "x__11").mkdir(parents=True)
    (folder / "seconds").touch()
    (folder / "train.log").write_text("on cpu")
    (folder / "x__11/metrics.jsonl").touch()
    lines = ["seed,game,return,shuffled,learning", "0,1,1.0,0.5,1.0", "0,2,1.0,0.5,3.0", "1,1,2.0,0.5,2.0"]
    (folder / "x__11/partners_left_stag.csv").write_text("\n".join(lines) + "\n")
    (folder / "x__11/partners.csv").write_text("seed,game,return\n0,1,9.0\n")
    experiments.collect(args, "stays-4x4")
    rows = results.read(Path(args.docs), "stays-4x4", "_together")
    assert {row["population"]: row["learning"] for row in rows} == {"left_stag": "2.0", "": ""}
    figures.draw(Path(args.docs), "new-partner")
    said = capsys.readouterr().out
    assert "4x4, 5 steps, the partner stays; partner left_stag\n" in said
    assert "| HOP+, frozen | 1.500 ± 6.353 | 1.000 |  |  |" in said
    assert "| HOP+, learning | 1.500 ± 6.353 | 3.000 |  |  |" in said and "none" not in said
    assert (tmp_path / "results/new_partner.png").stat().st_size > 5000


def test_the_dashboard_shows_what_a_run_logs(tmp_path):
    args = hopplus_ppo.make_args("hopplus", "cpu", **TINY, run_dir=str(tmp_path))
    folder, out = Path(hopplus_ppo.main(args)["checkpoint"]).parent, tmp_path / "dashboard.png"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [tag for tag in dashboard.PANELS if tag not in lines[-1]] == []
    dashboard.main(dashboard.Args(runs=(str(folder),), out=str(out)))
    assert out.stat().st_size > 5000
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
        assert (args.redraw, args.unsteady) == (redraw[name], 0.35)
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
    """Board, game, seats, games at once, steps and seeds may differ"""
    may_differ = {"--seed", "--num-seeds", "--log-every", "--num-envs", "--total-timesteps"}
    may_differ |= {"--height", "--width", "--max-wall-pieces", "--num-stags", "--final-time"}
    may_differ |= {"--redraw", "--population", "--seats"}
    labels = ("HOP+", "HOP+, 8x8", "HOP+, few steps", "HOP+, 4h2s")
    seen = []
    for name, section in sections.SECTIONS.items():
        for label in labels:
            if label in section.runs:
                run = section.runs[label]
                flags = set(re.findall(r"--[\w-]+", run.flags))
                assert run.script == "hopplus_ppo.py" and flags <= may_differ, (name, label)
                seen.append(name)
    assert set(seen) == {"2", "7", "8", "others", "walls", *sections.HOPPLUS_TASKS}


def test_arms_of_the_ladder_differ_in_what_they_know_alone():
    words = {arm: run.flags for arm, run in sections.arms("stays-4x4").items()}
    words.pop("HOP+")
    common = set.intersection(*(set(flags.split()) for flags in words.values()))
    assert set(sections.LADDER.split()) <= common and set(sections.TASKS["stays-4x4"].flags.split()) <= common
    other = {arm: " ".join(word for word in flags.split() if word not in common) for arm, flags in words.items()}
    assert other == {arm: flags for arm, (_, flags) in sections.ARMS.items()}


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
