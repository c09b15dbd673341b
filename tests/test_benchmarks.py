"""The benchmarks measure what they say, and the experiments' tables come from the runs."""

import contextlib
import csv
import json
import math
import re
import shutil
import sys
from pathlib import Path

import hopplus_mcts
import hopplus_ppo
import pretrain_vae
import pretrain_world_model
from benchmarks import results, sections, tables, worst_case
from benchmarks.baselines import ppo_gru
from evaluation import adapt, evaluate, moa, partners, subgoals
from evaluation import runs as evaluation_runs
from stag_hunt_env import StagHuntConfig

import numpy as np
import pytest
from helpers import TINY_RUN

sys.path.insert(0, str(Path(hopplus_ppo.__file__).resolve().parent / "benchmarks"))

import decisions
import experiments
import speed

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
SMALL = "--num-envs 4 --num-steps 8 --imagination-horizon 4 --pretraining-games 4 --wm-hidden 16 --subgoal-hidden 8"
SMALL += " --policy-hidden 16 --replay-rollouts 2"
SMALL_MODELS = "--pretraining-games 4 --wm-hidden 16 --subgoal-hidden 8 --policy-hidden 16"
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
        monkeypatch.setattr(module, "load_run", lambda args, words: None)  # there is no run
    found = {(f"hopplus_{script}.py", flags) for cases in speed.CASES.values() for script, flags in cases.values()}
    for script, flags, values in speed.GROWTH.values():
        found |= {(f"hopplus_{script}.py", f"{flags} {max(values[device])}") for device in values}
    for section in sections.SECTIONS.values():
        for run in section.runs.values():
            commands = (f"{run.script} {run.flags}", *run.then)
            found |= {tuple(words.split(" ", 1)) for words in commands}
            found |= {(script, flags) for script, flags, _ in run.before}
    assert len(found) > 50
    for script, flags in found:
        words = re.sub(r"OTHERS_\w+", "PPO=a.pt HOP+=b.pt", flags).split()
        SCRIPTS[script].parse_args(words)


def test_every_published_table_is_printed_and_the_worst_case_drawn(tmp_path, capsys):
    shutil.copytree(Path(experiments.ROOT) / "docs/data", tmp_path / "data")
    experiments.main(experiments.Args(docs=str(tmp_path), draw=True))
    said = capsys.readouterr().out
    assert "no data yet" not in said and "| HOP+, few steps | 5 |" in said
    page = (Path(experiments.ROOT) / "docs/results.md").read_text()
    for cell in ("3.110 ± 0.010", "2.857 ± 0.011", "0.86 ± 0.04", "0.857 ± 0.042"):
        assert cell in said and cell in page
    drawn = {path.name for path in (tmp_path / "results").iterdir()}
    assert drawn == {"worst_case.png", "three_waiting.png"}
    read = {path.name for path in (tmp_path / "data").glob("section_*")}
    assert all(re.match(rf"section_({'|'.join(sections.SECTIONS)})[_.]", name) for name in read)


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
    tables.print_differences(tmp_path, "7")
    assert capsys.readouterr().out == "HOP+ learning minus PPO, mixed learning: 3 NS 1.500 ± 6.353\n"


def write_timed(folder):
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
    (tmp_path / "data/decisions_gpu.csv").unlink()
    experiments.main(experiments.Args(docs=str(tmp_path), section=("time",), draw=True))
    assert f"\n{header}\n" in capsys.readouterr().out, "without the other program's table"


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
    (there / "adaptation_strangers_curve.csv").write_text(
        "co_players,learner,steps,return\n3 waiting,frozen,100,1.5\n3 waiting,learning,100,1.75\n3 NH,learning,100,2\n"
    )
    (there / "adaptation_strangers_repetitions.csv").write_text(
        "co_players,repetition,seed,frozen\n3 waiting,3,2,0.5\n"
    )
    experiments.collect(args, "8")
    names = ("_adaptation", "_adaptation_curves")
    tables = {name: results.read(Path(args.docs), "8", name) for name in names}
    met = {"run": "PPO", "sets": "strangers", "co_players": "3 waiting", "frozen mean": "0.5"}
    point = {"run": "PPO", "sets": "strangers", "co_players": "3 waiting", "learner": "learning", "steps": "100"}
    repetition = {"run": "PPO", "sets": "strangers", "co_players": "3 waiting", "repetition": "3", "seed": "2"}
    assert results.read(Path(args.docs), "8", "_adaptation_repetitions") == [repetition | {"frozen": "0.5"}]
    assert tables["_adaptation"] == [met] and tables["_adaptation_curves"] == [point | {"return": "1.75"}], (
        "of the curves one is drawn"
    )


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


def test_two_scripts_before_a_run(tmp_path, monkeypatch, capsys):
    """The true scripts: two checkpoints, steps and seconds from the very start, tables"""
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
    section = sections.Section(
        "?", {"two": run, "none": plain}, ("all_steps_to_2.8", "after/probe"), moa=True, curves=True
    )
    monkeypatch.setitem(sections.SECTIONS, "pretraining", section)
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
    assert int(curve["none"][0]["steps"]) == 32
    seconds = float((folder / "seconds_before").read_text())
    line = experiments.read_lines(next(folder.glob("hopplus*__1__*/metrics.jsonl")))[0]
    expected = seconds + line["time/ready"] + line["time/training"]
    assert float(curve["two"][0]["all_seconds"]) == pytest.approx(expected, rel=1e-3) and seconds > 0
    rows = by_label(docs)["two"]
    probes = results.read_csv(next(folder.glob("*/subgoals_*_seeds.csv")))
    assert [float(row["after/probe"]) for row in rows] == pytest.approx([float(p["probe"]) for p in probes], rel=1e-4)
    assert all(0 < float(row["before/top1"]) < 1 for row in rows)
    assert [(row["kind"], row["seed"]) for row in by_label(docs, "_moa")["two"]] == [("learner", "1"), ("learner", "2")]
    assert all(len(row["NLL"]) < 8 for row in by_label(docs, "_moa")["two"])
    assert "| learner | two | 2 |" in said and "| learner | two | up |" in said
    assert "| run | seeds | return | all_steps_to_2.8 | after/probe | after/probe_majority |" in said


def by_label(docs, name=""):
    rows = {}
    for row in results.read(docs, "pretraining", name):
        rows.setdefault(row["run"], []).append(row)
    return rows


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
        met("HOP+", "3 NS", 11, **{"learning": 2, "learning test steps": 100}),
        met("HOP+", "3 NS", 11, **{"learning": 3, "learning test steps": 300}),
        met("HOP+", "3 NS", 12, **{"learning": 3, "learning test steps": 200}),
        met("PPO", "3 NS", 11, 0, learning=0, **{scripted: 3}),
        met("PPO", "3 NS", 11, 1, learning=0, **{scripted: 2}),
        met("few", "3 NS", 11, learning=3),
    ])  # fmt: skip
    results.write(folder / "data/section_8_adaptation_repetitions.csv", [
        met("HOP+", "3 waiting", 11, sets="strangers", learning=4),
        met("HOP+", "3 waiting", 12, sets="strangers", learning=5),
        met("PPO", "3 waiting", 11, 0, "strangers", learning=3, **{scripted: 2}),
        met("PPO", "3 waiting", 11, 1, "strangers", learning=3, **{scripted: 4}),
    ])  # fmt: skip


def test_the_worst_case(tmp_path, capsys):
    """HOP+: 3 NS 0.75 and 1, 3 waiting 0.75 and 1 in its two seeds; regrets 0.5 and 0, 1 and 0"""
    write_meetings(tmp_path)
    args = experiments.Args(docs=str(tmp_path), section=("worst",), draw=True)
    references = results.references(Path(args.docs))
    assert references == {("4x4", "3 NS"): (1, 3), ("4x4", "3 waiting"): (1, 5)}
    meetings = {m.method: m for m in worst_case.read_meetings(Path(args.docs))}
    hopplus = worst_case.worst_case(meetings["HOP+"], references)
    spread = 0.125 * 12.7062  # of two values around their mean: Student's t with 1 degree of freedom
    assert hopplus.worst_score == pytest.approx((0.875, 0.875 - spread, 0.875 + spread), rel=1e-4)
    assert hopplus.mean_score == pytest.approx(hopplus.worst_score) and hopplus.num_sets == 2
    assert (hopplus.regret_set, hopplus.worst_regret[0]) == ("3 waiting", 0.5)
    scripted = worst_case.worst_case(meetings["Bayes hunter"], references)
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
    assert [row["method"] for row in rows] == ["Bayes hunter", "PPO", "HOP+"]
    assert (rows[2]["board"], rows[2]["mode"], rows[2]["test steps"]) == ("4x4", "learning", "200")
    assert (tmp_path / "results/worst_case.png").stat().st_size > 5000


def test_the_worst_is_of_means_not_of_single_seeds():
    """Each of two sets is bad in another seed: the lowest score of all is 0, in b; but the worst set is a, 0.4"""
    returns = {"a": {"1": 0.1, "2": 0.7}, "b": {"1": 1.0, "2": 0.0}}
    meeting = worst_case.Meeting("4x4", "x", "learning", returns, None)
    worst = worst_case.worst_case(meeting, dict.fromkeys([("4x4", "a"), ("4x4", "b")], (0.0, 1.0)))
    assert (worst.worst_set, worst.regret_set) == ("a", "a")
    assert worst.worst_score[0] == pytest.approx(0.4) and worst.mean_score[0] == pytest.approx(0.45)


def test_a_mean_is_over_seeds_that_met_all_sets():
    returns = {"a": {"1": 0.2, "2": 0.4, "3": 9.0}, "b": {"1": 0.6, "2": 1.0}}
    meeting = worst_case.Meeting("4x4", "x", "learning", returns, None)
    worst = worst_case.worst_case(meeting, dict.fromkeys([("4x4", "a"), ("4x4", "b")], (0.0, 1.0)))
    half = 12.7062 * 0.15
    assert worst.mean_score == pytest.approx((0.55, 0.55 - half, 0.55 + half), rel=1e-4)


def test_intervals():
    mean, low, high = results.interval(list(np.random.default_rng(1).normal(3.0, 1.0, 400)))
    assert abs(mean - 3) < 0.15 and high - low == pytest.approx(4 / np.sqrt(400), rel=0.15) and low < mean < high
    mean, low, high = results.interval([2.0])
    assert mean == 2 and math.isnan(low) and math.isnan(high), "one seed says nothing about the others"


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
    assert set(seen) == {"7", "8", "others", "dose", "walls", "time", *sections.TASKS}
